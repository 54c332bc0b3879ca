"""Rates under the Kurdyka-Lojasiewicz condition, and lower bounds (Theorems 6 to 8).

Menart, Ullah, Arora, Bassily and Guzman 2024, "Differentially Private Non-Convex Optimization under
the KL Condition with Optimal Rates".

F satisfies the (gamma, kappa)-KL condition if ``F(w) - min F <= (gamma |grad F(w)|)^kappa``; kappa
= 2 is the Polyak-Lojasiewicz condition with ``gamma^2 = 1 / (2 mu)``. Units: risks and F0 in units
of the loss, L0 in loss per unit of w, L1 in loss per unit of w squared, gamma such that ``(gamma
L0)^kappa`` is a loss; rho is the zCDP parameter. Bounds that the paper states as O(...) or
Omega(...) are returned without their constant, and say so.
"""

import math
from dataclasses import dataclass

from dpoptim.arguments import positive_number, proportion, whole_number
from dpoptim.theory.kl_schedules import Schedule, proximal_rounds, spider_schedule


@dataclass(frozen=True)
class KLSetting:
    """Arguments of the theorems; all of it public.

    Args:
        n: records, >= 1.
        dimension: d, >= 1.
        rho: zCDP budget, > 0.
        lipschitz: L0 > 0, of every record's loss.
        smoothness: L1 > 0 (in Theorem 2: the weak convexity).
        kl_gamma, kl_exponent: gamma > 0, kappa >= 1.
        risk_bound: F0 >= F(w0) - min F; None for the largest that the condition allows, ``(gamma
            L0)^kappa``.
        beta: failure probability, in (0, 1).
    """

    n: int
    dimension: int
    rho: float
    lipschitz: float
    smoothness: float
    kl_gamma: float
    kl_exponent: float
    risk_bound: float | None = None
    beta: float = 0.05

    def __post_init__(self) -> None:
        for name in ("n", "dimension", "rho", "lipschitz", "smoothness", "kl_gamma"):
            positive_number(name, getattr(self, name))
        if not 1 <= self.kl_exponent < math.inf:
            raise ValueError(f"kl_exponent must be at least 1, got {self.kl_exponent!r}.")
        proportion("beta", self.beta)
        if self.risk_bound is not None and not 0 < self.risk_bound <= self._largest_risk * (
            1 + 1e-9
        ):
            raise ValueError(
                "risk_bound must be in (0, (kl_gamma * lipschitz)^kl_exponent = "
                f"{self._largest_risk:g}], got {self.risk_bound!r}; the condition allows no larger "
                "risk at a gradient of at most L0."
            )

    @property
    def _largest_risk(self) -> float:
        return (self.kl_gamma * self.lipschitz) ** self.kl_exponent

    @property
    def initial_risk(self) -> float:
        """F0, the bound on the initial excess risk."""
        return self._largest_risk if self.risk_bound is None else self.risk_bound

    @property
    def x(self) -> float:
        """``sqrt(d) / (n sqrt(rho))``, in which all rates are stated."""
        return math.sqrt(self.dimension) / (self.n * math.sqrt(self.rho))

    @property
    def log(self) -> float:
        """``log(n sqrt(rho) / beta)``."""
        return math.log(self.n * math.sqrt(self.rho) / self.beta)


def spider_bound(setting: KLSetting) -> float:
    """Theorem 1: KL-Spider's excess risk with the theorem's constants, w.p. 1 - beta.

    ``(32 gamma L0 sqrt(K d log(1/beta')) / (n sqrt(rho)))^kappa``, at most F0 (then it says
    nothing). For kappa in [1, 2], losses that are L0-Lipschitz and L1-smooth on the ball of
    `spider_radius`, and zero-out neighbours. Our noise is never more than the paper's there
    (`kl_spider` with its default shares), so the proof of Lemma 2 carries over.
    """
    return _theorem_schedule(setting).longest()[-1].target


def spider_radius(setting: KLSetting) -> float:
    """How far KL-Spider can get from its start (Lemma 1, over the actual schedule), in w."""
    return (
        sum(
            round_.steps * round_.difference_bound
            for round_ in _theorem_schedule(setting).longest()
        )
        / setting.smoothness
    )


def proximal_rate(setting: KLSetting) -> float:
    """Theorem 2, up to a constant.

    ``(gamma L0 sqrt(T d log(n^2 log^2(1/beta') / (d beta'))) / (n sqrt(rho)))^kappa``.

    For kappa >= 2 and losses that are L0-Lipschitz and ``smoothness``-weakly convex near the start.
    """
    s = setting
    _require_exponent(s, 2, math.inf)
    rounds = proximal_rounds(
        n=s.n,
        dimension=s.dimension,
        rho=s.rho,
        lipschitz=s.lipschitz,
        weak_convexity=s.smoothness,
        kl_gamma=s.kl_gamma,
        kl_exponent=s.kl_exponent,
        risk_bound=s.initial_risk,
        constants="theorem",
    )
    share = s.beta / rounds
    log = math.log(s.n**2 * math.log(1 / share) ** 2 / (s.dimension * share))
    return (s.kl_gamma * s.lipschitz * s.x * math.sqrt(rounds * max(log, 0.0))) ** s.kl_exponent


def adaptive_exponent(kl_exponent: float) -> float:
    """The exponent of x in Theorem 4: ``2 kappa / (4 - kappa)``, for kappa in [1, 2]."""
    if not 1 <= kl_exponent <= 2:
        raise ValueError(f"kl_exponent must be in [1, 2], got {kl_exponent!r}.")
    return 2 * kl_exponent / (4 - kl_exponent)


def adaptive_rate(setting: KLSetting) -> float:
    """Theorem 4, up to a constant: adaptive descent's excess risk, w.p. 1 - 2 beta.

    For kappa in [1, 2], L0-Lipschitz and L1-smooth F, and ``L0^2 log(n sqrt(rho)/beta) / (L1 n) <=
    sqrt(rho)``: raises ValueError where that fails.
    """
    s = setting
    _require_exponent(s, 1, 2)
    if s.lipschitz**2 * s.log / (s.smoothness * s.n) > math.sqrt(s.rho):
        raise ValueError(
            "the setting is outside Theorem 4: it needs L0^2 log(n sqrt(rho)/beta) / (L1 n) <= "
            "sqrt(rho)."
        )
    kappa, exponent, scale = s.kl_exponent, adaptive_exponent(s.kl_exponent), s.n * math.sqrt(s.rho)
    phases = (1 + 8 * s.kl_gamma**2 * s.smoothness) * (
        math.log(s.initial_risk) + exponent * math.log(scale / (s.kl_gamma * s.lipschitz))
    )
    phases = max(phases, 1.0)
    gradients = (s.kl_gamma * s.lipschitz * s.x * math.sqrt(s.log * phases)) ** exponent
    norms = max(s.kl_gamma**2, 1.0) * s.lipschitz**2 * s.log / (min(s.smoothness, 1.0) * scale)
    lengths = (phases / scale) ** (kappa / (2 - kappa)) if kappa < 2 else 0.0
    return gradients + norms ** (kappa / 2) + lengths


def stationary_rate(setting: KLSetting, steps: int | None = None) -> float:
    """Theorem 5, up to a constant: the selection's gradient norm, w.p. 1 - 3 beta.

    ``min(sqrt(F0 L1 / T), sqrt(L0 sqrt(F0 L1) x)) + L0 sqrt(log(n sqrt(rho)/beta)) / sqrt(n
    sqrt(rho))``, without any KL condition (gamma and kappa are used only if ``risk_bound`` is
    None).

    Args:
        steps: T, how many steps the descent made; None for the worst case.
    """
    s = setting
    worst = math.sqrt(s.lipschitz * math.sqrt(s.initial_risk * s.smoothness) * s.x)
    seen = math.inf if steps is None else math.sqrt(s.initial_risk * s.smoothness / steps)
    return min(seen, worst) + s.lipschitz * math.sqrt(s.log / (s.n * math.sqrt(s.rho)))


def lower_bound_rate(setting: KLSetting) -> float:
    """Corollary 1, up to constants and logarithms: no rho-zCDP beats ``(gamma L0 x)^kappa``.

    For kappa in (1, 2] away from 1; for convex losses that satisfy the condition.
    """
    _require_exponent(setting, 1, 2)
    return (setting.kl_gamma * setting.lipschitz * setting.x) ** setting.kl_exponent


def growth_from_kl(kl_gamma: float, kl_exponent: float) -> tuple[float, float]:
    """Lemma 7: the growth ``F(w) - min F >= (lambda dist(w, argmin))^tau`` by KL, kappa > 1.

    Returns:
        (lambda, tau), lambda = (kappa - 1) / (gamma kappa), tau = kappa / (kappa - 1).
    """
    if not (kl_gamma > 0 and 1 < kl_exponent < math.inf):
        raise ValueError(
            f"expected kl_gamma > 0 and kl_exponent > 1, got {kl_gamma!r} and {kl_exponent!r}."
        )
    return (kl_exponent - 1) / (kl_gamma * kl_exponent), kl_exponent / (kl_exponent - 1)


def kl_from_growth(growth: float, growth_exponent: float) -> tuple[float, float]:
    """Lemma 6: the KL parameters that growth implies for *convex* F; growth_exponent tau > 1.

    Returns:
        (gamma, kappa) = (1 / lambda, tau / (tau - 1)).
    """
    if not (growth > 0 and 1 < growth_exponent < math.inf):
        raise ValueError(
            f"expected growth > 0 and growth_exponent > 1, got {growth!r} and {growth_exponent!r}."
        )
    return 1 / growth, growth_exponent / (growth_exponent - 1)


def _theorem_schedule(setting: KLSetting) -> Schedule:
    s = setting
    _require_exponent(s, 1, 2)
    return spider_schedule(
        n=s.n,
        dimension=s.dimension,
        rho=s.rho,
        lipschitz=s.lipschitz,
        smoothness=s.smoothness,
        kl_gamma=s.kl_gamma,
        kl_exponent=s.kl_exponent,
        risk_bound=s.initial_risk,
        beta=s.beta,
        constants="theorem",
    )


def _require_exponent(setting: KLSetting, least: float, most: float) -> None:
    if not least <= setting.kl_exponent <= most:
        raise ValueError(
            f"kl_exponent must be in [{least}, {most}] here, got {setting.kl_exponent!r}."
        )


def growth_lower_bound(
    n: int, dimension: int, epsilon: float, *, lipschitz: float, growth: float, exponent: float
) -> float:
    """Theorem 6, up to a constant: ``tau^(-1/(tau-1)) x^(tau/(tau-1))``.

    Here ``x = L0 sqrt(d) / (lambda n epsilon)``, the losses are convex and smooth, the risk grows
    as ``(lambda dist)^tau``, and epsilon is at most 1.

    Args:
        n, dimension: records, parameters. lipschitz: L0. growth: lambda, > 0.
        exponent: tau, at least 2 and bounded.
    """
    _check(n, dimension, epsilon, most=1.0)
    if exponent < 2:
        raise ValueError(f"exponent must be at least 2, got {exponent!r}.")
    x = lipschitz * math.sqrt(dimension) / (growth * n * epsilon)
    return float(exponent ** (-1 / (exponent - 1)) * x ** (exponent / (exponent - 1)))


def convex_lower_bound(
    n: int, dimension: int, epsilon: float, *, lipschitz: float, distance: float
) -> float:
    """Theorem 7, up to a constant: ``L0 D min(sqrt(d) / (n epsilon), 1)``.

    Without constraints, for convex losses whose minimiser has norm ``distance`` (D) at most;
    epsilon at most 1.
    """
    _check(n, dimension, epsilon, most=1.0)
    return lipschitz * distance * min(math.sqrt(dimension) / (n * epsilon), 1.0)


def steep_lower_bound(n: int, epsilon: float, delta: float, *, kl_exponent: float) -> float:
    """Theorem 8, with its constant: ``(1/4) (1 / (n epsilon))^kappa``, kappa >= 2.

    For losses that are 1-Lipschitz and risks that satisfy the (1, kappa)-KL condition, in any
    dimension.

    Args:
        n: records. epsilon: at most ln 2. delta: at most ``(1 - e^-epsilon) / 16``.
        kl_exponent: kappa, at least 2.

    Raises:
        ValueError: outside of what the theorem covers.

    Examples:
        >>> from dpoptim.theory.kl_condition import steep_lower_bound
        >>> steep_lower_bound(100, 0.5, 1e-5, kl_exponent=3) == 0.25 / 50**3
        True
    """
    _check(n, 1, epsilon, most=math.log(2))
    if not 0 < delta <= (1 - math.exp(-epsilon)) / 16:
        raise ValueError(f"delta must be above 0 and at most (1 - e^-epsilon) / 16, got {delta!r}.")
    if kl_exponent < 2:
        raise ValueError(
            f"kl_exponent must be at least 2, got {kl_exponent!r}. Fix: `growth_lower_bound`."
        )
    return 0.25 * (1 / (n * epsilon)) ** kl_exponent


def _check(n: int, dimension: int, epsilon: float, *, most: float) -> None:
    whole_number("n", n, least=1)
    whole_number("dimension", dimension, least=1)
    if not 0 < epsilon <= most:
        raise ValueError(f"epsilon must be above 0 and at most {most:.3g}, got {epsilon!r}.")
