"""Per-sample gradients of one parameter: norms first, then weighted sums.

Each class describes the per-record gradients of one parameter for the B records of a backward pass
and answers two questions: the squared norm of each record's gradient, and ``sum_i weights[j, i] *
gradient_i`` for each j (mostly one). Two rules keep this honest:

* a norm is measured on the very numbers that are summed. Formulas that get the norm another way
  (the Gram form ``sum_st (a_s . a_t)(g_s . g_t)``) round differently from the sum, and
  cancellation inside a record makes the difference as large as an adversary likes;
* which formula is used depends on the layer and on public numbers alone, never on how many
  records, or how long, share the batch: otherwise one record could change the clip factors of all
  the others.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.arithmetic.batch_invariant import aligned
from dpoptim.gradients.arithmetic.norms import NORM_BLOCK, row_squared_norms, squared_norms_together
from dpoptim.gradients.arithmetic.precision import NARROW
from dpoptim.gradients.arithmetic.products import Groups, add_weighted_outer, add_weighted_rows
from dpoptim.gradients.choose_formula import PublicSizes
from dpoptim.gradients.per_sample.fused_factors import FusedLayer

# of a product that is not zero: longer ones would leave float32 when they are weighted; as long
# as `norms.SAFE_SQUARES` allow
LONGEST_FACTOR = 2.0**60


class PerSampleGrad(ABC):
    """The per-record gradients of one parameter in one backward pass."""

    @abstractmethod
    def squared_norms(self, groups: Groups, block: int = NORM_BLOCK) -> Tensor:
        """Each record's squared gradient norm: float64, (B,); not finite if it does not count.

        Args:
            groups: as in `add_weighted_sums`. What is formed twice is formed in the same chunks
                both times.
            block: of `row_squared_norms`.
        """

    @abstractmethod
    def materialise(self, records: slice) -> Tensor:
        """The gradients themselves, (records, number of entries), for oracles and mixed uses."""

    @abstractmethod
    def add_weighted_sums(self, sums: Sums, weights: Tensor, groups: Groups) -> None:
        """Add ``sum_i weights[j, i] * gradient_i`` to the j-th of ``sums``, parameter-sized.

        Args:
            weights: float64, shape (k, B).
            groups: of records that one product may sum (see `products`).
        """

    @abstractmethod
    def without(self, keep: Tensor) -> "PerSampleGrad":
        """The same with all numbers of the records outside ``keep`` (bool, shape (B,)) zero."""

    def chosen(self, public: PublicSizes) -> "PerSampleGrad":
        """The same, to be measured by the formula that is cheapest.

        **Guarantee.** The choice is by public numbers: these, and shapes, devices and dtypes.
        """
        return self

    def in_turn(self) -> "OneByOne | None":
        """The gradients formed for one record after the other, if they are `chosen` for that.

        They are then measured and summed in that way (see `record_by_record`).
        """
        return None

    def fused_layer(self) -> FusedLayer | None:
        """The gradients as `fused_outer` takes them, if they are `chosen` for that."""
        return None

    def longest(self) -> Tensor | None:
        """Squared length, (B,), of records' longest factors, if gradients are measured by these."""
        return None


FormMeasured = Callable[[slice, Tensor, Tensor, int], None]
FormAdded = Callable[[slice, Tensor, Sequence[float], slice], Tensor]


def record_by(form_measured: FormMeasured, entries: int) -> Callable[[int], Tensor]:
    """`Chunk.form` where there is a `Chunk.form_measured`."""

    def form(record: int) -> Tensor:
        room = aligned(torch.empty(1, entries, dtype=torch.float32, device="cpu"))
        norm = torch.empty(1, 1, dtype=torch.float32, device="cpu")
        form_measured(slice(record, record + 1), room, norm, max(1, entries))
        return room[0]

    return form


@dataclass(frozen=True)
class Chunk:
    """Consecutive entries of a parameter, whose gradients are formed record by record.

    How a parameter is cut is decided by public numbers.

    Attributes:
        start, entries: of the first, in the order of `OneByOne.in_order`, and how many.
        form: maps a record to their gradient: float32, (entries,), dense, from a 64-byte boundary
            on. It is asked by one thread at a time.
        form_few: maps some consecutive records, and room for them, to all their gradients, (b,
            entries), in that room if it is not None: each as ``form`` has it. None: there is no
            faster way than ``form``.
        form_measured: forms all gradients of some consecutive records in room for them, (b,
            entries), and writes what `norms.read_part` would of them, for blocks of so many
            entries. Where it is there it is used.
        of_rows: makes a ``form_measured`` for records of K consecutive rows each, whose gradients
            are the sums over the rows that ``keep``, bool, (rows,), has (None: all). Takes K and
            ``keep``. None: rows are formed one by one, and added up.
        form_added: forms some pieces of the gradients of some consecutive records as ``form`` has
            them, adds each times its weight to a total, float32, (entries,), and returns the
            squared norms of each piece, float64, (pieces, b), as `norms.in_blocks` reads them;
            zero, and nothing added, where the weight is zero.
        pieces: that threads may share.
        positions: that a gradient is a sum over; its entries times these are the work by which
            chunks are dealt to threads.
    """

    start: int
    entries: int
    form: Callable[[int], Tensor]
    form_few: Callable[[slice, Tensor | None], Tensor] | None = None
    form_measured: FormMeasured | None = None
    of_rows: Callable[[int, Tensor | None], FormMeasured] | None = None
    form_added: FormAdded | None = None
    pieces: int = 1
    positions: int = 1


class OneByOne(Protocol):
    """Gradients that can be formed for one record after the other."""

    def one_by_one(self) -> list[Chunk]:
        """Returns the chunks that make up the gradient of one record."""
        ...

    def in_order(self, total: Tensor) -> Tensor:
        """A sum of such gradients, (k, entries), with the entries in the parameter's order."""
        ...


def zero_outside(x: Tensor, keep: Tensor) -> Tensor:
    """Put zeros in the place of records outside ``keep``: a product 0 * NaN would stay NaN."""
    return torch.where(
        keep.to(x.device).view(-1, *[1] * (x.dim() - 1)),
        x,
        torch.zeros((), dtype=x.dtype, device=x.device),
    )


@dataclass(frozen=True)
class Dense(PerSampleGrad):
    """Gradients that are stored: ``values`` of shape (B, ...), narrow dtypes as float32."""

    values: Tensor

    def __post_init__(self) -> None:
        if self.values.dtype in NARROW:
            object.__setattr__(self, "values", self.values.float())

    def squared_norms(self, groups: Groups, block: int = NORM_BLOCK) -> Tensor:
        return row_squared_norms(self.values, block=block)

    def materialise(self, records: slice) -> Tensor:
        values = self.values[records]
        return values[:, None] if values.dim() == 1 else values.flatten(1)

    def add_weighted_sums(self, sums: Sums, weights: Tensor, groups: Groups) -> None:
        add_weighted_rows(sums, self.materialise(slice(None)), weights, groups)

    def without(self, keep: Tensor) -> "Dense":
        return Dense(zero_outside(self.values, keep))


@dataclass
class Outer(PerSampleGrad):
    """Gradients ``outer(g[i], a[i])``, (B, p) and (B, d), never formed: |g| |a| is the norm."""

    g: Tensor
    a: Tensor
    _left: Tensor | None = field(default=None, repr=False)
    _right: Tensor | None = field(default=None, repr=False)
    _squared: Tensor | None = field(default=None, repr=False)
    # whether no factor is known to be zero, or too long
    _tame: bool = field(default=False, repr=False, kw_only=True)

    @staticmethod
    def measure_together(several: Sequence["Outer"], block: int) -> None:
        """Measure the factors of all, for `squared_norms`: to the same bits, in less time."""
        if several:
            both = [each.g for each in several] + [each.a for each in several]
            squared, tame = squared_norms_together(both, block=block)
            for each, left, right in zip(
                several, squared[: len(several)], squared[len(several) :], strict=True
            ):
                each._left, each._right, each._tame = left, right, tame

    def left_squared_norms(self, block: int = NORM_BLOCK) -> Tensor:
        """Squared norms of ``g``, measured once for a weight and its bias."""
        if self._left is None:
            self._left = row_squared_norms(self.g, block=block)
        return self._left

    def squared_norms(self, groups: Groups, block: int = NORM_BLOCK) -> Tensor:
        left = self.left_squared_norms(block)
        right = row_squared_norms(self.a, block=block) if self._right is None else self._right
        self._squared = left * right if self._tame else product_of_squares(left, right)
        return self._squared

    def longest(self) -> Tensor:
        """Squared norms of ``g``: beyond a length a norm is not finite, however short ``a`` is."""
        return self.left_squared_norms()

    def bias(self) -> "Bias":
        """Gradients of the bias beside such a weight."""
        return Bias(self)

    def materialise(self, records: slice) -> Tensor:
        return (self.g[records, :, None] * self.a[records, None, :]).flatten(1)

    def add_weighted_sums(self, sums: Sums, weights: Tensor, groups: Groups) -> None:
        # a weight above 1 could carry the one factor to infinity beside zeros in the other
        if self._squared is not None and not self._tame:
            weights = torch.where(self._squared == 0, 0.0, weights)
        add_weighted_outer(sums, self.g, self.a, weights, groups)

    def without(self, keep: Tensor) -> "Outer":
        return Outer(zero_outside(self.g, keep), zero_outside(self.a, keep), _squared=self._squared)


def product_of_squares(left: Tensor, right: Tensor) -> Tensor:
    """Squared norms of products of vectors, from those of the two.

    Infinite where one is too long, and none is zero.
    """
    too_long = torch.maximum(left, right) > LONGEST_FACTOR**2
    return torch.where(too_long & (left > 0) & (right > 0), torch.inf, left * right)


@dataclass(frozen=True)
class Bias(PerSampleGrad):
    """Gradients ``g[i]`` of a bias whose weight has the gradients ``outer(g[i], a[i])``."""

    outer: Outer

    def squared_norms(self, groups: Groups, block: int = NORM_BLOCK) -> Tensor:
        return self.outer.left_squared_norms(block)

    def materialise(self, records: slice) -> Tensor:
        return self.outer.g[records]

    def add_weighted_sums(self, sums: Sums, weights: Tensor, groups: Groups) -> None:
        add_weighted_rows(sums, self.outer.g, weights, groups)

    def without(self, keep: Tensor) -> "Bias":
        return Bias(self.outer.without(keep))
