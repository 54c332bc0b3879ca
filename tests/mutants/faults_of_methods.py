"""Privacy bugs of the methods beyond DP-SGD, put into this library while a ``with`` lasts; for
testing detectors.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dpoptim.clipping import InC, SplitClipping, Units
from dpoptim.gate import CorrelatedSum, FilteredGate, SelectionGate
from dpoptim.gradients.value_clipping import value_engine
from dpoptim.gradients.value_clipping.feed_forward import (
    Layer,
    SpectralNorms,
    squared_gradient_bounds,
)
from dpoptim.methods import DiceSGD, private_quantile
from dpoptim.methods.error_feedback import ErrorFeedback, HiddenStateNoise
from dpoptim.methods.private_quantile import QuantileSearch, histogram
from dpoptim.methods.scaled_clip_norm import PrivateScales
from dpoptim.noise.correlated import BinaryTree, ToeplitzSquareRoot, tree
from dpoptim.plan import Plan
from dpoptim.sampling import FixedBatches
from dpoptim.scaled_clipping import ScaledUnits

Fault = AbstractContextManager[Any]


def clipped_before_scaled() -> Fault:
    honest = ScaledUnits.factors

    def factors(
        units: ScaledUnits, squared_norms: Mapping[str, Tensor], margin: float
    ) -> dict[str, Tensor]:
        return honest(replace(units, scales=[1.0] * len(units.of)), squared_norms, margin)

    return patch.object(ScaledUnits, "factors", factors)


def scaled_rules_taken_for_plain() -> Fault:
    """Compiled functions clip by rules derived from the usual ones as if by these."""

    def in_c(units: Units, margin: float) -> dict[str, InC]:
        return {unit: rule.in_c(margin) for unit, rule in units.rules.items()}  # type: ignore[attr-defined]

    return patch.object(Units, "in_c", in_c)


def scales_read_before_the_noise() -> Fault:
    """Scales by the sum of the step that they are for."""
    honest = PrivateScales.scaled

    def scaled(scales: PrivateScales, sums: list[list[Tensor]]) -> list[list[Tensor]]:
        largest = [float(view.abs().max()) for view in scales._views(sums[0])]
        kept, scales._scales = scales._scales, [1 / (0.1 + each) for each in largest]
        try:
            return honest(scales, sums)
        finally:
            scales._scales = kept

    return patch.object(PrivateScales, "scaled", scaled)


def moments_beside_the_whole_gradient() -> Fault:
    honest = PrivateScales.query

    def query(scales: PrivateScales, sums: list[Tensor]) -> list[Tensor]:
        whole = [total.clone() for total in sums]
        return [*whole, honest(scales, sums)[-1]]

    return patch.object(PrivateScales, "query", query)


def residual_not_clipped() -> Fault:
    def factors(rule: SplitClipping, squared: Tensor, margin: float) -> Tensor:
        kept = (rule.norm / squared.sqrt()).clamp(max=1.0)
        return torch.stack([kept, 1 - kept])

    return patch.object(SplitClipping, "factors", factors)


def error_normalised() -> Fault:
    """e scaled to C2 instead of clipped to it: a short e, too, points somewhere with full
    length.
    """

    def share(memory: ErrorFeedback, length: float, radius: float) -> float:
        return radius / length if length > 0 else 1.0

    return patch.object(ErrorFeedback, "_share", share)


def passes_counted_as_one() -> Fault:
    return patch.object(FixedBatches, "participations", lambda batches, steps: 1)


def noise_for_the_mean() -> Fault:
    honest = HiddenStateNoise.sensitivity

    def sensitivity(mechanism: HiddenStateNoise, batches: FixedBatches, steps: int) -> float:
        return honest(mechanism, batches, steps) / batches.batch_size

    return patch.object(HiddenStateNoise, "sensitivity", sensitivity)


def error_never_reset() -> Fault:
    def sensitive_state(method: DiceSGD, plan: Plan) -> ErrorFeedback:
        assert method.feedback_clip is not None
        return ErrorFeedback(method.feedback_clip * plan.batch_size, None)

    return patch.object(DiceSGD, "sensitive_state", sensitive_state)


def tree_one_level_short() -> Fault:
    def sensitivity(
        tree: BinaryTree,
        steps: int,
        participations: int = 1,
        separation: int | None = None,
        *,
        regular: bool = False,
    ) -> float:
        return math.sqrt(max(1, steps.bit_length() - 1))

    return patch.object(BinaryTree, "sensitivity", sensitivity)


def passes_of_a_tree_apart() -> Fault:
    """As if no two passes of a record lay below one node."""
    honest = tree.regular_shift
    return patch.object(
        tree,
        "regular_shift",
        lambda steps, separation, estimate: (
            honest(steps, steps, estimate) * math.sqrt(-(-steps // separation))
        ),
    )


def first_participation_only() -> Fault:
    honest = ToeplitzSquareRoot.sensitivity

    def sensitivity(
        mechanism: ToeplitzSquareRoot, steps: int, *pattern: Any, regular: bool = False
    ) -> float:
        return honest(mechanism, steps)

    return patch.object(ToeplitzSquareRoot, "sensitivity", sensitivity)


def independent_sensitivity() -> Fault:
    """Correlated noise at the size of independent noise: the strategy's sensitivity left out."""

    def deviation(query: CorrelatedSum) -> float:
        return query.noise_multiplier * query.norm_bound

    return patch.object(CorrelatedSum, "standard_deviation", property(deviation))


def solver_noise_too_small() -> Fault:
    honest = FilteredGate.deviation

    def deviation(gate: FilteredGate, norm_bound: float, mu: float) -> float:
        return 0.7 * honest(gate, norm_bound, mu)

    return patch.object(FilteredGate, "deviation", deviation)


def norm_bound_of_half() -> Fault:
    """Noise for half of what a record adds: a bound on differences taken from the average and not
    from the worst.
    """
    honest = FilteredGate.release_sum

    def release_sum(gate: FilteredGate, total: Tensor, *, norm_bound: float, mu: float) -> Tensor:
        return honest(gate, total, norm_bound=norm_bound / 2, mu=mu)

    return patch.object(FilteredGate, "release_sum", release_sum)


def norm_of_half_a_record() -> Fault:
    """A record in a random direction hardly moves the norm; one along the gradient moves it by its
    whole bound.
    """
    honest = FilteredGate.release_norm

    def release_norm(gate: FilteredGate, total: Tensor, *, norm_bound: float, mu: float) -> float:
        return honest(gate, total, norm_bound=norm_bound / 2, mu=mu)

    return patch.object(FilteredGate, "release_norm", release_norm)


def odds_not_halved() -> Fault:
    """Odds exp(epsilon score): right where a record can only raise scores, which counts around a
    rank do not obey.
    """
    honest = SelectionGate.select

    def select(gate: SelectionGate, scores: Sequence[float]) -> int:
        return honest(gate, [2 * score for score in scores])

    return patch.object(SelectionGate, "select", select)


def biases_left_out() -> Fault:
    def bounds(layers: list[Layer], inputs: list[Tensor], slopes: Tensor, *rest: Any) -> Tensor:
        honest = squared_gradient_bounds(layers, inputs, slopes, *rest)
        without = [torch.zeros_like(slopes) for _ in layers]
        return honest - squared_gradient_bounds(layers, without, slopes, *rest)

    return patch.object(value_engine, "squared_gradient_bounds", bounds)


def later_weights_left_out() -> Fault:
    return patch.object(SpectralNorms, "__getitem__", lambda norms, place: 1.0)


def counted_in_two_bins() -> Fault:
    def doubled(octaves: Tensor, votes: Tensor) -> Tensor:
        counts = histogram(octaves, votes)
        return counts + counts.roll(1)

    return patch.object(private_quantile, "histogram", doubled)


def count_beside_the_whole_gradient() -> Fault:
    honest = QuantileSearch.query

    def query(search: QuantileSearch, sums: list[Tensor]) -> list[Tensor]:
        parts = honest(search, sums)
        if search._settings.when == "all along":  # the gradients as large as without the count
            for part in parts[:-1]:
                part.div_(math.sqrt(1 - search._settings.share))
        return parts

    return patch.object(QuantileSearch, "query", query)
