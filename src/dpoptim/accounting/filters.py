"""A privacy filter: Gaussian releases of adaptive noise within a budget fixed beforehand.

**Theorem** (Smith and Thakurta 2022, Theorem 1; for zCDP Whitehouse et al. 2023). Let an analyst
choose each mechanism after seeing all earlier outputs, the t-th being mu_t-GDP, and let it be run
only if ``mu_1^2 + ... + mu_t^2 <= mu^2`` on that path. Then everything released together,
including the choice to stop, is mu-GDP.

A Gaussian release of a quantity with sensitivity s and noise of standard deviation sigma is (s /
sigma)-GDP. In the literature's other currency ``rho = mu^2 / 2`` (zCDP); for Gaussians mu-GDP says
more.
"""

import math
from fractions import Fraction

from scipy.special import log_ndtr, ndtri

from dpoptim.errors import PrivacyError

_LARGEST_EPSILON = 1400.0  # beyond, e^(epsilon/2) leaves float64


class GaussianFilter:
    """Keeps ``sum of mu_t^2 <= mu^2``. Ask, or charge, *before* drawing noise.

    Args:
        mu: the budget, finite, > 0. The arithmetic is exact, so no sequence of charges creeps past
            it.

    **Guarantee.** Whatever the sequence of `ask` and `charge`, the accepted charges never exceed
    ``mu^2`` in total. If every release made is charged first and is as private as its charge says,
    all of them together are mu-GDP.
    """

    def __init__(self, mu: float) -> None:
        self._budget = _square(mu)
        self._spent = Fraction(0)
        self.mu = float(mu)

    @property
    def left(self) -> float:
        """The largest mu that would be admitted now, rounded down; 0: nothing is left. Public."""
        return _root_below(self._budget - self._spent)

    @property
    def spent(self) -> float:
        """``sqrt(sum of mu_t^2)`` so far; no guarantee, as outputs may decide the stop. Public."""
        return math.sqrt(self._spent)

    def ask(self, mu: float) -> bool:
        """Whether a release that costs ``mu`` (finite, > 0) would be admitted."""
        return self._spent + _square(mu) <= self._budget

    def charge(self, mu: float) -> None:
        """Book a release that costs ``mu``; call it before the noise is drawn.

        Raises:
            PrivacyError: it does not fit; nothing is charged.
        """
        if not self.ask(mu):
            raise PrivacyError(
                f"a release of mu={mu:.6g} does not fit into the {self.left:.6g} that are left of "
                f"mu={self.mu:.6g}. Fix: ask first, and release with more noise or stop."
            )
        self._spent += _square(mu)


def selection_mu(epsilon: float) -> float:
    """mu of an exponential mechanism: ``2 Phi^-1(e^(eps/2) / (1 + e^(eps/2)))``, about 0.63 eps.

    Its log-likelihood ratios lie in an interval of length epsilon ("bounded range"), so it is a
    post-processing of a randomised response with ratios e^t and e^(t - eps) (Dong, Durfee and
    Rogers 2020); the worst t is eps/2, which is the randomised response of eps/2-DP.
    """
    if not 0 < epsilon <= _LARGEST_EPSILON:
        raise ValueError(f"epsilon must be a number in (0, {_LARGEST_EPSILON:g}], got {epsilon!r}.")
    return float(-2 * ndtri(1 / (1 + math.exp(epsilon / 2)))) * (1 + 1e-12) + 1e-15


def selection_epsilon(mu: float) -> float:
    """Invert `selection_mu`, rounded down: epsilon of a mechanism that costs mu in (1e-12, 50)."""
    if not 1e-12 < mu < 50:
        raise ValueError(f"mu must be a number in (1e-12, 50), got {mu!r}.")
    return float(2 * (log_ndtr(mu / 2) - log_ndtr(-mu / 2))) * (1 - 1e-9) - 1e-14


def _square(mu: float) -> Fraction:
    if not 0 < mu < math.inf:
        raise ValueError(f"mu must be a finite number above 0, got {mu!r}.")
    return Fraction(mu) ** 2


def _root_below(value: Fraction) -> float:
    root = math.sqrt(value)
    while root > 0 and Fraction(root) ** 2 > value:
        root = math.nextafter(root, 0.0)
    return root
