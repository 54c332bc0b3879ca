"""The clipped sum of one backward pass: measure, clip, add."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dpoptim.clipping import Units
from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.arithmetic.norms import LONG_BLOCK, NORM_BLOCK, added_in_turn, taper
from dpoptim.gradients.arithmetic.products import GROUP_ROWS, Groups
from dpoptim.gradients.per_sample.claimed_layers import ClaimedLayers
from dpoptim.gradients.per_sample.fused_outer import FusedOuter, fused_among
from dpoptim.gradients.per_sample.joined import Joined
from dpoptim.gradients.per_sample.per_sample_grads import Outer, PerSampleGrad
from dpoptim.gradients.per_sample.single_rows import SingleRows, largest_group
from dpoptim.gradients.record_by_record import add_record_by_record

# Told the squared norms of the records, the tapers of their factors if there are any, and the
# squared norms of what each unit has of them. Private.
Observer = Callable[[Tensor, Tensor | None, Mapping[str, Tensor]], None]
# gradients of several parameters that are taken together
Together = SingleRows | ClaimedLayers | Joined | FusedOuter


@dataclass
class Norms:
    """Measured norms of the records of a pass.

    Attributes:
        squared: norms of their gradients in each unit, float64, (B,).
        longest: the squared length of each record's longest factor, (B,), where huge gradients
            fade (see `norms.taper`).
    """

    squared: dict[str, Tensor]
    longest: Tensor | None

    def of(self, part: slice) -> "Norms":
        return Norms(
            {unit: each[part] for unit, each in self.squared.items()},
            None if self.longest is None else self.longest[part],
        )

    def whole(self) -> Tensor:
        """Squared norms of the records' whole gradients, (B,)."""
        return added_in_turn([*self.squared.values()])


@dataclass(frozen=True)
class ClippedSum:
    """How the records of a pass are clipped and summed.

    Attributes:
        units: which parameters are clipped together, and by which rule.
        margin: share of the bound that is left to rounding.
        scale: what turns sums over a record's rows into its gradient: float64, (B,); None: 1 for
            every record.
        records: B.
        device: of norms and factors.
        groups: of records that one product may sum.
        common_factor: whether all gradients carry a factor that depends on the pass's other
            records: see `products`.
    """

    units: Units
    margin: float
    scale: Tensor | None
    records: int
    device: torch.device
    groups: Groups
    common_factor: bool

    @property
    def block(self) -> int:
        """Block size of `row_squared_norms`."""
        return NORM_BLOCK if self.common_factor else LONG_BLOCK

    def add(
        self,
        gradients: dict[int, PerSampleGrad],
        sums: Sequence[Sums],
        observer: Observer | None,
        finish: Callable[[int], None] = lambda place: None,
    ) -> None:
        """Add the clipped sum to ``sums``, of all parameters, by place.

        ``finish`` is called for each place in turn, when all has been added to it. ``gradients`` is
        emptied meanwhile, to free the memory.

        Gradients that are formed in turn are measured and added record by record, when the norms
        of all others are known.
        """
        norms_of = [*gradients]
        several = self._together(gradients, sums[0].count)
        if not gradients and len(several) == 1 and self._at_once(several[0], sums, observer):
            for place in range(len(sums)):
                finish(place)
            return
        in_turn = {i: each for i, g in gradients.items() if (each := g.in_turn()) is not None}
        together = {i: gradients.pop(i) for i in norms_of if i in gradients and i not in in_turn}
        norms = self.measure(together, norms_of, several)
        if in_turn:

            def weigh(part: slice, measured: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
                for unit, each in measured.items():
                    norms.squared[unit][part] += self.scaled_squares(each, part)
                factors, _ = self.clip(norms.of(part))
                return {unit: self.scaled(each, part) for unit, each in factors.items()}

            add_record_by_record(in_turn, self.units.of, sums, self.groups, self.block, weigh)
        factors, tapers = self.clip(norms)
        if observer is not None:
            observer(norms.whole(), tapers, norms.squared)
        self.add_weighted(together, factors, sums, finish, several)

    def _together(self, gradients: dict[int, PerSampleGrad], count: int) -> list[Together]:
        """Those of several parameters that are taken together, taken out of ``gradients``."""
        units = self.units.of
        several: list[Together] = [*fused_among(gradients, units)]
        if (joined := Joined.among(gradients, units)) is not None:
            several.append(joined)
        if count == 1:
            compiled = (SingleRows.among(gradients, units), ClaimedLayers.among(gradients, units))
            several += [each for each in compiled if each is not None]
        for each in several:
            for place in each.places:
                del gradients[place]
        return several

    def _at_once(self, rows: Together, sums: Sequence[Sums], observer: Observer | None) -> bool:
        """Measure, clip and add in one call; whether that serves."""
        if type(rows) is not SingleRows or self.scale is not None or self.common_factor:
            return False
        rules = self.units.in_c(self.margin) if largest_group(self.groups) <= GROUP_ROWS else None
        if rules is None:
            return False
        squared = rows.clip_and_add(rules, sums, self.groups, self.block)
        if observer is not None:
            observer(Norms(squared, None).whole(), None, squared)
        return True

    def measure(
        self,
        gradients: Mapping[int, PerSampleGrad],
        places: Iterable[int],
        several: Sequence[Together] = (),
    ) -> Norms:
        """Measure what is summed together.

        Args:
            places: of all parameters that have gradients, in whose units nothing else may be.
            several: of those that are not among ``gradients``.
        """
        squared: dict[str, list[Tensor]] = {self.units.of[i]: [] for i in places}
        own: set[str] = set()  # units whose first part is in memory of its own
        for taken in several:
            for unit, of_taken in taken.measure(self.block).items():
                squared[unit].append(self.scaled_squares(of_taken))
                own.add(unit)
        Outer.measure_together(
            [each for each in gradients.values() if isinstance(each, Outer)], self.block
        )
        for i, each in gradients.items():
            measured = each.squared_norms(self.groups, self.block)
            squared[self.units.of[i]].append(self.scaled_squares(measured))
        return Norms(
            {
                unit: parts[0] if unit in own and len(parts) == 1 else self._added(parts)
                for unit, parts in squared.items()
            },
            self._longest([*gradients.values(), *several]),
        )

    def _longest(self, measured: Iterable[PerSampleGrad | Together]) -> Tensor | None:
        """The longest part of each record's gradient that was measured: see `Norms`."""
        if not self.common_factor:
            return None
        lengths = [each.longest() for each in measured]
        return self._stacked([self.scaled_squares(x) for x in lengths if x is not None]).amax(0)

    def _added(self, parts: list[Tensor]) -> Tensor:
        """The sum of several squared norms, in new memory, so that it may be added to."""
        return added_in_turn(parts) if parts else self._stacked(parts)[0]

    def _stacked(self, parts: list[Tensor]) -> Tensor:
        """Vectors (B,) one above the other; a row of zeros where there is none."""
        if parts:
            return torch.stack(parts)
        return torch.zeros(1, self.records, dtype=torch.float64, device=self.device)

    def scaled(self, values: Tensor, part: slice = slice(None)) -> Tensor:
        """Numbers of some records, (..., b), times their scale."""
        return values if self.scale is None else values * self.scale[part]

    def scaled_squares(self, squared: Tensor, part: slice = slice(None)) -> Tensor:
        """Squared lengths of some records, (b,), where norms are, times their scale's square."""
        squared = squared.to(self.device)
        return squared if self.scale is None else squared * self._squared_scale[part]

    @cached_property
    def _squared_scale(self) -> Tensor:
        assert self.scale is not None
        return self.scale**2

    def clip(self, norms: Norms) -> tuple[dict[str, Tensor], Tensor | None]:
        """The factors of each unit, (k, B), and what they were multiplied with (see `taper`).

        A record's factors are zero for all units or for none.
        """
        factors = self.units.factors(norms.squared, self.margin)
        if len(factors) > 1:
            countable = torch.stack([each[0] > 0 for each in factors.values()]).all(0)
            factors = {unit: torch.where(countable, each, 0.0) for unit, each in factors.items()}
        if norms.longest is None:
            return factors, None
        tapers = taper(torch.maximum(norms.whole(), norms.longest)).nan_to_num(nan=0.0)
        return {unit: each * tapers for unit, each in factors.items()}, tapers

    def add_weighted(
        self,
        gradients: dict[int, PerSampleGrad],
        factors: Mapping[str, Tensor],
        sums: Sequence[Sums],
        finish: Callable[[int], None] = lambda place: None,
        several: Sequence[Together] = (),
    ) -> None:
        """Add the weighted sums, without records of factor zero; ``gradients`` is emptied."""
        weights = {unit: self.scaled(each) for unit, each in factors.items()}
        counted = None  # all records
        if gradients:
            first = next(iter(factors.values()))[0]
            # the host does not wait for an accelerator
            every = first.shape[0] == 0 or (first.is_cpu and float(first.amin()) > 0)
            counted = None if every else first > 0
        beginning = {min(each.places): each for each in several}  # in no order of places
        for i in range(len(sums)):
            if (together := beginning.pop(i, None)) is not None:
                together.add(weights, sums, self.groups)
            if (each := gradients.pop(i, None)) is not None:
                each = each if counted is None else each.without(counted)
                of_unit = weights[self.units.of[i]].to(sums[i].device)
                each.add_weighted_sums(sums[i], of_unit, self.groups)
                del each  # which others need not have while the sum travels
            del together
            finish(i)
