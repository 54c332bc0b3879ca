"""Lower bounds for private algorithms: Menart et al. 2024, Theorems 6, 7 and 8.

Bounds that the paper states as Omega(...) are returned without their constant, and say so. All are
of the expected excess empirical risk of (epsilon, delta)-DP algorithms, for some data set and some
loss of the class.
"""

import math

from dpoptim.arguments import whole_number


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
        >>> from dpoptim.theory.kl_lower_bounds import steep_lower_bound
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
