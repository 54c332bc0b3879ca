"""An audit of one training run, the user's own: canaries join by coin flips, and the attack guesses the coins.

Steinke, Nasr and Jagielski 2023, Theorem 5.2: if training is (epsilon, delta)-DP, of r guesses about m independent coins no
more are right than a Binomial(r, e^epsilon / (1 + e^epsilon)), but for a term in delta. Many right guesses refute a claim.

Weaker than `audit_two_worlds` (one run gives m dependent looks where that takes m runs), but it sees the whole of a real
training: the data pipeline, the model, the loop. Use::

    audit = OneRun(canaries=1000)
    ...                        # train on the data and on the canaries in audit.included
    print(audit.result(scores, claimed=private.spent()))

with a score for each canary that is larger the more it looks trained on, such as minus its loss.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import binom

from dpoptim.accounting.guarantee import Guarantee
from dpoptim.audit.bounds import failure_of

LARGEST_EPSILON = 50.0


@dataclass(frozen=True)
class OneRunResult:
    """What the guesses show.

    Attributes:
        claimed: epsilon at ``delta``.
        lower_bound: epsilon that the guesses refute, with probability ``confidence``.
        limit: what all guesses right would refute.
        canaries, guesses, right: m, r, and how many of the r were right.
    """

    claimed: float
    lower_bound: float
    limit: float
    delta: float
    canaries: int
    guesses: int
    right: int
    confidence: float

    @property
    def verdict(self) -> str:
        """``"refuted"`` if the lower bound exceeds the claim, else ``"consistent"``: no audit proves a claim."""
        return "refuted" if self.lower_bound > self.claimed else "consistent"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}

    def __str__(self) -> str:
        return (
            f"{self.verdict}: claimed epsilon {self.claimed:.3g}, audited at least {self.lower_bound:.3g} of at most "
            f"{self.limit:.3g} ({self.right} of {self.guesses} guesses right about {self.canaries} canaries, "
            f"delta={self.delta:g}, confidence {self.confidence:g})"
        )


class OneRun:
    """The coins of one audited run.

    Args:
        canaries: m, records made for the audit, at least 2; they count as records of the data (n is larger by m).
        seed: of the coins; None: fresh. Whoever trains may use the coins for nothing but the choice of canaries.

    Attributes:
        included: bool, shape (m,): the canaries to train on. The others must have no influence at all.
    """

    def __init__(self, canaries: int, *, seed: int | None = None) -> None:
        if canaries < 2:
            raise ValueError(f"canaries must be at least 2, got {canaries}; hundreds are needed to show anything.")
        self.included: NDArray[np.bool_] = np.random.default_rng(seed).random(canaries) < 0.5

    def result(
        self, scores: ArrayLike, *, claimed: Guarantee, guesses: int | None = None, confidence: float = 0.95
    ) -> OneRunResult:
        """Guess "included" of the highest scores and "left out" of the lowest, as many of each.

        Args:
            scores: shape (m,), finite, larger for canaries that look trained on; functions of what was released alone.
            claimed: the run's guarantee, such as ``private.spent()``; under add-or-remove-one or zero-out.
            guesses: r, even, chosen before looking at the scores; the rest is left open. None: half of the canaries.
            confidence: of the lower bound, in (0, 1).

        Raises:
            ValueError: scores of another shape or not finite, or a number of guesses out of range.
        """
        values, m = np.asarray(scores, dtype=np.float64), len(self.included)
        if values.shape != (m,) or not np.isfinite(values).all():
            raise ValueError(f"scores must be {m} finite numbers, one for each canary; got shape {values.shape}.")
        r = 2 * max(1, m // 4) if guesses is None else guesses
        if r % 2 or not 2 <= r <= m:
            raise ValueError(f"guesses must be an even number from 2 to {m}, got {r}.")
        order = np.argsort(values, kind="stable")
        right = int((~self.included[order[: r // 2]]).sum() + self.included[order[m - r // 2 :]].sum())
        failure = failure_of(confidence)
        return OneRunResult(
            claimed=claimed.epsilon,
            lower_bound=refuted_epsilon(m, r, right, claimed.delta, failure),
            limit=refuted_epsilon(m, r, r, claimed.delta, failure),
            delta=claimed.delta,
            canaries=m,
            guesses=r,
            right=right,
            confidence=confidence,
        )


def p_value(m: int, r: int, right: int, epsilon: float, delta: float) -> float:
    """The chance of ``right`` or more right guesses under (epsilon, delta)-DP, at most (Theorem 5.2)."""
    chance = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, r, chance))
    below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), r, chance))  # P(right - i <= X < right), i = 1, 2, ...
    worst = float((below / np.arange(1, right + 1)).max()) if right else 0.0
    return min(1.0, tail + 2 * m * delta * worst)


def refuted_epsilon(m: int, r: int, right: int, delta: float, failure: float) -> float:
    """The largest epsilon that so many right guesses refute; 0 if none. The p-value grows with epsilon up to there."""
    if p_value(m, r, right, 0.0, delta) > failure:
        return 0.0
    low, high = 0.0, LARGEST_EPSILON
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(m, r, right, middle, delta) <= failure else (low, middle)
    return low
