"""The part of their public range that targets take up, found by a small part of a budget.

Noise is as large as the public range allows, so a model of targets that take up a hundredth of it
learns from a hundredth of the signal. Where they lie, and how they scatter, is private; their mean
and mean square are two sums, which are released in a few rounds, each in the range that the one
before has left.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpoptim.accounting.guarantee import Guarantee, neighbours_differ_by
from dpoptim.accounting.ledger import Ledger
from dpoptim.distributed.rank_signals import RELEASE
from dpoptim.distributed.ranks import ALONE, Ranks
from dpoptim.gate import FilteredGate
from dpoptim.gate.choices import event_ahead
from dpoptim.noise.stream import key_stream
from dpoptim.solvers.budget import Budget
from dpoptim.solvers.releases import PLANNED
from dpoptim.statistics import BOUND_ROUNDING, Rows, bounded_sum, guarantee_of
from dpoptim.target_range import TargetRange

SHARE = 0.1  # of a budget's mu^2, at most
ROUNDS = 3
# Half a range in standard deviations of targets, those that noise could add to them included.
DEVIATIONS = 3.0
# Noise over the variance at which a round is the last: one more would gain little, and find less
# scatter than there is where targets have long tails, since the last one has cut these off.
VISIBLE = 0.1
# of (z, z^2 - 1/2) for |z| <= 1: its longest are at the ends
LONGEST = math.sqrt(1.25)
WHOLE = TargetRange(0.0, 1.0)
MEAN_SHARE = 0.03  # of a budget's mu^2, for the mean residual
LARGEST_RESIDUAL = 2.0  # in units of the range that was found: six standard deviations of targets
CLEAR = 0.02  # noise of the mean residual, at most, in these units


def price_of_round(mu: float) -> float:
    """The mu of a round, where all rounds are `SHARE` of a budget's mu^2."""
    return mu * math.sqrt(SHARE / ROUNDS)


def can_be_narrowed(mu: float, n: int, neighboring: str) -> bool:
    """Whether noise of a round at this price would leave less than the whole range; public."""
    return DEVIATIONS**2 * noise_of_mean(mu, n, neighboring) < 1


def noise_of_mean(mu: float, n: int, neighboring: str) -> float:
    """Standard deviation of noise at this price on a mean over n records."""
    return neighbours_differ_by(neighboring) * LONGEST / (mu * n)


def solve_in_part(
    run: Callable[..., tuple[Tensor, Guarantee]],
    data: tuple[Any, ...],
    budget: Budget,
    *,
    intercept: bool,
    neighboring: str,
    ledger: Ledger | None,
    noise_seed: int | None,
    ranks: Ranks = ALONE,
    label: str = "estimator",
) -> tuple[Tensor, Guarantee, TargetRange]:
    """Find the range that targets take up, then train on targets scaled to it, in one reservation.

    Last, where there are records enough, the intercept is moved by the mean residual, if that is
    more than noise: clipped gradients lead towards the median, and the range cuts long tails off.

    Args:
        run: a solver of a squared loss, which takes data and budget, ledger and ranks.
        data: as `solve` takes it, targets in [-1, 1].
        intercept: whether the last of the weights is one.
        ledger: where the whole budget is charged, once, before the first release.

    Returns:
        the weights, what all of it cost, and the range, whose ends are the weights' -1 and 1.

    Raises:
        ValueError, TypeError: what the solver refuses, before anything is charged.

    **Guarantee.** The budget's. Rounds and solver are adaptive Gaussian releases, whose mu^2 add up
    to at most that of the budget; what is left for the solver is decided by what was released.
    """
    x, y, *rest = data
    n = ranks.all_sum(len(y))
    if len(y):
        first = tuple(each[:1] for each in data)
        event_ahead(
            lambda trial: run(data=first, budget=budget, ledger=trial, ranks=ALONE), neighboring
        )
    gate = FilteredGate(
        mu=budget.gdp,
        neighboring=neighboring,
        ledger=ranks.ledger(Ledger(neighboring=neighboring) if ledger is None else ledger),
        noise=key_stream(noise_seed, "range of targets"),
        label=f"{label}, range of targets, auto",
    )
    round_mu, shares = price_of_round(budget.gdp), rest[0] if rest else None
    part = spread_of_targets(gate, y, shares, n, mu=round_mu, ranks=ranks)
    y = part.in_units(y)
    mean_mu = budget.gdp * math.sqrt(MEAN_SHARE)
    centred = intercept and len(rest) < 2 and noise_of_residual(mean_mu, n, neighboring) < CLEAR
    spent = math.hypot(gate.filter.spent, mean_mu if centred else 0.0)
    left = PLANNED * math.sqrt(budget.gdp**2 - spent**2)
    gate.open(left)
    gate.count(left)
    weights, _ = run(
        data=(x, y.clip(-1, 1), *rest),
        budget=Budget(delta=budget.delta, mu=left),
        ledger=None,  # it is paid for
        ranks=ranks,
    )
    if centred:
        residuals = Residuals(x, y, weights.numpy(), shares)
        (mean,) = noisy_mean(
            gate, residuals, LARGEST_RESIDUAL, n, mu=mean_mu * PLANNED, ranks=ranks
        )
        weights[-1] += mean if abs(mean) > 2 * noise_of_residual(mean_mu, n, neighboring) else 0.0
    gate.finish()
    return weights, guarantee_of(gate, budget.delta, noise_seed=noise_seed), part


def spread_of_targets(
    gate: FilteredGate,
    y: NDArray[np.float64],
    shares: NDArray[np.float64] | None,
    n: int,
    *,
    mu: float,
    ranks: Ranks = ALONE,
) -> TargetRange:
    """The range about the mean of targets in [-1, 1]; the whole one where noise hides it.

    A range is never wider than the one before it, and where public numbers say that a round cannot
    narrow it, nothing is released for that.

    Args:
        gate: of the whole fit.
        y: this rank's targets in [-1, 1], (records,) or (records, rows); private.
        shares: of the rows of records that have several, which add up to 1; else not read.
        n: records of all ranks, public.
        mu: the price of each of at most `ROUNDS` rounds.

    **Guarantee.** Each round is mu-GDP, whatever y holds, and charged to the gate: a record adds
    (z, z^2 - 1/2) to a round's sum, z its target within the last range, released before, and cut to
    [-1, 1]; that is at most sqrt(5)/2 long, and so is a mean over its rows.
    """
    noise = noise_of_mean(mu, n, gate.neighboring)
    found = WHOLE
    for number in range(ROUNDS):
        if DEVIATIONS**2 * noise >= 1:  # if they all were the same
            break
        terms = Terms(y, shares, found)
        mean, square = noisy_mean(gate, terms, LONGEST, n, mu=mu, ranks=ranks, number=number)
        variance = square + 0.5 - mean**2
        # no numbers have such moments, but for noise: n is not how many there are
        if variance < -4 * noise * math.hypot(1.0, 2 * mean):
            break
        variance = max(0.0, variance)
        half = DEVIATIONS * math.sqrt(variance + noise)
        if half >= 1:
            break
        found = found.part(TargetRange(mean, half))
        if noise < VISIBLE * variance:
            break
    return found


def noisy_mean(
    gate: FilteredGate,
    terms: Rows,
    longest: float,
    n: int,
    *,
    mu: float,
    ranks: Ranks,
    number: int = ROUNDS,
) -> list[float]:
    """The mean over n records of terms that are cut to a length, released.

    Args:
        terms: of this rank's records. longest: a term may be.
        number: of the release, on all ranks.

    **Guarantee.** mu-GDP, and charged to the gate: a record adds a term of at most ``longest``.
    """
    own = torch.from_numpy(bounded_sum(terms, longest))
    ranks.begin(RELEASE, number)
    gate.open(mu)
    total = ranks.total(own)
    bound = longest * BOUND_ROUNDING
    released = ranks.from_first(partial(gate.release_sum, total, norm_bound=bound, mu=mu))
    if ranks.rank > 0:
        gate.count(mu)
    mean: list[float] = (released / n).tolist()
    return mean


def noise_of_residual(mu: float, n: int, neighboring: str) -> float:
    """Standard deviation of noise at this price on a mean residual; public."""
    return neighbours_differ_by(neighboring) * LARGEST_RESIDUAL / (mu * n)


class Terms:
    """(z, z^2 - 1/2) of each record, made as rows are asked for; arguments as above."""

    def __init__(
        self, y: NDArray[np.float64], shares: NDArray[np.float64] | None, within: TargetRange
    ) -> None:
        self._y, self._shares, self._range = y, shares, within
        self.shape = (len(y), 2)

    def __len__(self) -> int:
        return len(self._y)

    def __getitem__(self, rows: slice) -> NDArray[np.float64]:
        z = self._range.scaled(self._y[rows])
        return of_records(np.stack([z, np.square(z) - 0.5], axis=-1), self._shares, rows)


class Residuals:
    """Targets less what weights say, (n, 1), made as rows are asked for.

    Args:
        x: rows of features, (n, d), or (n, K, d) where records have several.
        y: targets, in units of the range that the weights were learnt in.
        weights: (d + 1,), the intercept last.
        shares: as for `spread_of_targets`.
    """

    def __init__(
        self,
        x: Any,
        y: NDArray[np.float64],
        weights: NDArray[np.float64],
        shares: NDArray[np.float64] | None,
    ) -> None:
        self._x, self._y, self._weights, self._shares = x, y, weights, shares
        self.shape = (len(y), 1)

    def __len__(self) -> int:
        return len(self._y)

    def __getitem__(self, rows: slice) -> NDArray[np.float64]:
        said = np.asarray(self._x[rows] @ self._weights[:-1]) + self._weights[-1]
        rest = np.clip(self._y[rows] - said, -LARGEST_RESIDUAL, LARGEST_RESIDUAL)
        return of_records(rest[..., None], self._shares, rows)


def of_records(
    terms: NDArray[np.float64], shares: NDArray[np.float64] | None, rows: slice
) -> NDArray[np.float64]:
    """The terms of records, (n, k), each the mean over its rows where it has several."""
    if shares is None or terms.ndim == 2:
        return terms
    mean: NDArray[np.float64] = (terms * shares[rows][..., None]).sum(1)
    return mean
