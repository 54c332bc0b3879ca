"""Findings of audits on claims, checks that are p-values, and verdicts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scipy.special import bdtr, bdtrc, chdtr, chdtrc, ndtr

from dpoptim.accounting import gdp_epsilon
from dpoptim.audit.sampled_gaussians import SampledGaussians, attainable_errors

DELTA = 1e-5
# of the audited runs that are one Gaussian: where a few thousand trials show most of a claim
MU = 1.5
WEAK = "too weak to tell"
STRONG = 0.5  # of a claim that an attack must be able to show, or its silence says nothing
# of each lower bound: all audits together raise a false alarm with probability below 2e-5
CONFIDENCE = 1 - 1e-6


@dataclass(frozen=True)
class Finding:
    """Outcome of the audit of one method.

    Attributes:
        claimed, lower_bound, limit: epsilons at ``delta``: promised, certified, and what as many
            trials can be expected to show of a tight claim; chance may take ``lower_bound`` beyond.
        trials: certifying trials; 0 where the attack's error rates were computed and not sampled.
        verdict: ``"refuted"``, ``"consistent"``, or ``"too weak to tell"`` where ``limit`` is
            below half of the claim.
        trials_needed: how many of these trials would have a limit of half the claim, if these are
            too few; else 0.
        expected: what the verdict should be: the paper's accounting of DiceSGD is false.
        notes: what refuted the claim beside the attack, and what was not attacked.
    """

    method: str
    claimed: float
    lower_bound: float
    limit: float
    delta: float
    trials: int
    verdict: str
    expected: str
    seconds: float
    trials_needed: int = 0
    notes: tuple[str, ...] = ()

    @property
    def as_expected(self) -> bool:
        """Whether nothing is wrong; an attack that is too weak to tell has found nothing wrong."""
        return self.verdict in (self.expected, WEAK)

    def to_json(self) -> dict[str, Any]:
        """A dictionary that strict JSON can hold, which has no infinity."""
        return asdict(self) | ({} if math.isfinite(self.claimed) else {"claimed": "inf"})


def gaussian_finding(found: Any, claimed_mu: float) -> Finding:
    family = SampledGaussians(1.0, 1, "zero-out")
    attainable = attainable_errors(
        family.tradeoff(1 / claimed_mu), found.errors.absent_trials, CONFIDENCE
    )
    limit = family.lower_bound(attainable, DELTA, CONFIDENCE)
    trials = found.errors.absent_trials + found.errors.present_trials
    claimed = gdp_epsilon(claimed_mu, DELTA)

    def needed() -> int:
        return 2 * family.trials_that_show_half(1 / claimed_mu, claimed, DELTA, CONFIDENCE)

    return finding(
        claimed, gdp_epsilon(found.mu, DELTA) if found.mu > 0 else 0.0, limit, trials, needed=needed
    )


def finding(
    claimed: float,
    lower: float,
    limit: float,
    trials: int,
    expected: str = "consistent",
    *,
    needed: Callable[[], int] = lambda: 0,
) -> Finding:
    """The verdict on a claim; ``needed``: how many trials would do, asked if these are too few."""
    weak = limit < STRONG * claimed
    verdict = "refuted" if lower > claimed * (1 + 1e-9) else WEAK if weak else "consistent"
    trials_needed = needed() if verdict == WEAK else 0
    return Finding("", claimed, lower, limit, DELTA, trials, verdict, expected, 0.0, trials_needed)


def refuted_by(found: Sequence[str]) -> str:
    """The text of a detector that has found this; none, where that is nothing."""
    return f"refuted: {'; '.join(found)}" if found else ""


@dataclass(frozen=True)
class Checks:
    """Every check with its p-value.

    Attributes:
        pvalues: by the check's name; uniform (or above it) under a right implementation.
        failure: probability that a right implementation is refuted, at most.
    """

    pvalues: dict[str, float]
    failure: float

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that a right implementation would not fail."""
        return tuple(
            name for name, p in self.pvalues.items() if not p >= self.failure / len(self.pvalues)
        )

    @property
    def verdict(self) -> str:
        """``"refuted"`` if a check failed, else ``"consistent"``."""
        return "refuted" if self.failed else "consistent"

    def __str__(self) -> str:
        passed = f"{len(self.pvalues)} checks passed"
        found = f"failed: {', '.join(self.failed)}" if self.failed else passed
        return f"{self.verdict}: {found} (false alarm at most {self.failure:g})"


def normal_pvalue(z: float) -> float:
    return min(1.0, 2 * float(ndtr(-abs(z))))


def chi_square_pvalue(squares: float, degrees: float) -> float:
    """Two-sided, of a sum of so many squares of standard normals."""
    return two_sided(chdtr(degrees, squares), chdtrc(degrees, squares))


def binomial_pvalue(count: float, trials: int, rate: float) -> float:
    """Two-sided and exact."""
    count = float(round(count))
    if not 0 <= count <= trials:
        return 0.0
    return two_sided(bdtr(count, trials, rate), bdtrc(count - 1, trials, rate) if count else 1.0)


def two_sided(low: float, high: float) -> float:
    return min(1.0, 2 * float(min(low, high)))
