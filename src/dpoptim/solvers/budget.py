"""A privacy budget in whichever of its currencies the user thinks in."""

import math
from dataclasses import dataclass

from dp_accounting import GaussianDpEvent

from dpoptim.accounting.accountant import check_delta
from dpoptim.accounting.gaussian import gdp_mu
from dpoptim.accounting.guarantee import neighbours_differ_by


@dataclass(frozen=True)
class Budget:
    """Budget of a solver. Give exactly one of ``epsilon``, ``rho`` and ``mu``.

    All noise of the solvers is Gaussian, so the budget is a mu of Gaussian differential privacy;
    epsilon is converted by the exact profile, and ``rho = mu^2 / 2`` is the papers' zCDP parameter
    of the same Gaussian.

    Args:
        delta: where the guarantee is stated, in (1e-14, 1); choose it well below 1/n.
        epsilon: of (epsilon, delta)-DP, > 0.
        rho: > 0.
        mu: > 0.

    Raises:
        ValueError: none or several of the three, or a number out of range.

    Examples:
        >>> from dpoptim.solvers import Budget
        >>> round(Budget(delta=1e-5, mu=1.0).gdp, 2)
        1.0
    """

    delta: float
    epsilon: float | None = None
    rho: float | None = None
    mu: float | None = None

    def __post_init__(self) -> None:
        check_delta(self.delta)
        given = {
            name: value
            for name in ("epsilon", "rho", "mu")
            if (value := getattr(self, name)) is not None
        }
        if len(given) != 1:
            raise ValueError(
                f"give exactly one of epsilon, rho and mu; got {given or 'none of them'}."
            )
        for name, value in given.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be a finite number above 0, got {value!r}.")

    def event(self, neighboring: str) -> GaussianDpEvent:
        """The event that a solver reserves: one Gaussian, for a bound of 1 on each record."""
        return GaussianDpEvent(neighbours_differ_by(neighboring) / self.gdp)

    @property
    def gdp(self) -> float:
        """The budget as the mu of Gaussian differential privacy."""
        if self.mu is not None:
            return self.mu
        if self.rho is not None:
            return math.sqrt(2 * self.rho)
        assert self.epsilon is not None
        # so that rounding cannot end above epsilon
        return gdp_mu(self.epsilon, self.delta) * (1 - 1e-12)
