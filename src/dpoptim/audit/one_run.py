"""Audit by one training run: many canaries, each in by a coin, and an attacker who guesses.

For full models and for loops of one's own, where thousands of runs are out of reach. Weaker than
`two_worlds`, because all canaries share one run. Two estimators, from the same guesses:

* (epsilon, delta)-DP: the number of right guesses is, up to delta, dominated by a binomial
  (Steinke, Nasr and Jagielski 2023, Theorem 5.2);
* a trade-off curve f: the bound below, which knows how Gaussian noise leaks (Mahloujifar, Melis
  and Chaudhuri 2024).

**The second bound.** u is m fair coins, W the number of right guesses among c' (which coins to
guess may depend on the output), p_w = P(W = w), and B = 1 - f. Exchanging coin i turns its guess
from right to wrong and W into W - 1, so ``P(i right, W >= w) <= B(P(i wrong, W >= w - 1))``;
averaged over i, as B is concave, ``h_w := sum_{j >= w} j p_j / m <= B(r_{w-1})`` with ``r_w :=
sum_{j >= w} (c' - j) p_j / m``. Suppose P(W >= c) >= t. Mass at larger W only raises h and lowers
r, which tightens every inequality, so the least total mass puts t at W = c, and going down from
there adds the least that ``r_{w-1} >= B^-1(h_w)`` demands; if that exceeds 1, P(W >= c) < t.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtr, bdtrc, ndtr, ndtri

from dpoptim.accounting import compute_epsilon, gdp_epsilon, gdp_mu, tradeoff_curve
from dpoptim.audit.bounds import failure_of
from dpoptim.audit.sampled_gaussians import SampledGaussians
from dpoptim.plan import Plan
from dpoptim.sampling import PoissonSampling

Coins = NDArray[np.bool_]
ACCURACY = 0.01  # relative, of the inverted epsilon and noise; rounded to the safe side
MOST_EPSILON = 100.0


@dataclass(frozen=True)
class OneRunResult:
    """Outcome of an attack on one run.

    Attributes:
        claimed: epsilon at ``delta``.
        by_binomial, by_tradeoff: lower bounds on epsilon by the two estimators; both right with
            probability ``confidence``.
        canaries, guesses, correct: how many there were, how many of their coins were guessed, and
            how many rightly.
    """

    claimed: float
    by_binomial: float
    by_tradeoff: float
    delta: float
    neighboring: str
    canaries: int
    guesses: int
    correct: int
    confidence: float

    @property
    def lower_bound(self) -> float:
        """The larger of the two bounds."""
        return max(self.by_binomial, self.by_tradeoff)

    @property
    def verdict(self) -> str:
        """``"refuted"`` if the lower bound exceeds the claim, else ``"consistent"``: no proof."""
        return "refuted" if self.lower_bound > self.claimed else "consistent"

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return {**asdict(self), "lower_bound": self.lower_bound, "verdict": self.verdict}

    def __str__(self) -> str:
        return (
            f"{self.verdict}: claimed epsilon {self.claimed:.3g}; one run shows at least "
            f"{self.by_binomial:.3g} (binomial), {self.by_tradeoff:.3g} (trade-off curve): "
            f"{self.correct} of {self.guesses} guesses right on {self.canaries} canaries "
            f"(delta={self.delta:g}, {self.neighboring}, confidence {self.confidence:.7g})"
        )


def one_run(
    run: Callable[[Coins], ArrayLike],
    canaries: int,
    plan: Plan,
    *,
    guesses: int | None = None,
    confidence: float = 0.95,
    seed: int | None = None,
) -> OneRunResult:
    """Train once on canaries chosen by coins, guess these from scores, compare with the plan.

    Args:
        run: a private training of any kind, by a loop of your own or by `attached_run`. It is
            called once, with the coins (shape (m,)): it must train with canary i exactly if coin i
            is True (zero-out: else with gradient zero), and return a score for each canary, shape
            (m,), computed from what the run released. Higher: likelier present.
        canaries: m, at least 8; hundreds are needed to show anything.
        plan: the claim.
        guesses: how many coins are guessed, the highest and the lowest scores half and half; by
            default a third of m. Not to be chosen by looking at the scores.
        confidence: that both bounds are right, in (0, 1).
        seed: of the coins; None: fresh.

    Returns:
        the lower bound, the claim, and a verdict.

    Raises:
        ValueError: naming the argument; replace-one has no such audit.

    Examples:
        >>> import torch
        >>> import dpoptim
        >>> from dpoptim.audit import attached_run, one_run
        >>> plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        ...     n=64, batch_size=32, steps=5, epsilon=4.0, delta=1e-5, neighboring="zero-out"
        ... )
        >>> canaries = torch.eye(64, 80), torch.zeros(64, dtype=torch.long)
        >>> loss = torch.nn.CrossEntropyLoss(reduction="none")
        >>> run = attached_run(plan, torch.nn.Linear(80, 2), loss, canaries)
        >>> one_run(run, 64, plan, seed=0).verdict in {"consistent", "too weak to tell"}
        True
    """
    if plan.neighboring == "replace-one":
        raise ValueError(
            "plan: coins put records in or out, which replace-one does not speak of; use zero-out."
        )
    if canaries < 8:
        raise ValueError(
            f"canaries must be at least 8, got {canaries}; hundreds are needed to show anything."
        )
    half = (canaries // 3 if guesses is None else guesses) // 2
    if not 1 <= half <= canaries // 2:
        raise ValueError(f"guesses must be from 2 to canaries={canaries}, got {guesses!r}.")
    present = np.random.default_rng(seed).random(canaries) < 0.5
    scores = np.asarray(run(present.copy()), dtype=float)
    if scores.shape != (canaries,) or np.isnan(scores).any():
        raise ValueError(
            f"run must return one score a canary, shape ({canaries},) without NaN, got shape "
            f"{scores.shape}."
        )
    order = np.argsort(scores, kind="stable")
    correct = int(present[order[-half:]].sum() + (~present[order[:half]]).sum())
    failure = failure_of(confidence) / 2  # shared by the two estimators
    return OneRunResult(
        claimed=plan.guarantee.epsilon,
        by_binomial=binomial_epsilon(canaries, 2 * half, correct, plan.delta, failure),
        by_tradeoff=tradeoff_epsilon(canaries, 2 * half, correct, plan, failure),
        delta=plan.delta,
        neighboring=plan.neighboring,
        canaries=canaries,
        guesses=2 * half,
        correct=correct,
        confidence=confidence,
    )


def binomial_epsilon(
    canaries: int, guesses: int, correct: int, delta: float, failure: float
) -> float:
    """The largest epsilon that so many right guesses refute at ``failure``, rounded down; or 0."""

    def refuted(epsilon: float) -> bool:
        return binomial_pvalue(canaries, guesses, correct, epsilon, delta) <= failure

    return largest_refuted(refuted, 0.0, MOST_EPSILON)


def binomial_pvalue(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Bound P(W >= correct) under (epsilon, delta)-DP (Steinke et al. 2023, Theorem 5.2).

    ``P(Y >= v) + 2 m delta max_i P(v > Y >= v - i) / i``, Y binomial with ``guesses`` trials of 1
    / (1 + e^-epsilon).
    """
    rate = 1 / (1 + math.exp(-epsilon))
    above = 1.0 if correct == 0 else float(bdtrc(correct - 1, guesses, rate))
    i = np.arange(1, correct + 1)
    below = bdtr(correct - 1, guesses, rate) - np.where(
        correct - i > 0, bdtr(correct - i - 1, guesses, rate), 0.0
    )
    slope = float((below / i).max()) if correct else 0.0
    return min(1.0, above + 2 * canaries * delta * slope)


def tradeoff_epsilon(
    canaries: int, guesses: int, correct: int, plan: Plan, failure: float
) -> float:
    """Epsilon, at the plan's delta, of its family's noisiest refuted mechanism; 0 if none is.

    The family: Poisson-sampled Gaussians of the plan's rate and steps for DP-SGD; one Gaussian for
    whatever else.
    """
    rate = plan.batch_size / plan.n
    if not isinstance(plan.sampler, PoissonSampling) or rate == 1:

        def refuted(mu: float) -> bool:
            return tradeoff_refutes(
                lambda y: float(ndtr(ndtri(y) - mu)), canaries, guesses, correct, failure
            )

        mu = largest_refuted(refuted, 0.0, 2 * gdp_mu(MOST_EPSILON, plan.delta))
        return gdp_epsilon(mu, plan.delta)
    family = SampledGaussians(rate, plan.steps, plan.neighboring)

    def refuted_noise(inverse: float) -> bool:
        rates = np.concatenate(
            [[0.0], np.geomspace(1e-7, 1e-2, 400), np.linspace(0.01, 1, 1600)[1:]]
        )
        reached = 1 - tradeoff_curve(family.event(1 / inverse), family.neighboring, rates)
        reached = np.maximum.accumulate(reached)

        # the grid point to the left: never above the truth
        def inverse_blow_up(y: float) -> float:
            return float(rates[max(0, int(np.searchsorted(reached, y, side="right")) - 1)])

        return tradeoff_refutes(inverse_blow_up, canaries, guesses, correct, failure)

    inverse = largest_refuted(refuted_noise, 0.02, 5.0)
    return (
        0.0
        if inverse <= 0.02
        else compute_epsilon(family.event(1 / inverse), plan.delta, plan.neighboring).epsilon
    )


def tradeoff_refutes(
    inverse_blow_up: Callable[[float], float],
    canaries: int,
    guesses: int,
    correct: int,
    failure: float,
) -> bool:
    """Whether P(W >= correct) <= ``failure`` for all mechanisms with this trade-off curve.

    Args:
        inverse_blow_up: B^-1 on [0, 1], B = 1 - f; a smaller function refutes less.
    """
    right, wrong = failure * correct / canaries, failure * (guesses - correct) / canaries
    for w in range(correct, 0, -1):
        if right + wrong > guesses / canaries:
            return True
        lacking = max(0.0, inverse_blow_up(right) - wrong)
        wrong += lacking
        right += lacking * (w - 1) / (guesses - w + 1)
    return right + wrong > guesses / canaries


def largest_refuted(refuted: Callable[[float], bool], low: float, high: float) -> float:
    """The largest refuted value, rounded down, or ``low``; ``refuted`` is decreasing."""
    if refuted(high):
        return high
    start = low
    while high - low > ACCURACY * high:
        middle = (low + high) / 2 if low == start else math.sqrt(low * high)
        low, high = (middle, high) if refuted(middle) else (low, middle)
        if high < 1e-3:
            break
    return low
