"""Quantiles of columns by exponential mechanisms on public candidates, from one filter."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dpoptim.accounting.filters import selection_epsilon, selection_mu
from dpoptim.accounting.guarantee import Guarantee
from dpoptim.accounting.ledger import Ledger
from dpoptim.statistics import Floats, guarantee_of, paid_gate

EVENLY = 256  # candidates over the whole range
OCTAVES, PER_OCTAVE = 20, 4  # halvings towards 0 and towards each end, and candidates in each
FEW = 8  # candidates between two answers, below which they are coarser than what is between them
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

    def counts(self, candidates: Floats) -> tuple[Floats, Floats]:
        """How many values are below, and above, each of the rising candidates."""
        known = ~np.isnan(self.values)
        if self.weights is None:
            ordered, counted = np.sort(self.values[known]), np.arange(known.sum() + 1)
        else:
            order = np.argsort(self.values[known])
            ordered = self.values[known][order]
            counted = np.append(0.0, np.cumsum(self.weights[known][order]))
        below = counted[np.searchsorted(ordered, candidates, side="left")]
        above = counted[-1] - counted[np.searchsorted(ordered, candidates, side="right")]
        return (
            below + self.others * (self.common < candidates) * 1.0,
            above + self.others * (self.common > candidates) * 1.0,
        )


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
    """For each column a candidate with about ``rank`` values below, one with as many above.

    Args:
        columns: of which NaN is in neither tail.
        candidates: of each column public numbers, rising, shape (k,).
        rank: public.
        mu: the price of all choices together; > 0.
        delta, neighboring, label, ledger, noise_seed: as for `statistics.release_sum`.

    **Guarantee.** mu-GDP. A score is minus the distance of a count from ``rank``. A record,
    present or not or with another value, moves a count by at most 1; under replace-one the gate
    takes twice the bound, which is therefore one half.
    """
    width = len(candidates)
    epsilon, bound = epsilon_of_choice(mu / math.sqrt(2 * width)), bound_of_count(neighboring)
    found = np.empty((2, width))
    with paid_gate(mu, neighboring, label=label, ledger=ledger, noise_seed=noise_seed) as gate:
        for column, (values, of_column) in enumerate(zip(columns, candidates, strict=True)):
            for tail, counts in enumerate(values.counts(of_column)):
                scores = -np.abs(counts - rank)
                found[tail, column] = of_column[
                    gate.select(scores.tolist(), norm_bound=bound, epsilon=epsilon)
                ]
    return found[0], found[1], guarantee_of(gate, delta, noise_seed=noise_seed)
