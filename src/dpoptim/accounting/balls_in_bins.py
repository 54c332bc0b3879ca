"""Cost of runs in which every record is dealt into one of several bins: by Monte Carlo.

The event is a mixture: the outputs are ``m_j`` plus Gaussian noise, j uniform among b bins that
nobody is told, against the noise alone. Only the inner products of the m_j matter
(`sampling.balls_in_bins` says why, and that larger ones cost more). The two directions'
``delta(epsilon) = E_Q (L - e^epsilon)+`` and ``E_Q (1 - e^epsilon L)+``, with the likelihood ratio
``L = mean_j exp(a_j)``, have no closed form; they are means of bounded variables, so their
estimates have an upper confidence bound (Maurer and Pontil 2009, Theorem 4).

`accounting.monte_carlo` says what the confidence rests on.

**Sampling where it matters.** Plainly drawn, one sample in 1 / delta would count. In the first
direction most of delta is where some a_i exceeds a level A. That is sampled exactly (Adler,
Blanchet and Liu 2012): i with its chance p_i to exceed A, a_i above A, the others given a_i; the
weight, ``sum p_i`` over how many exceed A, is at most ``sum p_i``. Where none does, the ratio is at
most ``L_A = mean_j min(e^a_j, e^A)``, and ``E (L_A - e^epsilon)+ <= E e^(t (L_A - e^epsilon)) / (e
t)``. If bins that are a multiple of r apart are independent, Hoelder's inequality over the r
classes bounds that by ``(E e^(t r min(e^a, e^A) / b))^(b / r)``, an integral in one dimension.
In the other direction draws are from ``N(-s mean_j m_j)``, and by Jensen's inequality weight times
variable is at most ``exp(s (v / 2 - epsilon) + s^2 u / 2) s^s / (1 + s)^(1 + s)``, v the mean of
the squared lengths and u the squared length of the mean.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.linalg import toeplitz
from scipy.special import log_ndtr, logsumexp, ndtr, ndtri_exp

from dpoptim.accounting.gaussian import gdp_epsilon
from dpoptim.accounting.monte_carlo import (
    AT_A_TIME,
    SAMPLES,
    Floats,
    MonteCarloDpEvent,
    MonteCarloProfile,
    Weighted,
    in_order,
    public_generator,
    upper_confidence_bound,
)

LINEAR_TERM = 1 / 1500  # keeps the last term of the confidence bound near a hundredth of delta
LEVEL_STEP = 0.05
MOST_CHANCES = 4  # as much as may be sampled to have less below the level
PILOTS = 3
LARGEST_SQUARE = 300.0  # of mu; beyond, ratios leave the range of a float
SQRT_TAU = math.sqrt(2 * math.pi)


@dataclass(frozen=True)
class BallsInBinsDpEvent(MonteCarloDpEvent):
    """A record's part of all outputs is one of b vectors, by a coin that nobody sees.

    Attributes:
        noise_multiplier: the noise's standard deviation; > 0.
        gram: g_0, ..., g_{b-1}: the inner product of the vectors i and j is at most
            ``gram[|i - j|]``. The Toeplitz matrix of these must be positive semidefinite.
        samples: drawn for each direction.
    """

    noise_multiplier: float
    gram: tuple[float, ...]
    samples: int = SAMPLES

    @property
    def mu(self) -> float:
        """mu of the Gaussian that dominates it: somebody tells the bin."""
        return math.sqrt(self.gram[0]) / self.noise_multiplier


class AllocationProfile(MonteCarloProfile):
    """The profile of one `BallsInBinsDpEvent`, for add-or-remove-one and zero-out.

    Args:
        event: what is evaluated. delta: where the samples are to be most useful.

    With next to no noise the cost is that of the Gaussian of somebody who is told the bin.
    """

    def __init__(self, event: BallsInBinsDpEvent, delta: float) -> None:
        super().__init__(event)
        self._bins = Bins(event)
        self._tells = event.mu**2 <= LARGEST_SQUARE
        if not self._tells:
            return
        guess = gdp_epsilon(event.mu, delta)
        for samples in (*[max(256, event.samples >> 4)] * PILOTS, event.samples):
            chance = event.samples * delta * LINEAR_TERM
            self._level = self._bins.level(chance, 0.9 * guess, delta / 50)
            self._limits = self._bins.below(self._level)
            self._pull = max(0.0, (0.9 * guess - self._bins.squared / 2) / self._bins.mean)
            self._present = self._bins.present(samples, self._level)
            self._absent = self._bins.absent(samples, self._pull)
            guess = self.epsilon(delta)

    def _bounds(self, epsilon: float, failure: float) -> tuple[float, float]:
        """Upper bounds on both directions' deltas."""
        if not self._tells:
            return 1.0, 1.0
        s, bins = self._pull, self._bins
        one = self._present
        tail = slice(int(np.searchsorted(one.ratios, epsilon)), None)
        above = np.exp(one.weights[tail]) * -np.expm1(epsilon - one.ratios[tail])
        two = self._absent
        tail = slice(0, int(np.searchsorted(two.ratios, -epsilon)))
        below = np.exp(two.weights[tail]) * -np.expm1(two.ratios[tail] + epsilon)
        least = s * (bins.squared / 2 - epsilon) + s**2 * bins.mean / 2 + entropy(s, 1 + s)
        return (
            upper_confidence_bound(above, len(one.ratios), bins.exceeded(self._level), failure)
            + math.exp(min(0.0, float(self._limits(epsilon).min()))),
            upper_confidence_bound(below, len(two.ratios), math.exp(least), failure),
        )


def entropy(a: float, b: float) -> float:
    """log(a^a / b^b), 0^0 being 1."""
    return (a * math.log(a) if a > 0 else 0.0) - b * math.log(b)


class Bins:
    """The Gaussian vector a of one event.

    Attributes:
        covariance: of a, shape (b, b). squared: its diagonal. mean: of all its entries.
    """

    def __init__(self, event: BallsInBinsDpEvent) -> None:
        self._event, self.count = event, len(event.gram)
        self.covariance = toeplitz(np.array(event.gram)) / event.noise_multiplier**2
        self.squared, self.mean = float(self.covariance[0, 0]), float(self.covariance.mean())
        values, axes = np.linalg.eigh(self.covariance)
        # The symmetric root: the same wherever it is computed, unlike the eigenvectors.
        self._root = (axes * np.sqrt(np.maximum(values, 0.0))) @ axes.T
        b, gram = self.count, np.array(event.gram)
        self._classes = next((r for r in range(1, b) if not gram[r::r].any()), b)
        nodes, weights = np.polynomial.legendre.leggauss(600)
        self._nodes, self._masses = nodes * 12, weights * 12 * np.exp(-72 * nodes**2) / SQRT_TAU

    def exceeding(self, level: float) -> Floats:
        """The chance of each a_i to exceed a level if j is the record's bin; (b, b), j first."""
        return np.asarray(
            ndtr((self.covariance - self.squared / 2 - level) / math.sqrt(self.squared))
        )

    def exceeded(self, level: float) -> float:
        """The largest sum of these."""
        return min(1e300, float(self.exceeding(level).sum(1).max()))

    def below(self, level: float) -> Callable[[float], Floats]:
        """Return logarithms of bounds on the part of delta below the level, by epsilon."""
        a = self._nodes * math.sqrt(self.squared) - self.squared / 2
        cut = np.exp(np.minimum(a, level))
        share = self._classes / self.count
        t = np.exp(np.linspace(-2, 9, 60))
        inside = logsumexp(t[:, None] * share * cut, b=self._masses, axis=1)
        outside = math.log(4e-33) + t * share * math.exp(level)
        moments = np.logaddexp(inside, outside) / share
        reserve = 0.01  # for the quadrature
        return lambda epsilon: np.asarray(moments - t * math.exp(epsilon) - 1 - np.log(t) + reserve)

    def level(self, chance: float, epsilon: float, delta: float) -> float:
        """A level that some a_i exceeds with about this chance; lower where delta requires it."""
        level = math.log(self.count) + self.squared + 8 * math.sqrt(self.squared)
        while level > -self.squared and self.exceeded(level - LEVEL_STEP) <= chance:
            level -= LEVEL_STEP
        highest = level
        while self.below(level)(epsilon).min() > math.log(delta):
            level -= LEVEL_STEP
            if self.exceeded(level) > MOST_CHANCES * chance:
                return highest  # nothing is gained
        return level

    def present(self, samples: int, level: float) -> Weighted:
        """Samples of outputs with the record, where some a_i exceeds the level."""
        rng = public_generator(self._event, "present", samples, level)
        chances = self.exceeding(level)
        sums, cumulated = chances.sum(1), np.cumsum(chances, axis=1)
        ratios, weights = [], []
        for count in self._pieces(samples):
            own = rng.integers(self.count, size=count)
            drawn = rng.random(count) * sums[own]
            chosen = np.minimum((cumulated[own] < drawn[:, None]).sum(1), self.count - 1)
            a = rng.standard_normal((count, self.count)) @ self._root
            a += self.covariance[own] - self.squared / 2
            rows = np.arange(count)
            center = self.covariance[own, chosen] - self.squared / 2
            above = (level - center) / math.sqrt(self.squared)
            # a normal number above a bound, by its upper tail
            wanted = center - math.sqrt(self.squared) * ndtri_exp(
                log_ndtr(-above) + np.log1p(-rng.random(count))
            )
            a += (self.covariance[chosen].T / self.squared * (wanted - a[rows, chosen])).T
            ratios.append(logsumexp(a, axis=1) - math.log(self.count))
            exceed = np.maximum(1, (a > level).sum(1))
            weights.append(np.log(sums[own] / exceed))
        return in_order(ratios, weights)

    def absent(self, samples: int, pull: float) -> Weighted:
        """Samples of outputs without it, pulled to where the ratio is small."""
        rng = public_generator(self._event, "absent", samples, pull)
        mean = self.covariance.mean(1)
        ratios, weights = [], []
        for count in self._pieces(samples):
            a = rng.standard_normal((count, self.count)) @ self._root
            a -= pull * mean + self.squared / 2
            ratios.append(logsumexp(a, axis=1) - math.log(self.count))
            weights.append(pull * (a.mean(1) + self.squared / 2) + pull**2 * self.mean / 2)
        return in_order(ratios, weights)

    def _pieces(self, samples: int) -> list[int]:
        most = max(1, AT_A_TIME // self.count)
        return [min(most, samples - start) for start in range(0, samples, most)]
