"""Sums of weighted gradients: in float64, whatever they were multiplied in."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dpoptim.clipping import Directions
from dpoptim.gradients.memory import ReusedMemory
from dpoptim.noise.few_rows import FewRows

LARGE = 1 << 20  # entries of a table whose looked-up rows are summed alone, at least
MOST_ROWS = 4  # times as many entries as a sum by rows may have the table has, at least
AS_IT_CAME = (torch.float32, torch.float64)  # dtypes of a first term that is kept
PENDING = 1 << 22  # entries of terms that wait to be added up


class Sums:
    """Sums of the same records, one for each way a clipping rule weighs them (k).

    They are added up in float64. Of a sum that has one term the term is kept as it came: mostly
    float32, in half the memory. Without a term a sum takes none. Of a large table that is nothing
    but looked up, the only sum takes memory for the rows that were.

    Args:
        shape, device: of each sum.
        directions: see `clipping.Directions`.
        reuse: keep the float64 memory that `settle` fills with zeros, from one step to the next:
            fresh pages cost more than zeros.
    """

    def __init__(
        self,
        shape: Sequence[int],
        device: torch.device | None = None,
        directions: Directions = ((1.0,),),
        *,
        reuse: bool = False,
    ) -> None:
        self.shape, self.device, self.directions = tuple(shape), device, directions
        self.entries, self.count = math.prod(shape), len(directions[0])
        self._held: list[Tensor | None] = [None] * self.count
        self._rows: RowTerms | None = None  # of the first sum, which then holds nothing else
        self._reuse = reuse
        self._used: dict[int, Tensor] = {}  # memory to use again
        self._written = ReusedMemory()

    def restart(self) -> None:
        self._held, self._rows = [None] * self.count, None

    @property
    def empty(self) -> bool:
        """Whether nothing has been added to any."""
        return self._rows is None and all(each is None for each in self._held)

    def add(self, terms: Tensor, direction: Sequence[float] | None = None) -> None:
        """Add a term to each: any float dtype, k times as many entries, the first sum's first.

        The memory of ``terms`` is given away: it may be written to, or kept.

        Args:
            direction: where given there is one term, which is added to every sum as many times.
        """
        if self._rows is not None:
            self._write_out()
        count = self.count if direction is None else 1
        each: Sequence[Tensor] = (terms,)
        if count > 1:
            each = terms.view(count, *self.shape).unbind()
        elif terms.shape != self.shape:
            each = (terms.view(self.shape),)
        for j, held in enumerate(self._held):
            term, times = (each[j], 1.0) if direction is None else (each[0], direction[j])
            if times == 0:
                continue
            if held is not None:
                self._held[j] = held.double().add_(term, alpha=times)
            elif direction is None and term.dtype in AS_IT_CAME:
                self._held[j] = term
            else:  # other sums may get the same term; multiplied afterwards, so that float64 rounds
                self._held[j] = term.to(torch.float64, copy=True).mul_(times)

    def settle(self) -> list[Tensor]:
        """The sums so far, in float64, to be added to in place: zeros where there was no term."""
        self._write_out()
        settled = [
            self._zeros(j) if held is None else held.double() for j, held in enumerate(self._held)
        ]
        self._held = [*settled]
        return settled

    def add_rows(self, row: Tensor, values: Tensor, weights: Tensor) -> None:
        """Add ``weights[j, m] * values[m]`` to row ``row[m]`` of sum j: (M,), (M, d), (k, M).

        ``values`` in float64, and the sums those of tables with d columns.
        """
        columns = values.shape[1]
        if self.count == 1 and self.entries >= LARGE and self._held[0] is None:
            if self._rows is None:
                self._rows = RowTerms([columns], torch.float64, self.device)
            if self._rows.add(row, values * weights[0][:, None]):
                rows, _ = self._rows.added_up()
                if len(rows) * columns * MOST_ROWS > self.entries:
                    self._write_out()
            return
        for total, each in zip(self.settle(), weights, strict=True):
            total.view(-1, values.shape[1]).index_add_(0, row, values * each[:, None])

    def take(self) -> list[Tensor | None]:
        """The sums as they are held, float32 or float64, and a fresh start; None: no term.

        They may be changed in place until the next term comes.
        """
        if self._rows is not None:
            self._write_out()
        taken, self._held = self._held, [None] * self.count
        return taken

    def take_few_rows(self, dtype: torch.dtype) -> FewRows | None:
        """The only sum where it is one of few rows, to be written in ``dtype``; a fresh start.

        None: it is not, and nothing is taken.
        """
        if self._rows is None or dtype not in AS_IT_CAME:
            return None
        out = self._written.take(self.entries, dtype, self.device)
        taken = FewRows(out, 0, *self._rows.take())
        self.restart()
        return taken

    def _write_out(self) -> None:
        """Hold the sum of some rows as one of all."""
        if self._rows is not None:
            (rows, sums), self._rows = self._rows.take(), None
            self._held[0] = total = self._zeros(0)
            total.view(-1, sums.shape[1]).index_add_(0, rows, sums)

    def _zeros(self, j: int) -> Tensor:
        if j in self._used:
            return self._used[j].zero_()
        zeros = torch.zeros(self.shape, dtype=torch.float64, device=self.device)
        if self._reuse:
            self._used[j] = zeros
        return zeros


class RowTerms:
    """The sum of a table of which few rows hold anything.

    Args:
        shape: of a row; empty: a number. dtype, device: of the terms.

    **Guarantee.** A row's terms are added up in the order in which they came, from 0, as
    ``index_add_`` adds them to a table: the sums have the same bits, and the theorem in `products`
    holds as it stands.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None
    ) -> None:
        self._shape, self._dtype, self._device = tuple(shape), dtype, device
        self.restart()

    def restart(self) -> None:
        self._rows: list[Tensor] = []
        self._terms: list[Tensor] = []
        self._pending, self._room = 0, PENDING

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, row: Tensor, terms: Tensor) -> bool:
        """Add terms to rows: int64 (M,), and (M, *shape). Whether all are added up now."""
        self._rows.append(row)
        self._terms.append(terms)
        self._pending += terms.numel()
        if self._pending <= self._room:
            return False
        self.added_up()
        self._room = max(PENDING, 2 * self._pending)  # so that terms are added up few times
        return True

    def added_up(self) -> tuple[Tensor, Tensor]:
        """The rows that hold something, ascending, and what."""
        row = torch.zeros(0, dtype=torch.int64, device=self._device)
        terms = torch.zeros(0, *self._shape, dtype=self._dtype, device=self._device)
        if len(self._rows) == 1:
            row, terms = self._rows[0], self._terms[0]
        elif self._rows:
            row, terms = torch.cat(self._rows), torch.cat(self._terms)
        self._rows, self._terms = [], []  # freed before there are sums
        rows, sums = added_up(row, terms)
        self._rows, self._terms, self._pending = [rows], [sums], sums.numel()
        return rows, sums

    def take(self) -> tuple[Tensor, Tensor]:
        """As `added_up`, and a fresh start."""
        taken = self.added_up()
        self.restart()
        return taken


def added_up(row: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Add the values of equal rows: the different rows, ascending, and their sums."""
    rows, place = torch.unique(row, return_inverse=True)
    return rows, values.new_zeros(len(rows), *values.shape[1:]).index_add_(0, place, values)
