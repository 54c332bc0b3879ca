"""Sums of clipped gradients that the engine should give, and how far it is off."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpoptim.clipping import Clipping
from dpoptim.gradients.accumulation.sums import RowTerms
from dpoptim.gradients.placement import Placement
from dpoptim.noise.few_rows import FewRows, Vector

WIDENED = 1 << 16  # entries that are made float64 at a time
TABLE = 1 << 16  # entries of one that is large
LEAST_BOUND = 1e-6
ANY = 1e150  # no norm is longer; infinity would have other rounding


@dataclass(frozen=True)
class Bound:
    """A bound under which engine and truth are compared.

    Attributes:
        share: of a record's norm; infinite: it clips nobody.
    """

    share: float

    def clip_norm(self, scale: float, largest: float = ANY) -> float:
        """The bound, given a record's norm, and the largest one of all."""
        return max(2 * largest if math.isinf(self.share) else self.share * scale, LEAST_BOUND)

    def factor(self, squared: Tensor, scale: float, rounding: float) -> float:
        """Factor of a record's gradient in the clipped sum."""
        found = Clipping(self.clip_norm(scale)).factors(squared.cpu().reshape(1), rounding)
        return max(float(found), 0.0)


# The first shows whether norms are each record's own; the second whether sums are read as means,
# and what scales gradients that are long.
CLIPPING_AND_NOT = Bound(0.5), Bound(math.inf)


@dataclass(frozen=True)
class ClippedSums:
    """The sums that the engine should give under a bound: at least float32, one a parameter."""

    clip_norm: float
    of: list[Vector]

    def distances(self, sums: Sequence[Vector], placement: Placement) -> list[float]:
        """How far the engine's sums are from these, each (Euclidean); writes over them."""
        squared = [squared_distance(*both) for both in zip(sums, self.of, strict=True)]
        return placement.added(torch.stack(squared)).sqrt().tolist()


class Summing:
    """Sum of clipped gradients, one record's after the other, as often as it is in a batch.

    Args:
        order: which of the records is at each place of the batch.
    """

    def __init__(self, bound: Bound, order: Sequence[int]) -> None:
        self._bound, self._order = bound, order
        self._records, self._of = 0, list[Vector]()

    def add(
        self, squared: Tensor, gradients: Sequence[Tensor], scale: float, rounding: float
    ) -> None:
        """Add the next record's."""
        self._of = self._of or [zeros_of(g) for g in gradients]
        factor = self._order.count(self._records) * self._bound.factor(squared, scale, rounding)
        self._records += 1
        if factor:
            both = zip(self._of, gradients, strict=True)
            self._of = [subtract(total, g, -factor) for total, g in both]

    def clipped(self, scale: float, largest: float) -> ClippedSums:
        return ClippedSums(self._bound.clip_norm(scale, largest), self._of)


def zeros_of(g: Tensor) -> Vector:
    """Zeros of a gradient's shape, in float32 or as many digits as it has.

    Of a large table of which few rows were looked up, in memory for few rows.
    """
    if g.dim() == 2 and g.numel() >= TABLE and 4 * int(g.ne(0).any(1).sum()) <= len(g):
        values = g.new_empty(0, g.shape[1], dtype=torch.float64)
        return FewRows(
            g.new_empty(0), 0, torch.empty(0, dtype=torch.int64, device=g.device), values
        )
    return torch.zeros_like(g, dtype=torch.promote_types(g.dtype, torch.float32))


def squared_distance(ours: Vector, truth: Vector) -> Tensor:
    """The square of the Euclidean distance of two sums: float64, a scalar on the CPU.

    Writes over ``ours`` where ``truth`` has few rows.
    """
    if isinstance(ours, FewRows):
        rest = added(ours, truth, -1.0) if isinstance(truth, FewRows) else less(ours, truth, 1.0)
        return rest.value.norm().square().cpu()
    if isinstance(truth, FewRows):
        ours.index_add_(0, truth.row, truth.value.to(ours.dtype), alpha=-1.0)
        parts = (part.double() for part in ours.reshape(-1).split(WIDENED))
    elif ours.numel() <= WIDENED:  # small: a trial has thousands of them
        apart = ours.to(torch.float64, copy=True).reshape(-1).sub_(truth.reshape(-1))
        return apart.norm().square().cpu()
    else:
        both = zip(ours.reshape(-1).split(WIDENED), truth.reshape(-1).split(WIDENED), strict=True)
        parts = (a.to(torch.float64, copy=True).sub_(b) for a, b in both)
    return torch.stack([part.norm().square() for part in parts]).sum().cpu()


def added(total: FewRows, other: FewRows, weight: float) -> FewRows:
    """A table and a weighted other one, each with few rows."""
    terms = RowTerms([total.value.shape[1]], torch.float64, total.value.device)
    terms.add(total.row, total.value)
    terms.add(other.row, other.value * weight)
    return FewRows(total.out, 0, *terms.take())


def subtract(total: Vector, g: Tensor, weight: float) -> Vector:
    """Take ``weight * g`` from ``total`` in place, a few rows at a time: each is widened first.

    Of a table in memory for few rows, in memory for these and those of ``g`` that are not zero.
    """
    if isinstance(total, FewRows):
        return less(total, g, weight)
    if g.numel() <= WIDENED:
        return total.sub_(g, alpha=weight)
    rows = max(1, WIDENED // max(1, g[0].numel() if len(g) else 1))
    for part, of_g in zip(total.split(rows), g.split(rows), strict=True):
        part.sub_(of_g, alpha=weight)
    return total


def less(total: FewRows, g: Tensor, weight: float) -> FewRows:
    """A table less the weighted rows of ``g``, of which most are zero."""
    columns = total.value.shape[1]
    terms = RowTerms([columns], torch.float64, total.device)
    terms.add(total.row, total.value)
    start = 0
    for part in g.reshape(-1, columns).split(max(1, WIDENED // columns)):
        row = part.ne(0).any(1).nonzero()[:, 0]
        terms.add(row + start, part[row].double().mul_(-weight))
        start += len(part)
    return FewRows(total.out, 0, *terms.take())
