"""Quantiles of columns by exponential mechanisms on public places, from one filter."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dpoptim.accounting.filters import selection_epsilon, selection_mu
from dpoptim.accounting.guarantee import Guarantee
from dpoptim.accounting.ledger import Ledger
from dpoptim.gate import FilteredGate
from dpoptim.statistics import Floats, guarantee_of, paid_gate

EVENLY = 256  # candidates over the whole range
OCTAVES, PER_OCTAVE = 20, 4  # halvings towards 0 and towards each end, and candidates in each
FEW = 8  # candidates between two answers, below which they are coarser than what is between them
STEPS = 2.0**26  # in one record; sums of up to 2^27 records are exact
COUNTED = 1 + 2.0**-24  # a record in a count, of which a share may be rounded
LARGEST_MU = 40.0  # of one choice; beyond it there is nothing left to gain


def candidates_of(origin: float) -> Floats:
    """Public candidates in [-1, 1], rising: evenly, and by octaves about -1, 1 and ``origin``.

    Values that take up little of a public range are mostly near its ends, or near zero, and their
    quantiles are some share apart: even steps alone would be longer than all of them.

    Args:
        origin: where 0 is in this range; outside of it, it has no candidates.
    """
    steps = 2.0 * 2.0 ** (-np.arange(OCTAVES * PER_OCTAVE + 1) / PER_OCTAVE)
    near = [origin - steps, origin + steps, np.array([origin])] if abs(origin) < 1 else []
    found = np.unique(
        np.concatenate([np.linspace(-1.0, 1.0, EVENLY), steps - 1.0, 1.0 - steps, *near])
    )
    return found[(found >= -1.0) & (found <= 1.0)]


def are_coarse(low: float, high: float, candidates: Floats) -> bool:
    """Whether few candidates lie between two answers; by these alone, so public."""
    between = np.searchsorted(candidates, high) - np.searchsorted(candidates, low)
    return bool(between < FEW)


class Column(NamedTuple):
    """A column's values, NaN where one is missing, and one value that others have. Private.

    Attributes:
        values: float64, shape (k,).
        common: the value of ``others`` more records.
        weights: what each value counts, shape (k,), multiples of one power of two; None: 1 each.
    """

    values: Floats
    common: float = 0.0
    others: int = 0
    weights: Floats | None = None

    def before(self, candidates: Floats) -> Floats:
        """How many values are before each edge: of c_0 itself, after it, of c_1, and so on.

        Args:
            candidates: rising, shape (k,).

        Returns:
            shape (2 k + 1,), the last one of all values that are not missing. `places` lie between
            the others: c_0, what is between c_0 and c_1, c_1, and so on.
        """
        known = ~np.isnan(self.values)
        order = np.argsort(self.values[known])
        ordered = self.values[known][order]
        weights = np.ones(len(order)) if self.weights is None else self.weights[known][order]
        counted = np.append(0.0, np.cumsum(weights))
        found = np.empty(2 * len(candidates) + 1)
        found[:-1:2] = counted[np.searchsorted(ordered, candidates, side="left")]
        found[1::2] = counted[np.searchsorted(ordered, candidates, side="right")]
        found[-1] = counted[-1]
        found[:-1:2] += self.others * (self.common < candidates)
        found[1::2] += self.others * (self.common <= candidates)
        found[-1] += self.others
        return found


def places(candidates: Floats) -> tuple[Floats, Floats]:
    """Both ends of each place: of c_0, of what is between c_0 and c_1, of c_1, and so on.

    That a value which many have in common lies between two candidates is told by a place that is
    wide, and that it is one of them, by a point.
    """
    edges = np.repeat(candidates, 2)
    return edges[:-1], edges[1:]


def scores_of(before: Floats, rank: float) -> list[float]:
    """Minus the distance of each place from one with ``rank`` values before it.

    0 where at most so many values are before it, and at least so many are before what follows it.

    Args:
        before: as `Column.before` has it.

    **Guarantee.** A record, present or not or with another value, moves each by at most
    `COUNTED`, also where ``rank`` is a share of the values that are there, or all of them but a
    public number; rounding included, for up to 2^27 records.
    """
    edges, target = before[:-1], np.round(rank * STEPS) / STEPS  # counts are multiples, too
    distance = np.maximum(np.maximum(edges[:-1] - target, target - edges[1:]), 0.0)
    return [float(-each) for each in distance]


def epsilon_of_choice(mu: float) -> float:
    """The epsilon of a choice by the exponential mechanism that costs at most ``mu``."""
    price = min(mu * (1 - 1e-9), LARGEST_MU)
    epsilon = selection_epsilon(price)
    while selection_mu(epsilon) > price:  # the two conversions round each to its own side
        epsilon *= 1 - 1e-12
    return epsilon


def bound_of_count(neighboring: str) -> float:
    """Norm bound of one count: under replace-one it moves by 1, and the gate takes twice this."""
    return 0.5 if neighboring == "replace-one" else 1.0


def choose(gate: FilteredGate, scores: list[float], mu: float) -> int:
    """A place, by scores that one record moves by at most `COUNTED`.

    **Guarantee.** mu-GDP: an exponential mechanism, exactly drawn.
    """
    bound = bound_of_count(gate.neighboring) * COUNTED
    return gate.select(scores, norm_bound=bound, epsilon=epsilon_of_choice(mu))


def choose_in_parts(
    gate: FilteredGate, scores: list[list[float]], mu: float, touched: int
) -> list[int]:
    """A place for each part of the records, of which one record is in at most one.

    Args:
        scores: of each part, by its own records alone. touched: in how many parts one record moves
            scores: two where it may leave one and enter another.

    **Guarantee.** mu-GDP, as `choose`: a choice each, at a price that ``touched`` of them add up
    to.
    """
    if len(scores) == 1:
        return [choose(gate, scores[0], mu)]
    epsilon = epsilon_of_choice(mu / math.sqrt(min(touched, len(scores))))
    bound = bound_of_count(gate.neighboring) * COUNTED
    return gate.select_in_parts(scores, norm_bound=bound, epsilon=epsilon, touched=touched)


def select_tails(
    columns: Iterable[Column],
    candidates: Sequence[Floats],
    rank: float,
    *,
    mu: float,
    delta: float,
    neighboring: str,
    label: str,
    ledger: Ledger | None = None,
    noise_seed: int | None = None,
) -> tuple[Floats, Floats, Guarantee]:
    """For each column two numbers with about ``rank`` values below the first, above the second.

    The first is the lower end of its place, the second the upper end.

    Args:
        columns: of which NaN is in neither tail.
        candidates: of each column public numbers, rising, shape (k,).
        rank: public.
        mu: the price of all choices together; > 0.
        delta, neighboring, label, ledger, noise_seed: as for `statistics.release_sum`.

    **Guarantee.** mu-GDP: two choices a column, by `scores_of` its values.
    """
    width = len(candidates)
    found = np.empty((2, width))
    with paid_gate(mu, neighboring, label=label, ledger=ledger, noise_seed=noise_seed) as gate:
        for column, (values, of_column) in enumerate(zip(columns, candidates, strict=True)):
            before = values.before(of_column)
            for tail, ranked in enumerate((rank, float(before[-1]) - rank)):
                place = choose(gate, scores_of(before, ranked), mu / math.sqrt(2 * width))
                found[tail, column] = places(of_column)[tail][place]
    return found[0], found[1], guarantee_of(gate, delta, noise_seed=noise_seed)
