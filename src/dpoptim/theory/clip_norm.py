"""Theory of the clip norm: Das et al. 2023, and the growth condition of Fang et al. 2023.

Diagnostics for public or synthetic data: they need every record's loss. Nothing here sets the
noise of a run; that always comes from calibration. Risks are in units of the loss, clip norms in
units of its gradient.

Everything is in terms of ``phi = sqrt(nu d log(1/delta)) / (n epsilon)`` (Eq. 1), which must be
below 1.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpoptim.accounting.gaussian import gdp_mu

Floats = NDArray[np.float64]


def implied_nu(epsilon: float, delta: float) -> float:
    """nu of Eq. (1) for the exact Gaussian mechanism.

    The noise of T full-batch steps has variance ``nu T log(1/delta) tau^2 / (n epsilon)^2``, and
    the Gaussian that is (epsilon, delta)-DP has ``T tau^2 / (n mu)^2``.
    """
    return (epsilon / gdp_mu(epsilon, delta)) ** 2 / math.log(1 / delta)


def privacy_rate(n: int, d: int, epsilon: float, delta: float, nu: float | None = None) -> float:
    """phi of Eq. (1).

    Args:
        n: records. d: parameters.
        nu: the constant of the noise; None: `implied_nu`.

    Raises:
        ValueError: phi is not below 1: the theorems say nothing for so few records.
    """
    phi = math.sqrt(
        (implied_nu(epsilon, delta) if nu is None else nu) * d * math.log(1 / delta)
    ) / (n * epsilon)
    if not phi < 1:
        raise ValueError(
            f"phi = {phi:.3g} is not below 1: take more records (n={n}), a larger epsilon or fewer "
            "parameters."
        )
    return phi


def clipped_advantage(tau: float, constants: Floats, excess: Floats) -> float:
    """alpha(tau) of Definition 5.3, its infimum taken over given points: an upper bound on it.

    Args:
        tau: clip norm in (0, max G_i].
        constants: G_i, shape (n,), > 0.
        excess: ``f_i(w) - min f_i`` at each point w that is no minimiser, shape (points, n), >= 0.

    Raises:
        ValueError: tau out of range.
    """
    largest = float(constants.max())
    if not 0 < tau <= largest:
        raise ValueError(
            f"tau must be in (0, {largest:.6g}], the largest of the constants, got {tau!r}."
        )
    weighted = (np.minimum(1 / tau, 1 / constants) * excess).mean(1)
    return float((weighted / (excess.mean(1) / largest)).min())


@dataclass(frozen=True)
class RiskTerms:
    """The two terms of Theorem 5.4: (A) grows with tau, (B) falls, to 0 under interpolation."""

    optimisation: float
    bias: float

    @property
    def total(self) -> float:
        return self.optimisation + self.bias


def risk_terms(
    tau: float,
    alpha: float,
    *,
    largest: float,
    phi: float,
    distance: float,
    scale: float,
    interpolation_gap: float,
) -> RiskTerms:
    """Theorem 5.4: DP-SGD's risk at clip norm tau, convex losses, ``T = 1 / (3 phi^2)`` steps.

    Args:
        alpha: alpha(tau), at least 1; see `clipped_advantage`.
        largest: G_n, the largest of the constants.
        distance: ``|w_0 - w*|``. scale: C > 0 of the theorem; the best is distance / sqrt(2).
        interpolation_gap: Delta(w*) = mean of ``f_i(w*) - min f_i``; 0 if all records can be
            fitted at once.
    """
    optimisation = (distance**2 / scale + 2 * scale) * largest * phi / alpha
    return RiskTerms(optimisation, (largest / (tau * alpha) - 1) * interpolation_gap)


@dataclass(frozen=True)
class Settings:
    """Steps, clip norm, step size and the bound on the risk that they give."""

    steps: int
    clip_norm: float
    learning_rate: float
    risk: float


def interpolation_settings(tau: float, phi: float, scale: float) -> tuple[int, float]:
    """T and eta of Theorem 5.4: ``1 / (3 phi^2)`` and ``3 C phi / (2 tau)``."""
    return max(1, math.ceil(1 / (3 * phi**2))), 3 * scale * phi / (2 * tau)


def constrained_heavy_tailed(
    phi: float, *, k: float, moment: float, gamma: float, diameter: float
) -> Settings:
    """Theorem I.1: convex, a set of diameter D_W, E[G^k] <= moment^k; probability 1 - gamma.

    The risk is of the order ``phi^(1 - 1/k)``, which is optimal (Theorem I.3).
    """
    steps, rate = _steps(phi)
    tail = moment / gamma ** (1 / k)
    clip_norm = tail * rate ** (-1 / (2 * k))
    return Settings(
        steps,
        clip_norm,
        diameter / (steps * clip_norm) / math.sqrt(rate),
        2.5 * diameter * tail * rate ** ((1 - 1 / k) / 2),
    )


def unconstrained_heavy_tailed(
    phi: float, *, k: float, moment: float, gamma: float, distance: float, scale: float
) -> Settings:
    """Theorem J.1: convex on R^d, E[G^k] <= moment^k; w.p. 1 - gamma, order phi^(1 - 2/(k+1))."""
    steps, rate = _steps(phi)
    tail = moment / gamma ** (1 / k)
    clip_norm = tail * rate ** (-1 / (k + 1))
    power = 1 - 2 / (k + 1)
    first = (distance**2 / scale + 4 * scale) / 2 * rate ** (power / 2)
    return Settings(
        steps,
        clip_norm,
        scale / (steps * clip_norm) / math.sqrt(rate),
        tail * (first + (distance + scale) * rate**power),
    )


def improved_heavy_tailed(
    phi: float, *, k: float, moment: float, distance: float, scale: float, minimiser_bound: float
) -> Settings:
    """Theorem K.1: J.1 with Assumption 6.4 (D: ``minimiser_bound``); w.p. 3/4, phi^(1 - 1/k)."""
    steps, rate = _steps(phi)
    clip_norm = moment * rate ** (-1 / (2 * k))
    first = (distance**2 / scale + 2 * scale) * rate ** ((1 - 1 / k) / 2)
    return Settings(
        steps,
        clip_norm,
        scale / (steps * clip_norm) / math.sqrt(rate),
        moment * (first + 16 * phi ** (1 - 1 / k) * minimiser_bound),
    )


def _steps(phi: float) -> tuple[int, float]:
    """``T = 1 / phi^2``, rounded up, and ``1/T + phi^2``."""
    if not 0 < phi < 1:
        raise ValueError(f"phi must be in (0, 1), got {phi!r}.")
    steps = math.ceil(1 / phi**2)
    return steps, 1 / steps + phi**2


def nonconvex_orders(phi: float, *, k: float, gamma: float) -> Settings:
    """Theorem 6.8: smooth nonconvex; clip norm, step, squared gradient norm up to constants."""
    steps, _ = _steps(phi)
    power, tail = 1 / (2 * k - 1), gamma ** (-2 / (2 * k - 1))
    return Settings(steps, tail * phi**-power, phi ** (1 + power) / tail, tail * phi ** (1 - power))


def optimal_orders(phi: float, k: float) -> dict[str, float]:
    """Orders of the risk: Theorems I.1, J.1, K.1 and 6.8 (in the squared gradient norm)."""
    return {
        "constrained convex": phi ** (1 - 1 / k),
        "unconstrained convex": phi ** (1 - 2 / (k + 1)),
        "unconstrained convex, Assumption 6.4": phi ** (1 - 1 / k),
        "nonconvex": phi ** (1 - 1 / (2 * k - 1)),
    }


def growth_parameters(smoothness: float) -> tuple[float, float]:
    """(beta1, beta2) with ``|grad f|^2 <= beta1 (f - inf f) + beta2`` (Fang et al., Lemma 3.2)."""
    return 2 * smoothness, 0.0


def growth_bound(loss: Floats, beta1: float, beta2: float, lower_bound: float = 0.0) -> Floats:
    """The bound on a record's gradient norm by its loss under growth (Fang et al., Def. 3.1)."""
    return np.sqrt(beta1 * np.maximum(loss - lower_bound, 0.0) + beta2)


def smooth_orders(
    n: int, d: int, epsilon: float, delta: float, *, steps: int, batch_size: int
) -> float:
    """Order of the risk of clipped DP-SGD on smooth convex losses, up to logarithms.

    Fang et al., Theorem 4.5: ``1/T + 1/sqrt(B T) + sqrt(d log(1/delta)) / (n epsilon)``, with unit
    constants.
    """
    return (
        1 / steps
        + 1 / math.sqrt(batch_size * steps)
        + math.sqrt(d * math.log(1 / delta)) / (n * epsilon)
    )


def gaussian_spread(d: int) -> float:
    """The least rho of Fang et al.'s Assumption 4.1 for d standard Gaussians.

    ``E exp(|z|^2 / rho^2) = (1 - 2 / rho^2)^(-d/2)`` is to be at most e.
    """
    return math.sqrt(2 / -math.expm1(-2 / d))


def smooth_settings(
    n: int,
    d: int,
    epsilon: float,
    delta: float,
    *,
    batch_size: int,
    smoothness: float,
    gap: float,
    spread: float,
    noise_multiplier: float,
    failure: float,
    clip_norm: float | None = None,
) -> Settings:
    """Steps, clip norm, learning rate and order of the risk of Fang et al., Theorem 4.5.

    ``T = n^2 epsilon^2 / (d B)`` steps, the constant of its ``Theta(n^2 epsilon^2 / d)`` such that
    ``1 / sqrt(B T)`` is ``sqrt(d) / (n epsilon)``. The clip norm is what no gradient reaches but
    with probability ``failure`` (Eq. 1 and its proof, absolute constants 1)::

        C = sqrt(4 L (gap + L log(2/failure) / 2) + 64 L^2 log(2T/failure))
            + rho (log(n (T+1)) + log(1/failure))

    and the step ``min(1 / (2L), 1 / (s sqrt(T)))`` with ``s^2 = rho^2 / B + d (C sigma / B)^2``,
    the variance of a step's noisy gradient.

    Args:
        n: records. d: parameters. batch_size: B, expected.
        smoothness: L of every record's loss, > 0.
        gap: excess risk at the start, >= 0.
        spread: rho of Assumption 4.1, such as `gaussian_spread`.
        noise_multiplier: sigma, from calibration; the theorem's own constants are not known.
        failure: in (0, 1); the theorem leaves it to its constants.
        clip_norm: another C; None: the theorem's.
    """
    steps = math.ceil((n * epsilon) ** 2 / (d * batch_size))
    slope = math.sqrt(
        4 * smoothness * (gap + smoothness * math.log(2 / failure) / 2)
        + 64 * smoothness**2 * math.log(2 * steps / failure)
    )
    if clip_norm is None:
        clip_norm = slope + spread * (math.log(n * (steps + 1)) + math.log(1 / failure))
    deviation = math.sqrt(
        spread**2 / batch_size + d * (clip_norm * noise_multiplier / batch_size) ** 2
    )
    return Settings(
        steps,
        clip_norm,
        min(1 / (2 * smoothness), 1 / (deviation * math.sqrt(steps))),
        smooth_orders(n, d, epsilon, delta, steps=steps, batch_size=batch_size),
    )
