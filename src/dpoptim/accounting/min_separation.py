"""Cost of runs whose records toss a coin in each step but those soon after taking part.

The event is the mixture of ``N(m_B, s^2 I)``, B a pattern of b-min-sep sampling, against
``N(0, s^2 I)`` (`sampling.min_separation` says why). The likelihood ratio is a recursion over the
steps, and both directions' deltas are means of bounded variables, as for bins
(`accounting.monte_carlo` says what the confidence rests on).

**With the record.** ``delta = E_P (1 - e^epsilon / L)+``. Draws are from ``Q L^a / Z_a`` in place
of P, exactly (`accounting.replicas`), so the variable's weight is ``Z_a L^(1 - a)``. With ``x =
e^epsilon / L`` in (0, 1], variable times weight is ``Z_a e^(-(a - 1) epsilon) x^(a - 1) (1 - x)``,
at most ``Z_a e^(-(a - 1) epsilon) (1 - 1 / a)^(a - 1) / a``: the bound on delta that follows from
the Renyi divergence of order a, which needs no sample, is the most that a sample can be. So a
sample in a hundred or so counts, where plainly drawn one in 1 / delta would. No sample decides the
order a: it is the lowest whose bound on epsilon is nearly the least.

**Without it.** ``delta = E_Q (1 - e^epsilon L)+``. Patterns only add to L, so it is seldom small,
and its lower tail has a bound from few samples: log L is a convex function of the Gaussian y, so
its sublevel sets are convex, and by Ehrhard's inequality (1983) ``G(t) = Phi^-1(Q(log L <= t))`` is
a concave function. Left of two points G is below the straight line through them. With order
statistics for the points, of ranks chosen before, the chances below these have Beta distributions,
whose quantiles bound the higher point's G from below and the lower one's from above. With ``G(-x)
<= u - v x`` for all x >= epsilon, delta is at most that of a normal log L of mean -u / v and
deviation 1 / v.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.special import betaincinv, ndtr, ndtri

from dpoptim.accounting.gaussian import gdp_epsilon
from dpoptim.accounting.monte_carlo import (
    AT_A_TIME,
    Floats,
    MonteCarloDpEvent,
    MonteCarloProfile,
    Weighted,
    in_order,
    public_generator,
    upper_confidence_bound,
)
from dpoptim.accounting.replicas import Replicas, states_of

ORDERS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20)  # numbers of copies
NEARLY = 1.06  # times the least bound: lower orders are drawn faster, and cost no more there
EXCESS = 1.07  # about what the Renyi bound is above the fine one, for n / batch from 10 to 1,000
MOST_WORK = 1 << 28  # states times steps: seconds
LARGEST_WEIGHT = 300.0  # logarithm, of all copies in one step
FEWEST = 1 << 10  # samples
SAMPLES = 1 << 15
ROUNDING = 1e-7  # of logarithms of ratios and weights; what is computed errs by 1e-9 at most
LOW_RANKS = (4, 6, 8, 10)  # powers of 1/2, of the samples
HIGH_RANKS = (1, 3)


@dataclass(frozen=True)
class MinSeparationDpEvent(MonteCarloDpEvent):
    """A record's part of all outputs is a sum of columns, b steps apart or more, by coins.

    Column t has ``sqrt(r_(t + k)) c_k`` in row t + k, or less.

    Attributes:
        noise_multiplier: the noise's standard deviation; > 0.
        column: c_0, c_1, ..., at most ``separation``; >= 0.
        levels: values of r; >= 0. lengths: for how many rows each is r, one after the other.
        rate: p in (0, 1], the chance to take part of who did not in the last b - 1 steps; before
            the first step all is as it is in the long run.
        separation: b >= 1.
        samples: drawn for each direction.
    """

    noise_multiplier: float
    column: tuple[float, ...]
    levels: tuple[float, ...]
    lengths: tuple[int, ...]
    rate: float
    separation: int
    samples: int = SAMPLES

    def __post_init__(self) -> None:
        if not (0 < self.rate <= 1 and 1 <= len(self.column) <= self.separation):
            raise ValueError(
                f"event: expected a rate in (0, 1], got {self.rate!r}, and a column of 1 to "
                f"separation={self.separation} entries, got {len(self.column)}"
            )
        if min(*self.column, *self.levels) < 0 or self.steps < 1:
            raise ValueError("event: expected column and levels of numbers >= 0, and a step")
        if self.samples < FEWEST:
            raise ValueError(f"event: expected {FEWEST} samples or more, got {self.samples}")

    @property
    def steps(self) -> int:
        return sum(self.lengths)

    @property
    def columns(self) -> sparse.csr_matrix:
        """All columns; shape (steps, steps)."""
        rows = np.sqrt(np.repeat(self.levels, self.lengths))
        lags = -np.arange(min(len(self.column), self.steps))
        entries = [np.full(self.steps + lag, self.column[-lag]) for lag in lags]
        return sparse.csr_matrix(
            sparse.diags(rows) @ sparse.diags(entries, lags, shape=(self.steps, self.steps))
        )

    @property
    def mu(self) -> float:
        most = math.ceil(self.steps / self.separation)
        longest = float(self.products[:, 0].max())  # over the noise's variance
        return math.sqrt(most * longest)

    @property
    def products(self) -> Floats:
        """Inner products with the columns of d < b steps before: (steps, b), over the variance."""
        columns = self.columns
        gram = columns.T @ columns
        products = np.zeros((self.steps, self.separation))
        for lag in range(min(len(self.column), self.steps)):
            products[lag:, lag] = gram.diagonal(-lag)
        return products / self.noise_multiplier**2


class SeparationProfile(MonteCarloProfile):
    """The profile of one `MinSeparationDpEvent`, for add-or-remove-one and zero-out.

    Args:
        event: what is evaluated. delta: where the samples are to be most useful.
    """

    def __init__(self, event: MinSeparationDpEvent, delta: float) -> None:
        super().__init__(event)
        self._present = self._absent = Weighted(np.empty(0), np.empty(0))
        bounds = {one.copies: (renyi_epsilon(one, delta), one) for one in chains(event, delta)}
        self._least = min((bound for bound, _ in bounds.values()), default=math.inf)
        if bounds:
            near = [one for bound, one in bounds.values() if bound <= NEARLY * self._least]
            replicas = min(near, key=lambda one: one.copies)
            self._copies, self._log_moment = replicas.copies, replicas.log_moment
            outputs = Outputs(event)
            self._present = outputs.present(replicas, event.samples)
            self._absent = outputs.absent(event.samples)

    def _largest(self, delta: float) -> float:
        """Twice what the Renyi bound allows: there the other direction is below delta as well."""
        return min(super()._largest(delta), 2 * max(self._least, 1e-3))

    def _bounds(self, epsilon: float, failure: float) -> tuple[float, float]:
        """Upper bounds on both directions' deltas."""
        if not len(self._present.ratios):
            return 1.0, 1.0
        one = self._present
        log_most = log_renyi_delta(self._copies, self._log_moment, epsilon)
        epsilon -= ROUNDING
        tail = slice(int(np.searchsorted(one.ratios, epsilon)), None)
        above = np.exp(one.weights[tail] + ROUNDING) * -np.expm1(epsilon - one.ratios[tail])
        most = math.exp(min(0.0, log_most))
        return (
            min(most, upper_confidence_bound(above, len(one.ratios), most, failure)),
            lower_tail(self._absent.ratios, epsilon, failure),
        )


def chains(event: MinSeparationDpEvent, delta: float) -> list[Replicas]:
    """Chains of more and more copies, until the Renyi bound is no lower, or they take too long."""
    found: list[Replicas] = []
    least, products = math.inf, event.products
    for copies in ORDERS:
        work = states_of(copies, event.separation) * event.steps
        if work > MOST_WORK or copies**2 * float(products.max(0).sum()) > LARGEST_WEIGHT:
            break
        found.append(Replicas(copies, event.rate, products))
        bound = renyi_epsilon(found[-1], delta)
        if bound > least:
            break
        least = bound
    return found


def log_renyi_delta(copies: int, log_moment: float, epsilon: float) -> float:
    """The logarithm of the Renyi bound on the first direction's delta."""
    most = log_moment - (copies - 1) * epsilon
    return most + (copies - 1) * math.log1p(-1 / copies) - math.log(copies) + ROUNDING


def renyi_epsilon(replicas: Replicas, delta: float) -> float:
    """Epsilon by that bound."""
    most = log_renyi_delta(replicas.copies, replicas.log_moment, 0.0)
    return (most - math.log(delta)) / (replicas.copies - 1)


def estimated_epsilon(event: MinSeparationDpEvent, delta: float) -> float:
    """About what the profile says, without a sample: for searching only."""
    bounds = [renyi_epsilon(one, delta) / EXCESS for one in chains(event, delta)]
    return min([gdp_epsilon(event.mu, delta), *bounds])


def lower_tail(ratios: Floats, epsilon: float, failure: float) -> float:
    """An upper confidence bound on E (1 - e^epsilon L)+, log L being convex in a Gaussian.

    Args:
        ratios: log L of independent samples, ascending.
    """
    samples = len(ratios)
    tail = ratios[: int(np.searchsorted(ratios, -epsilon))]
    least = upper_confidence_bound(-np.expm1(tail + epsilon), samples, 1.0, failure / 2)
    share = failure / 2 / (len(LOW_RANKS) + len(HIGH_RANKS))
    for low in LOW_RANKS:
        rank = samples >> low  # from 1
        if rank < 2 or (left := float(ratios[rank - 1])) < -epsilon:
            continue
        # the chance below an order statistic is Beta(rank, samples + 1 - rank)
        above = float(ndtri(1 - betaincinv(samples + 1 - rank, rank, share)))
        for high in HIGH_RANKS:
            rank = samples >> high
            right, below = (
                float(ratios[rank - 1]),
                float(ndtri(betaincinv(rank, samples + 1 - rank, share))),
            )
            if left < right and above < below:
                slope = (below - above) / (right - left)
                least = min(least, normal_delta(epsilon, above - slope * left, slope))
    return least


def normal_delta(epsilon: float, height: float, slope: float) -> float:
    """E (1 - e^(epsilon + Y))+ for Y with P(Y <= t) = Phi(height + slope t)."""
    mean, deviation = -height / slope, 1 / slope
    edge = (-epsilon - mean) / deviation
    log_other = epsilon + mean + deviation**2 / 2
    # a difference of nearly equal numbers is bounded by the first
    second = math.exp(min(700.0, log_other)) * float(ndtr(edge - deviation))
    first = float(ndtr(edge))
    return first if log_other > 700 else first - min(first, second) * (1 - 1e-9)


class Outputs:
    """Draws of what the columns' inner products with the outputs make of the ratio."""

    def __init__(self, event: MinSeparationDpEvent) -> None:
        self._event, self._squares = event, event.products[:, :1]
        self._columns = event.columns / event.noise_multiplier
        self._rows = sparse.csr_matrix(self._columns.T)

    def present(self, replicas: Replicas, samples: int) -> Weighted:
        """Samples of outputs around the sums of the replicas' tuples."""
        rng = public_generator(self._event, "present", samples, replicas.copies)
        counts = replicas.draw(samples, rng)
        ratios = []
        for piece in self._pieces(samples):
            shifts = (self._columns @ counts[piece].T).toarray()
            ratios.append(self._log_ratios(shifts + rng.standard_normal(shifts.shape)))
        weights = [replicas.log_moment + (1 - replicas.copies) * ratio for ratio in ratios]
        return in_order(ratios, weights)

    def absent(self, samples: int) -> Weighted:
        """Samples of outputs without the record."""
        rng = public_generator(self._event, "absent", samples)
        shapes = [(self._event.steps, piece.stop - piece.start) for piece in self._pieces(samples)]
        ratios = [self._log_ratios(rng.standard_normal(shape)) for shape in shapes]
        return in_order(ratios, [np.zeros_like(ratio) for ratio in ratios])

    def _log_ratios(self, outputs: Floats) -> Floats:
        """log L of outputs, (steps, samples); by F_t = (1 - p) F_(t+1) + p e_t F_(t+b)."""
        rate, b, steps = self._event.rate, self._event.separation, self._event.steps
        exponents = self._rows @ outputs - self._squares / 2
        # between rescalings nothing leaves the range of a float
        interval = b * max(1, int(250 / max(1.0, float(np.abs(exponents).max()))))
        chances = rate * np.exp(exponents)
        ring = np.ones((b, exponents.shape[1]))  # F_(t+1), ..., F_(t+b), by t modulo b
        log_scale = np.zeros(exponents.shape[1])
        for step in range(steps - 1, -1, -1):
            place = step % b
            joins = chances[step] * ring[place]
            ring[place] = (1 - rate) * ring[(step + 1) % b] + joins
            if step % interval == 0:
                largest = ring.max(0)
                ring /= largest
                log_scale += np.log(largest)
        waiting = rate * ring[1:].sum(0)
        return np.asarray(
            log_scale + np.log((ring[0] + waiting) / (1 + (b - 1) * rate)), dtype=np.float64
        )

    def _pieces(self, samples: int) -> list[slice]:
        most = max(1, AT_A_TIME // self._event.steps)
        return [slice(start, min(start + most, samples)) for start in range(0, samples, most)]
