"""A whole-run solver as a plan's method: one Gaussian, however the solver divides it."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import dp_accounting

from dpoptim.assumptions import NOISE, Assumption, bounded, enforced
from dpoptim.clipping import Clipping
from dpoptim.mechanisms.mechanism import Mechanism, RunShape
from dpoptim.opacus_words import KnowsOpacus
from dpoptim.plan import Plan, make_plan
from dpoptim.sampling import AllRecords

SUMMARIES = {
    "sufficient-statistics": "regression from noisy sums of products, one release (after AdaSSP)",
    "momentum-gd": "full-batch gradient descent with momentum",
    "noisy-gd": "full-batch gradient descent (Menart et al., Alg. 4)",
    "kl-spider": "variance-reduced steps between anchors, under a KL condition (Menart et al., "
    "Alg. 1)",
    "adaptive-gd": "gradient descent whose noise follows the gradient's norm (Menart et al., "
    "Alg. 3)",
    "proximal-point": "a sequence of regularised problems (Menart et al., Alg. 2)",
    "accelerated-srgd": "one pass with noisy prefix sums of gradient differences (Choquette-Choo "
    "et al.)",
}


@dataclass(frozen=True)
class FilteredBudget(Mechanism):
    """Noise that a run divides up as it goes, within a budget that is reserved as one Gaussian.

    **Guarantee.** The run is one Gaussian of the noise multiplier: a filter is asked before every
    release.
    """

    def audit_family(self, run: RunShape) -> str:
        return "whole run"

    def event(self, run: RunShape, noise_multiplier: float) -> dp_accounting.DpEvent:
        return dp_accounting.GaussianDpEvent(noise_multiplier)

    def assumptions(self, run: RunShape) -> tuple[Assumption, ...]:
        filtered = (
            "a privacy filter is asked before every release, and keeps their total within the "
            "budget"
        )
        return (enforced(filtered),)


@dataclass(frozen=True)
class WholeRun(KnowsOpacus):
    """A solver of `dpoptim.solvers` on a linear model, its budget reserved as one Gaussian.

    Args:
        solver: ``"noisy-gd"``, ``"kl-spider"``, ...; see `DPLogisticRegression`.
        clip_norm: bound on each record's gradient; > 0. Of sufficient statistics: on what it adds
            to the sums.
        options: further settings of the solver, by name; public.
    """

    solver: str
    clip_norm: float
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    trains: ClassVar[str] = "linear models"
    policy: ClassVar[None] = None

    def __post_init__(self) -> None:
        _ = self.rule  # validates
        object.__setattr__(self, "clip_norm", float(self.clip_norm))

    @property
    def name(self) -> str:
        return self.solver

    @property
    def summary(self) -> str:
        return SUMMARIES[self.solver]

    @property
    def rule(self) -> Clipping:
        return Clipping(self.clip_norm)

    @property
    def norm_bound(self) -> float:
        return self.clip_norm

    @property
    def mechanism(self) -> FilteredBudget:
        return FilteredBudget()

    def sampler(self, n: int, batch_size: int) -> AllRecords:
        return AllRecords()

    def settled(self, run: RunShape, *, epsilon: float | None, delta: float | None) -> "WholeRun":
        return self

    def assumptions(self, run: RunShape) -> tuple[Assumption, ...]:
        return (bounded(self.clip_norm), *self.mechanism.assumptions(run), NOISE)

    def plan(
        self,
        *,
        n: int,
        epsilon: float | None = None,
        delta: float | None = None,
        noise_multiplier: float | None = None,
        neighboring: str = "zero-out",
    ) -> Plan:
        """Return the budget of a run on ``n`` records, exact; ``noise_multiplier`` is 1 / mu."""
        return make_plan(
            self,
            n=n,
            batch_size=n,
            steps=1,
            epsilon=epsilon,
            delta=delta,
            noise_multiplier=noise_multiplier,
            neighboring=neighboring,
        )
