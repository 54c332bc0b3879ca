"""Checks that are p-values, as audits of noise and of participation make them."""

from dataclasses import dataclass

from scipy.special import bdtr, bdtrc, chdtr, chdtrc, ndtr


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
