"""Composition of a discretised privacy loss with itself: `dp_accounting`'s, in half of its time.

Where a sum of many losses lies is bounded by forty of its moments (Chernoff). `dp_accounting` asks
`scipy.special.logsumexp` for each, which takes longer than the transforms themselves on the grids
of hundreds of points that a search for the noise composes. Here they are plain sums: no exponent
leaves [-20, 20], so nothing overflows.
"""

import math

import numpy as np
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld.pld_pmf import DensePLDPmf, PLDPmf, SparsePLDPmf
from numpy.typing import NDArray
from scipy import fft

TAILS = 1e-15  # of the sum's probability, moved to an infinite loss; `dp_accounting`'s own
FEW_POINTS = 1000  # up to which `dp_accounting` composes point by point


def self_composed(losses: pld.PrivacyLossDistribution, count: int) -> pld.PrivacyLossDistribution:
    """The loss of `count` >= 1 releases, pessimistic as ``losses.self_compose(count)`` is."""
    removed = _composed(losses._pmf_remove, count)
    if losses._symmetric:
        return pld.PrivacyLossDistribution(removed)
    return pld.PrivacyLossDistribution(removed, _composed(losses._pmf_add, count))


def _composed(pmf: PLDPmf, count: int) -> PLDPmf:
    if count == 1 or (isinstance(pmf, SparsePLDPmf) and pmf.size**count <= FEW_POINTS):
        return pmf.self_compose(count, TAILS)
    dense = pmf.to_dense_pmf()
    low, high = bounds_of_sum(dense._probs, count)
    size = high - low + 1
    transform = fft.fft(dense._probs, fft.next_fast_len(max(size, dense.size)))
    wrapped = np.real(fft.ifft(transform**count))
    infinite = TAILS - math.expm1(count * math.log1p(-dense._infinity_mass))
    return DensePLDPmf(
        dense._discretization,
        dense._lower_loss * count + low,
        np.roll(wrapped, -low)[:size],
        infinite,
        dense._pessimistic_estimate,
    )


def bounds_of_sum(probabilities: NDArray[np.float64], count: int) -> tuple[int, int]:
    """The lowest and highest index of a sum of `count`; outside lies at most `TAILS` of it.

    Args:
        probabilities: shape (n,), of the indices 0 to n - 1.
        count: of independent indices that are added up.
    """
    size = len(probabilities)
    low, high = 0, (size - 1) * count
    of_unit = np.arange(size) / size
    for order in range(1, 21):
        for sign in (-1, 1):
            moment = float(probabilities @ np.exp(sign * order * of_unit))
            if moment <= 0:
                continue
            reach = (count * math.log(moment) + math.log(2 / TAILS)) / order * size
            if sign > 0:
                high = min(high, math.ceil(reach))
            else:
                low = max(low, math.floor(-reach))
    return low, high
