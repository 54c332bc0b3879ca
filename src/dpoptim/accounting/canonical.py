"""The form of an event that accountants read: distinct simple events and how often each happened.

**Scale of an event.** Everywhere in this library the noise multiplier of a Gaussian event is the
standard deviation of the noise on the *sum*, over the bound C on one record's norm, for every
neighbouring relation (under replace-one the sum's sensitivity is 2C, and the evaluation accounts
for it). A Laplace event instead stands for a selection or query that is `1/noise_multiplier`-DP
under the relation in use, and a zCDP event for `rho` under the relation in use; these two are
never rescaled.
"""

import math
from collections import Counter
from collections.abc import Iterator
from numbers import Integral, Real

import dp_accounting as dp
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from dpoptim.accounting.monte_carlo import MonteCarloDpEvent, with_told_events

LEAST_NOISE = 1e-154  # whose square float64 still has
Leaves = tuple[tuple[dp.DpEvent, int], ...]
"""Pairs (event, count >= 1); no two events are equal, and at most one is a plain Gaussian."""


class NotCoveredError(ValueError):
    """An event that an accountant does not evaluate under a relation, whatever its numbers."""


def canonical(event: dp.DpEvent) -> Leaves:
    """`event` without its composition: nothing nested, equal events merged, Gaussians made one.

    Gaussians merge exactly: their noise multipliers z_t compose to `(sum of z_t^-2)^(-1/2)`, also
    when they are answered on one and the same Poisson batch. The result does not depend on the
    order of composition.

    A `MonteCarloDpEvent` stays what it is where it is alone; beside others it is the Gaussian that
    dominates it.

    Raises TypeError if `event` is not an event, and ValueError for a rate, count or noise
    multiplier out of range and for a type of event that is not evaluated here.
    """
    counts: Counter[dp.DpEvent] = Counter()
    precision: list[float] = []  # z^-2 of every Gaussian
    for leaf, count in _walk(event, 1):
        if isinstance(leaf, dp.GaussianDpEvent):
            precision.append(count / leaf.noise_multiplier**2)
        else:
            counts[leaf] += count
    if precision:
        counts[dp.GaussianDpEvent(math.fsum(precision) ** -0.5)] = 1
    leaves = tuple(sorted(counts.items(), key=repr))
    alone = len(leaves) == 1 and leaves[0][1] == 1
    if not alone and any(isinstance(leaf, MonteCarloDpEvent) for leaf, _ in leaves):
        return canonical(with_told_events(leaves))
    return leaves


def relative_to_sensitivity(event: dp.DpEvent, relation: dp.NeighboringRelation) -> dp.DpEvent:
    """`event` with Gaussians as `dp_accounting`'s RDP takes them: noise over sensitivity, not C."""
    # for the relation in use already
    stated = isinstance(event, (dp.LaplaceDpEvent, dp.ZCDpEvent))
    if stated or relation is not dp.NeighboringRelation.REPLACE_ONE:
        return event
    if isinstance(event, dp.GaussianDpEvent):
        return dp.GaussianDpEvent(event.noise_multiplier / 2)
    if isinstance(event, dp.SelfComposedDpEvent):
        return dp.SelfComposedDpEvent(relative_to_sensitivity(event.event, relation), event.count)
    if isinstance(event, dp.ComposedDpEvent):
        return dp.ComposedDpEvent(
            [relative_to_sensitivity(inner, relation) for inner in event.events]
        )
    if isinstance(event, dp.SampledWithoutReplacementDpEvent):
        inner = relative_to_sensitivity(event.event, relation)
        return dp.SampledWithoutReplacementDpEvent(
            event.source_dataset_size, event.sample_size, inner
        )
    if isinstance(event, RepeatAndSelectDpEvent):
        return RepeatAndSelectDpEvent(
            relative_to_sensitivity(event.event, relation), event.mean, event.shape
        )
    raise NotCoveredError(
        f"event: {type(event).__name__} cannot be evaluated by RDP under replace-one; "
        'use neighboring="zero-out" or "add-or-remove-one"'
    )


def _walk(event: dp.DpEvent, times: int) -> Iterator[tuple[dp.DpEvent, int]]:
    """The simple events of `event`, validated, each with its number of uses."""
    match event:
        case _ if times == 0:
            return
        case dp.NoOpDpEvent():
            return
        case dp.SelfComposedDpEvent(event=inner, count=count):
            yield from _walk(inner, times * _checked_count(count))
        case dp.ComposedDpEvent(events=events):
            for inner in events:
                yield from _walk(inner, times)
        case dp.PoissonSampledDpEvent(sampling_probability=rate, event=inner):
            yield from _sampled(_checked_rate(rate), inner, times)
        case dp.SampledWithoutReplacementDpEvent(
            source_dataset_size=n, sample_size=size, event=inner
        ):
            _checked_rate(size / n)
            yield dp.SampledWithoutReplacementDpEvent(n, size, _rebuilt(canonical(inner))), times
        case RepeatAndSelectDpEvent(event=inner, mean=mean, shape=shape):
            if not (1 < mean < math.inf and 0 <= shape < math.inf):
                raise ValueError(
                    f"event: expected a mean above 1 and a shape of at least 0, got {mean!r} and "
                    f"{shape!r}"
                )
            yield RepeatAndSelectDpEvent(_rebuilt(canonical(inner)), mean, shape), times
        case _:
            _check_simple(event)
            yield event, times


def _check_simple(event: object) -> None:
    match event:
        case dp.GaussianDpEvent(noise_multiplier=noise) | dp.LaplaceDpEvent(noise_multiplier=noise):
            _check_noise(noise)
        case dp.TruncatedSubsampledGaussianDpEvent(
            sampling_probability=rate, noise_multiplier=noise
        ):
            _checked_rate(rate)
            _check_noise(noise)
        case MonteCarloDpEvent():
            _check_noise(event.noise_multiplier)
        case dp.ZCDpEvent(rho=rho, xi=xi):
            if not (0 <= rho < math.inf and 0 <= xi < math.inf):
                raise ValueError(
                    f"event: rho and xi of zCDP must be >= 0 and finite, got {event!r}"
                )
        case dp.DpEvent():
            raise ValueError(
                f"event: {type(event).__name__} is not evaluated, because no accountant here can "
                "be trusted with it; describe the release by Gaussian, Laplace, zCDP or "
                "Poisson-sampled events"
            )
        case _:
            raise TypeError(f"event: expected a dp_accounting.DpEvent, got {event!r}")


def _sampled(rate: float, inner: dp.DpEvent, times: int) -> Iterator[tuple[dp.DpEvent, int]]:
    leaves = canonical(inner)
    if any(isinstance(leaf, MonteCarloDpEvent) for leaf, _ in leaves):
        leaves = canonical(with_told_events(leaves))
    if rate == 1.0:
        yield from ((leaf, count * times) for leaf, count in leaves)
    elif leaves:
        yield dp.PoissonSampledDpEvent(rate, _rebuilt(leaves)), times


def _rebuilt(leaves: Leaves) -> dp.DpEvent:
    """One event again: what is answered on one sampled batch. Only Gaussians are merged there."""
    if len(leaves) == 1 and leaves[0][1] == 1:
        return leaves[0][0]
    # A tuple where dp_accounting has a list, so that events can be counted and cached.
    return dp.ComposedDpEvent(tuple(dp.SelfComposedDpEvent(leaf, count) for leaf, count in leaves))


def _checked_count(count: object) -> int:
    if isinstance(count, bool) or not isinstance(count, Integral) or count < 0:
        raise ValueError(f"event: a count must be an integer >= 0, got {count!r}")
    return int(count)


def _checked_rate(rate: object) -> float:
    if not isinstance(rate, Real) or not 0 < float(rate) <= 1:
        raise ValueError(
            f"event: the sampling probability must be in (0, 1], got {rate!r}; it is the expected "
            "batch size divided by the number of records"
        )
    return float(rate)


def _check_noise(noise_multiplier: object) -> None:
    known = isinstance(noise_multiplier, Real)
    if not known or not LEAST_NOISE <= float(noise_multiplier) < math.inf:  # type: ignore[arg-type]
        raise ValueError(
            f"event: the noise multiplier must be at least {LEAST_NOISE:g} and finite, got "
            f"{noise_multiplier!r}; it is the noise's standard deviation over the clip norm"
        )
