"""Sums of tables of which few rows are looked up: of these rows alone, and how many records did.

**Contribution maps.** A record that looks up k different rows, of all tables together, adds w_k =
floor(2^30 / sqrt(k)) to a whole number for each of them: k w_k^2 <= 2^60, so its map, in units of
`ONE`, has a Euclidean norm of at most 1. Whole numbers add up without rounding, so two batches that
differ in one record have counts that differ by its map, exactly, whatever else is in them. The map
is a function of which rows the record looked up, and not of its gradient: no record's can change
with the batch that it is in. Rows that never train (padding) are left out.
"""

from collections.abc import Collection, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from dpoptim.errors import PrivacyError
from dpoptim.gradients.accumulation.sums import RowTerms, Sums
from dpoptim.gradients.per_sample.sparse import sparse_rows

ONE = 1 << 30  # a count of one record that looks up one row


class TableSums(Sums):
    """The clipped sum of a table's gradients, and its rows' counts, by row.

    Args:
        table: the parameter, (rows, d).
        name: of the table, for messages. never: rows that do not count.

    **Guarantee.** The sum of every row is one in float64 of the same terms as in `Sums`, so the
    theorem in `products` holds as it stands; the counts are exact (above).
    """

    def __init__(self, table: Tensor, name: str, never: Collection[int]) -> None:
        super().__init__([table.numel()], table.device)
        self.table_shape, self.name, self._never = tuple(table.shape), name, sorted(never)
        self.restart()

    def restart(self) -> None:
        super().restart()
        self._terms = RowTerms(self.table_shape[1:], torch.float64, self.device)
        self._counts = RowTerms([], torch.int64, self.device)

    @property
    def empty(self) -> bool:
        return not self._terms

    def add_rows(self, row: Tensor, values: Tensor, weights: Tensor) -> None:
        """Add as `Sums.add_rows`, in memory for the rows that are there."""
        self._terms.add(row, values * weights[0][:, None])

    def add(self, terms: Tensor, direction: Sequence[float] | None = None) -> None:
        self.refuse()

    def settle(self) -> list[Tensor]:
        self.refuse()

    def refuse(self) -> NoReturn:
        """Refuse gradients that no lookup made."""
        raise PrivacyError(
            f"parameter {self.name!r} is used by more than lookups, so its gradient has no rows to "
            "select. Fix: dpoptim.DPSGD, whose noise reaches every row."
        )

    def add_counts(self, row: Tensor, weight: Tensor) -> None:
        """Add whole numbers to the counts of rows: both int64, (M,)."""
        self._counts.add(row, weight)

    def counted(self, row: Tensor) -> Tensor:
        """Whether each of some rows counts."""
        keep = torch.ones_like(row, dtype=torch.bool)
        for never in self._never:
            keep &= row != never
        return keep

    def take(self) -> list[Tensor | None]:
        return [self.take_rows()]

    def take_rows(self) -> Tensor:
        """The sum as a sparse tensor of the rows that are there, ascending; and a fresh start."""
        return sparse_rows(*self._terms.take(), self.table_shape)

    def take_counts(self) -> Tensor:
        """The counts as a sparse float64 tensor of the rows that are there, ascending."""
        rows, counts = self._counts.take()
        return sparse_rows(rows, counts.double() / ONE, self.table_shape[:1])


def number_of_rows(records: Sequence[Tensor], count: int) -> Tensor:
    """How many rows each of ``count`` records looked up, given the record of every one of them."""
    numbers = torch.zeros(count, dtype=torch.int64, device="cpu")
    for each in records:
        numbers += torch.bincount(each, minlength=count).cpu()
    return numbers


def weights_of(rows: Tensor) -> Tensor:
    """Return w_k of a record with k rows: the largest whole number with k w_k^2 <= 2^60."""
    k = rows.clamp(min=1)
    weight = (ONE / k.double().sqrt()).long() + 1  # at most one, or two, too large
    for _ in range(2):
        weight -= (k * weight * weight > ONE * ONE).long()
    return weight
