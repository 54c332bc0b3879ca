"""Sums that a planned run releases, and how much noise each gets: decided beforehand."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import dp_accounting
import numpy as np
from scipy.special import ndtri

from dpoptim.noise.correlated.strategy import Strategy
from dpoptim.noise.correlated.workload import Floats

ROUNDED_UP = 1 + 2.0**-40  # of deviations, so that rounding never makes them too small


@dataclass(frozen=True)
class GaussianSum:
    """The sums of a run, each entry with independent noise of std noise_multiplier * norm_bound.

    ``norm_bound`` bounds a record's part of each sum; or, where one record may move many sums, the
    root of all its squared shifts on every path, so that the run is one Gaussian of the noise
    multiplier.

    ``scales``: of the noise in each step, over that; empty: 1 in all of them.
    """

    norm_bound: float
    noise_multiplier: float
    scales: tuple[float, ...] = ()

    @property
    def standard_deviation(self) -> float:
        """Standard deviation of the noise in every entry of a step of scale 1; 0 without noise."""
        return self.noise_multiplier * self.norm_bound if self.noise_multiplier > 0 else 0.0

    def deviation(self, step: int) -> float:
        """Standard deviation of the noise in every entry of a step, counted from 0."""
        return self.standard_deviation * (self.scales[step] if self.scales else 1.0)

    def released_deviation(self, step: int) -> float:
        """The same: what is released has the noise that was drawn."""
        return self.deviation(step)


@dataclass(frozen=True)
class SelectedRows(GaussianSum):
    """Sums of which tables' rows are released only where a noisy count selects them.

    A record adds at most 1, in Euclidean norm, to the counts of the rows that it touches, and at
    most ``norm_bound`` to the sums. Both together are one Gaussian query of ``noise_multiplier``.

    ``share``: of the query's budget (of the square of mu) that the counts take, in (0, 1).
    ``false_positives``: of rows that no record touches, the proportion selected; in (0, 1).
    """

    share: float = 0.5
    false_positives: float = 0.5

    @property
    def standard_deviation(self) -> float:
        """Standard deviation of the noise on the sums, at scale 1."""
        return super().standard_deviation / math.sqrt(1 - self.share) * ROUNDED_UP

    def count_deviation(self, step: int) -> float:
        """Standard deviation of the noise on every count of a step; 0 without noise."""
        scale = self.scales[step] if self.scales else 1.0
        noise = self.noise_multiplier * scale if self.noise_multiplier > 0 else 0.0
        return noise / math.sqrt(self.share) * ROUNDED_UP

    def threshold(self, step: int) -> float:
        """The noisy count above which a row is selected; public."""
        return float(-ndtri(self.false_positives)) * self.count_deviation(step)

    def scores(self, counts: Floats, step: int) -> Floats:
        """Return how far counts lie above the threshold, in standard deviations of their noise."""
        deviation = self.count_deviation(step)
        if deviation == 0:
            return np.where(counts > 0, math.inf, -math.inf)
        return np.asarray(counts / deviation + ndtri(self.false_positives), np.float64)


@dataclass(frozen=True)
class CorrelatedSum:
    """The sums of a run with noise that later steps take back: for whoever adds the sums up.

    All steps together are **one** ``Gaussian(noise_multiplier)`` event, if one record takes part
    in at most ``participations`` of them, any two at least ``separation`` steps apart (None:
    nothing is known); ``regular``: exactly in every ``separation``-th step from some step on.
    """

    norm_bound: float
    noise_multiplier: float
    strategy: Strategy
    steps: int
    participations: int = 1
    separation: int | None = None
    regular: bool = False

    @property
    def event(self) -> dp_accounting.DpEvent:
        """The cost of the whole run."""
        return dp_accounting.GaussianDpEvent(self.noise_multiplier)

    @cached_property
    def sensitivity(self) -> float:
        """Sensitivity of the strategy's output to one record, in norm bounds."""
        return self.strategy.sensitivity(
            self.steps, self.participations, self.separation, regular=self.regular
        )

    @cached_property
    def _increments(self) -> Floats:
        # another package's strategy need not say it
        said: Callable[[int], Floats] | None = getattr(self.strategy, "increment_std", None)
        return np.full(self.steps, math.nan) if said is None else said(self.steps)

    @property
    def numbers(self) -> Floats:
        """Numbers that tell this noise from that of others, also of one fitted otherwise; public.

        Standard deviations of z's entries and of what is released in each step, (1 + steps,).
        """
        return self.standard_deviation * np.append(1.0, self._increments)

    @property
    def standard_deviation(self) -> float:
        """Standard deviation of z's entries; see `noise.correlated.strategy`."""
        return self.noise_multiplier * self.norm_bound * self.sensitivity

    def released_deviation(self, step: int) -> float:
        """Standard deviation of the noise in every entry of a release; ``nan``: not known."""
        if self.noise_multiplier == 0:
            return 0.0
        return self.standard_deviation * float(self._increments[step])


Query = GaussianSum | CorrelatedSum
