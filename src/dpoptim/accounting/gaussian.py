"""The exact (epsilon, delta) profile of the Gaussian mechanism, and its two inverses.

A mechanism is mu-GDP when it is no easier to attack than N(0, 1) against N(mu, 1). Its exact
profile is `delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)` (Balle and
Wang 2018, Theorem 8; Dong, Roth and Su 2022, Corollary 1). Gaussians compose by `mu^2 = sum of
mu_t^2`.
"""

import math

from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtri

_MOST_EPSILON = 1e300
_LOG_OF_NOTHING = -1e9  # its exponential is 0; finite, because root finding cannot use an infinity


def gdp_delta(mu: float, epsilon: float) -> float:
    """delta at which mu-GDP gives (epsilon, delta)-DP; `mu` >= 0, `epsilon` >= 0.

    Args:
        mu: of Gaussian differential privacy, >= 0.
        epsilon: >= 0.

    Returns:
        delta in [0, 1].

    Examples:
        >>> from dpoptim.accounting import gdp_delta
        >>> round(gdp_delta(1.0, 1.0), 4)
        0.1269
    """
    if mu == 0:
        return 0.0
    return math.exp(_log_delta(mu, epsilon))


def gdp_epsilon(mu: float, delta: float) -> float:
    """Least epsilon >= 0 with (epsilon, delta)-DP for a mu-GDP mechanism, rounded up by 1e-12.

    Args:
        mu: of Gaussian differential privacy, >= 0.
        delta: in (0, 1).

    Returns:
        epsilon >= 0.

    Examples:
        >>> from dpoptim.accounting import gdp_epsilon
        >>> round(gdp_epsilon(1.0, 1e-5), 2)
        4.38
    """
    target = math.log(delta)
    if mu == 0 or _log_delta(mu, 0.0) <= target:
        return 0.0
    # Dropping the subtracted term of the profile gives an epsilon that is certainly enough.
    enough = mu * (mu / 2 - float(ndtri(delta))) * (1 + 1e-9) + 1e-300
    root = brentq(
        lambda epsilon: _log_delta(mu, epsilon) - target, 0.0, enough, xtol=1e-300, rtol=1e-14
    )
    # The two terms of the profile cancel to a share of about mu, which limits the root's accuracy.
    return float(root * (1 + 1e-12 + 1e-14 / mu))


def gdp_mu(epsilon: float, delta: float) -> float:
    """Largest mu for which mu-GDP gives (epsilon, delta)-DP; `epsilon` > 0, `delta` in (0, 1).

    Args:
        epsilon: > 0, at most 1e300.
        delta: in (0, 1).

    Returns:
        mu > 0.

    Raises:
        ValueError: epsilon is so large that float64 has no noise for it.

    Examples:
        >>> from dpoptim.accounting import gdp_epsilon, gdp_mu
        >>> round(gdp_epsilon(gdp_mu(2.0, 1e-5), 1e-5), 6)
        2.0
    """
    if epsilon > _MOST_EPSILON:
        raise ValueError(
            f"epsilon must be at most {_MOST_EPSILON:g}, got {epsilon:g}: float64 has no noise "
            "for more. Fix: an epsilon that promises something is below 20."
        )
    target = math.log(delta)
    low, high = 1e-12, 1.0
    while _log_delta(high, epsilon) < target:
        low, high = high, 2 * high
    root = brentq(lambda mu: _log_delta(mu, epsilon) - target, low, high, xtol=1e-300, rtol=1e-14)
    return float(root * (1 - 1e-12))


def _log_delta(mu: float, epsilon: float) -> float:
    """log of the profile: both of its terms under- or overflow long before delta does."""
    first = float(log_ndtr(mu / 2 - epsilon / mu))
    second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    if second >= first:  # equal but for rounding: delta is below what float64 can separate
        return _LOG_OF_NOTHING
    return first + math.log(-math.expm1(second - first))
