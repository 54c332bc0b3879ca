"""Settings and bounds of accelerated SRGD (Choquette-Choo, Ganesh and Thakurta 2024).

"Optimal Rates for O(1)-Smooth DP-SCO with a Single Epoch and Large Batches". For comparison and for
presets: nothing here sets noise.

Throughout: n records in one pass, p parameters, L the Lipschitz and M the smoothness constant of
every record's loss, R a bound on the norms in the constraint set; eta_t = t + 1. Losses are in the
units of L R.

Where the printed text does not hold together (found while deriving it again):

* The proof of Theorem 5.1 takes z-steps of ``eta_t / (2 beta)`` (its z'), Algorithm 1 prints
  ``eta_t / beta``. With the printed step the potential argument needs ``eta_t^2 <= eta_{0:t}``,
  which eta_t = t + 1 misses by a factor of nearly 2. Without noise the printed step is stable for
  beta >= M all the same, and on one-dimensional quadratic and Huber losses its error never
  exceeded half of the theorem's last term.
* The last term must be over ``eta_{0:T-1}``, the sum of the weights that were used, not over
  ``eta_{0:T}``.
* Corollary 5.7's noise for the tree is too small by a factor ``sqrt(2 (1 + ceil(log2 T)) / log2 T)
  > sqrt(2)`` for its own Lemma 5.6 at mu = epsilon / sqrt(2 ln(2.5 / delta)). (Theorem 5.12's is
  large enough.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TheoremSettings:
    """Settings that a theorem prescribes.

    Attributes:
        source: the theorem.
        steps, batch_size: T and B = n / T, as real numbers; a batch below 1 says that n is too
            small for the theorem.
        beta: inverse step size.
        clip_norm: bound on ``|eta_t grad f(x_t) - eta_{t-1} grad f(x_{t-1})|`` that holds with
            high probability.
    """

    source: str
    steps: float
    batch_size: float
    beta: float
    clip_norm: float

    @property
    def feasible(self) -> bool:
        """Whether n is large enough for T batches of a record or more."""
        return self.batch_size >= 1


def c_dp(n: int, delta: float) -> float:
    """c_DP of Eq. 19: ``4 sqrt(2) log2(n)^1.5 sqrt(ln(2 n / delta)) ln(2.5 / delta)``."""
    return (
        4
        * math.sqrt(2)
        * math.log2(n) ** 1.5
        * math.sqrt(math.log(2 * n / delta))
        * math.log(2.5 / delta)
    )


def minimiser_inside(
    n: int, p: int, epsilon: float, delta: float, *, lipschitz: float, radius: float
) -> TheoremSettings:
    """Eq. 19 (Theorem 5.8): T = c_DP n^(1/4), if the population minimiser is in the set.

    Valid for ``2^-o(n^(1/6)) <= delta <= 1/n``, ``p <= (epsilon n)^2`` and n large enough that
    c_DP >= M R / L.
    """
    c = c_dp(n, delta)
    steps = c * n**0.25
    beta = c**2 * lipschitz * max(1.0, math.sqrt(p) / (epsilon * math.sqrt(n))) / radius
    return TheoremSettings("Eq. 19 (Theorem 5.8)", steps, n / steps, beta, c * lipschitz)


def minimiser_anywhere(
    n: int, *, lipschitz: float, smoothness: float, radius: float, batch_size: float | None = None
) -> TheoremSettings:
    """Theorem 5.12: B <= sqrt(n), the default; ``beta = (16 MR/L + 8) L n^1.5 / (R B^2)``.

    Valid for p up to about ``epsilon^2 n^2`` (Corollary 5.10). The clipping bound is Corollary
    5.10's (8 c_M + 4) L, c_M = M R / L.

    Raises:
        ValueError: B above sqrt(n).
    """
    batch = math.sqrt(n) if batch_size is None else batch_size
    if batch > math.sqrt(n):
        raise ValueError(
            f"batch_size must be at most sqrt(n) = {math.sqrt(n):.4g} in Theorem 5.12, got "
            f"{batch_size!r}."
        )
    c_m = smoothness * radius / lipschitz
    beta = (16 * c_m + 8) * lipschitz * n**1.5 / (radius * batch**2)
    return TheoremSettings("Theorem 5.12", n / batch, batch, beta, (8 * c_m + 4) * lipschitz)


def optimal_rate(n: float, p: float, epsilon: float) -> float:
    """``1 / sqrt(n) + sqrt(p) / (epsilon n)``, in L R: Theorems 5.8, 5.12 up to logarithms."""
    return 1 / math.sqrt(n) + math.sqrt(p) / (epsilon * n)


def excess_risk_bound(
    *,
    batch_size: float,
    beta: float,
    deviation: float,
    radius: float,
    gradient_norms: Sequence[float],
    noise_norms: Sequence[float],
    failure: float,
) -> float:
    """Theorem 5.1's bound on F(y_T) - F(x*), eta_t = t + 1; wrong with ``failure`` at most.

    Args:
        batch_size: B.
        beta: at least M.
        deviation: Q, a bound on how far one record's ``eta_t grad f(x_t) - eta_{t-1} grad
            f(x_{t-1})`` is from its mean.
        radius: R.
        gradient_norms: |grad F(x_t)| for t = 0, ..., T - 1.
        noise_norms: |b_t|, the norm of the noise as it enters z (that of the prefix sum over beta).
        failure: gamma, in (0, 1).

    The last term is over eta_{0:T-1}, see the module's docstring.

    Raises:
        ValueError: sequences of unequal length, or empty.
    """
    steps = len(gradient_norms)
    if steps == 0 or len(noise_norms) != steps:
        raise ValueError(
            f"gradient_norms and noise_norms must be of one length, got {steps} and "
            f"{len(noise_norms)}."
        )
    root_batch = math.sqrt(batch_size)
    total = 0.0
    for t, (gradient, noise) in enumerate(zip(gradient_norms, noise_norms, strict=True)):
        eta, weight = t + 1, (t + 1) * (t + 2) / 2
        q = deviation * math.sqrt(3 * (t + 1) * math.log(6 * steps / failure))
        total += weight * (
            2 * q * (gradient + q / (root_batch * eta)) / (root_batch * eta * beta)
            + 3 * q * noise / (root_batch * eta**2)
            + q * radius / (root_batch * weight)
            + 3 * beta * noise * radius / weight
            + beta * noise**2 / eta**2
        )
    return (total + beta * radius**2) / (steps * (steps + 1) / 2)


def independent_excess_risk_bound(
    *, batch_size: float, beta: float, lipschitz: float, radius: float, noise_norms: Sequence[float]
) -> float:
    """Theorem 5.13's bound on E F(y_T) - F(x*): independent gradients, eta_t = t + 1, beta >= M.

    Divided by the sum of the T weights that enter, T (T + 1) / 2, where the paper prints
    eta_{0:T}, which has one more.
    """
    steps = len(noise_norms)
    if steps == 0:
        raise ValueError("noise_norms is empty; give one number for each step.")
    total = sum(
        (t + 1)
        * (t + 2)
        / 2
        * (
            8 * lipschitz**2 / (math.sqrt(batch_size) * beta)
            + 5 * lipschitz * noise / (t + 1)
            + 3 * beta * noise * radius
            + beta * noise**2 / (t + 1) ** 2
        )
        for t, noise in enumerate(noise_norms)
    )
    return (total + beta * radius**2) / (steps * (steps + 1) / 2)
