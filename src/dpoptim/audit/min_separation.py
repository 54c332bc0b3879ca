"""Attack on banded noise over b-min-sep batches, without knowing the canaries' steps.

The likelihood ratio of a canary is a sum over all patterns of steps that keep their distance: here
from the first step on, where the accounting adds them up from the last.
"""

from dataclasses import dataclass

import dp_accounting
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import logsumexp

from dpoptim.accounting import compute_delta
from dpoptim.accounting.min_separation import MinSeparationDpEvent
from dpoptim.audit.banded import (
    SIMULATED,
    SimulatedMixtures,
    banded_query,
    canaries_trained,
    sampler_of,
    strategy_output,
)
from dpoptim.audit.bounds import Floats
from dpoptim.plan import Plan
from dpoptim.sampling import MinSeparationSampling

MOST_NUMBERS = 1 << 25  # of simulated runs: steps times runs
AT_A_TIME = 1 << 13
BATCHES = "b-min-sep batches"


@dataclass(frozen=True)
class MixturesOfPatterns(SimulatedMixtures):
    """Banded noise on b-min-sep batches, with any one noise multiplier.

    Args:
        column, rows: of the strategy, over its sensitivity.
        gap: b. chance: p of a coin.
    """

    column: tuple[float, ...] = ()
    rows: tuple[float, ...] = ()
    gap: int = 1
    chance: float = 1.0

    def event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        """The member with this noise."""
        lengths = (1,) * self.steps
        return MinSeparationDpEvent(
            noise_multiplier, self.column, self.rows, lengths, self.chance, self.gap
        )

    def simulated(self, noise_multiplier: float) -> tuple[Floats, Floats]:
        columns = columns_of(np.array(self.column), np.array(self.rows)) / noise_multiplier
        rng, runs = np.random.default_rng(0), min(SIMULATED, MOST_NUMBERS // self.steps)
        found: list[list[Floats]] = [[], []]
        for start in range(0, runs, AT_A_TIME):
            count = min(AT_A_TIME, runs - start)
            taken = columns @ self.drawn(count, rng)
            outputs = rng.standard_normal((self.steps, count))
            for world, seen in enumerate((outputs, outputs + taken)):
                ratios = columns.T @ seen - np.square(columns).sum(0)[:, None] / 2
                found[world].append(forward_ratios(ratios, self.gap, self.chance))
        return np.concatenate(found[0]), np.concatenate(found[1])

    def drawn(self, count: int, rng: np.random.Generator) -> Floats:
        """The steps that so many records take part in; shape (steps, count)."""
        share = self.chance / (1 + (self.gap - 1) * self.chance)
        free = rng.random(count)  # each wait of 1, ..., gap - 1 steps has the chance ``share``
        first = np.minimum((free / share).astype(np.int64) + 1, self.gap)
        first[first == self.gap] = 0
        taken = np.zeros((self.steps, count))
        for step in range(self.steps):
            mine = (first <= step) & (rng.random(count) < self.chance)
            taken[step], first[mine] = mine, step + self.gap
        return taken


def columns_of(column: Floats, rows: Floats) -> Floats:
    """C, entry by entry: shape (steps, steps)."""
    lags = np.subtract.outer(np.arange(len(rows)), np.arange(len(rows)))
    padded = np.append(column, 0.0)
    entries = padded[np.where((lags >= 0) & (lags < len(column)), lags, len(column))]
    return np.asarray(np.sqrt(rows)[:, None] * entries)


def family_apart(plan: Plan) -> MixturesOfPatterns:
    """Return the family that the plan is in, its noise apart: written down, not asked of it."""
    sampler = sampler_of(plan, MinSeparationSampling, BATCHES)
    column, rows = banded_query(plan)[1].coefficients(plan.steps)
    longest = float(np.square(columns_of(column, rows)).sum(0).max())
    share = plan.batch_size / plan.n
    return MixturesOfPatterns(
        share,
        plan.steps,
        plan.neighboring,
        column=tuple(column.tolist()),
        rows=tuple((rows / longest).tolist()),
        gap=sampler.gap,
        chance=share / (1 - (sampler.gap - 1) * share),
    )


def scores_apart(
    plan: Plan,
    present: NDArray[np.bool_],
    *,
    noise_seed: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Floats:
    """Run the plan with the canaries in ``present``, (m,), and score each one's presence: (m,)."""
    sampler = sampler_of(plan, MinSeparationSampling, BATCHES)
    query, strategy = banded_query(plan)
    with canaries_trained(plan, present, noise_seed, dtype) as (_, _, released):
        output = strategy_output(strategy, released)
    columns = columns_of(*strategy.coefficients(plan.steps))
    variance = (query.standard_deviation / query.norm_bound) ** 2
    ratios = (columns.T @ output - np.square(columns).sum(0)[:, None] / 2) / variance
    share = plan.batch_size / plan.n
    return forward_ratios(ratios, sampler.gap, share / (1 - (sampler.gap - 1) * share))


def forward_ratios(ratios: Floats, gap: int, chance: float) -> Floats:
    """log L by the log-ratios of taking part in each step, (steps, m): a filter over waits."""
    start = np.full((gap, ratios.shape[1]), chance)
    start[0] = 1.0
    waits = np.log(start / (1 + (gap - 1) * chance))  # of who must wait 0, 1, ... steps
    with np.errstate(divide="ignore"):
        out = np.log1p(-chance) if chance < 1 else -np.inf
    for ratio in ratios:
        joined, stayed = waits[0] + np.log(chance) + ratio, waits[0] + out
        waits = np.vstack([waits[1:], joined[None]]) if gap > 1 else joined[None]
        waits[0] = np.logaddexp(waits[0], stayed)
    return np.asarray(logsumexp(waits, axis=0))


def prices() -> str:
    """Compare what is charged with simulated runs: text where one is below what was seen.

    At deltas of a hundredth, which plain simulation can see; six deviations, false alarms below
    1e-8.
    """
    several: tuple[tuple[int, tuple[float, ...]], ...] = ((1, (1.0,)), (3, (0.8, 0.5, 0.33)))
    for gap, column in several:
        family = MixturesOfPatterns(
            0.2, 9, column=column, rows=(1.0,) * 9, gap=gap, chance=0.2 / (1 - (gap - 1) * 0.2)
        )
        absent, present = family.simulated(0.8)
        for epsilon in (1.0, 3.0):
            charged = compute_delta(family.event(0.8), epsilon, "zero-out").delta
            for lost in (-np.expm1(epsilon - present), -np.expm1(epsilon + absent)):
                seen = np.maximum(lost, 0)
                least = float(seen.mean() - 6 * seen.std() / np.sqrt(len(seen)))
                if charged < least:
                    return (
                        f"refuted: b-min-sep batches {gap} steps apart: delta {charged:.2g} is "
                        f"charged at epsilon {epsilon:g}, and at least {least:.2g} was seen"
                    )
    return ""
