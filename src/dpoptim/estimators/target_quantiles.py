"""The part of their range that few targets take up, by two choices among public places.

Noise on moments is in proportion to the whole range. The exponential mechanism's is in records: so
it finds the median, and how far targets are from it, however wide the range is.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dpoptim.distributed.rank_signals import RELEASE
from dpoptim.distributed.ranks import ALONE, Ranks
from dpoptim.gate import FilteredGate
from dpoptim.quantiles import (
    STEPS,
    Column,
    candidates_of,
    choose,
    places,
    scores_of,
)
from dpoptim.target_range import TargetRange

Floats = NDArray[np.float64]
PLACES = 700  # at most, among which the median is chosen
DISTANCES = 2.0 ** (1 - np.arange(45) / 2)  # from the median, in half ranges: 22 halvings
MEDIAN_SHARE = 0.5  # of the mu^2 of both choices
SURE = 4.0  # log odds against one of `PLACES` that a quarter of the records are from the median
WORTH = 0.2  # of the mu^2 that this takes: less would find nothing
LEAST = 0.05  # of a budget's mu^2, where it is more than that takes, for a larger share of records
FAR, FEWEST_BEYOND = 0.8, 0.04  # records within the distance; at least so many are beyond it
REACH = 2.5  # half a range, in such distances
# These, and `CHOICES_SHARE` and others in `target_spread`, were chosen on made-up tables of many
# shapes: see benchmarks/choose_range.py.


class Choices(NamedTuple):
    """Two choices, by public numbers.

    Attributes:
        median, distance: their prices, in mu: of the median, and of a distance from it.
        share: of the records that are to be within the distance.
    """

    median: float
    distance: float
    share: float


def affordable_choices(mu: float, n: int, most: float) -> Choices | None:
    """Prices by which few of n records are enough to find a median; by public numbers.

    Args:
        mu: of the whole budget.
        most: share of its mu^2 to spend.

    Returns:
        prices that make places a quarter of the records away unlikely, or what the share allows;
        None where that would find nothing.
    """
    # mu is at most 0.63 epsilon of a choice, whose odds are exp(epsilon rank / 2)
    wanted = 0.63 * 8 * (math.log(PLACES) + SURE) / max(n, 1) / math.sqrt(MEDIAN_SHARE)
    allowed = mu * math.sqrt(most)
    if allowed < math.sqrt(WORTH) * wanted:
        return None
    price = min(max(wanted, mu * math.sqrt(LEAST)), allowed)
    return Choices(
        price * math.sqrt(MEDIAN_SHARE),
        price * math.sqrt(1 - MEDIAN_SHARE),
        share=1 - max(FEWEST_BEYOND, (1 - FAR) * wanted / max(price, wanted)),
    )


def range_about_median(
    gate: FilteredGate,
    y: Floats,
    shares: Floats | None,
    *,
    prices: Choices,
    origin: float,
    reach: float = REACH,
    ranks: Ranks = ALONE,
    number: int = 0,
) -> TargetRange:
    """The range about the median that most targets in [-1, 1] are in, within that.

    Args:
        gate: of the whole fit.
        y, shares: as for `spread_of_targets`.
        prices: of both choices.
        origin: where 0 is in the range, near which places are closer; public.
        reach: half a range, in distances.
        number: of the first of both releases, on all ranks.

    **Guarantee.** Each choice is mu-GDP for its price, whatever y holds, and charged to the gate: a
    record counts 1 among the values before a place, or its rows their shares; the second choice is
    of distances from what the first has released.
    """
    values = np.clip(y, -1.0, 1.0).ravel()
    weights = None
    if shares is not None and y.ndim == 2:
        weights = np.floor(shares.ravel() * STEPS) / STEPS  # so that sums are exact
    low, high = _chosen(
        gate,
        Column(values, weights=weights),
        candidates_of(origin),
        0.5,
        prices.median,
        ranks,
        number,
    )
    median = (low + high) / 2
    apart = Column(np.abs(values - median), weights=weights)
    distances = np.append(0.0, DISTANCES[::-1])
    _, far = _chosen(gate, apart, distances, prices.share, prices.distance, ranks, number + 1)
    half = reach * max(far, float(DISTANCES[-1]))
    low, high = max(-1.0, median - half), min(1.0, median + half)
    return TargetRange((low + high) / 2, (high - low) / 2)


def _chosen(
    gate: FilteredGate,
    column: Column,
    candidates: Floats,
    share: float,
    mu: float,
    ranks: Ranks,
    number: int,
) -> tuple[float, float]:
    """Both ends of the place of a quantile of all ranks' values.

    **Guarantee.** mu-GDP, and charged to the gate; see `choose`.
    """
    own = torch.from_numpy(column.before(candidates))
    ranks.begin(RELEASE, number)
    gate.open(mu)
    before = ranks.total(own).numpy()
    place = ranks.from_first(lambda: choose(gate, scores_of(before, share * float(before[-1])), mu))
    if ranks.rank > 0:
        gate.count(mu)
    low, high = places(candidates)
    return float(low[place]), float(high[place])
