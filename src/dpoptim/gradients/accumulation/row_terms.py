"""Terms of a table's sum, by row: added up for the rows that are there."""

from collections.abc import Sequence

import torch
from torch import Tensor

PENDING = 1 << 22  # entries of terms that wait to be added up


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
