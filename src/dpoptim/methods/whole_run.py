"""A whole-run solver as a plan's method: what it may spend is one Gaussian, however it divides that up."""

from dataclasses import dataclass
from typing import NoReturn

import dp_accounting

from dpoptim.accounting.calibration import calibrate_noise_multiplier
from dpoptim.clipping import Clipping
from dpoptim.methods.basis import NOISE, bounded
from dpoptim.plan import Basis, Plan, make_plan
from dpoptim.sampling import AllRecords


@dataclass(frozen=True)
class WholeRun:
    """A solver of `dpoptim.solvers` on a linear model, within a budget that is reserved as one Gaussian.

    Args:
        solver: ``"noisy-gd"``, ``"kl-spider"``, ...; see `DPLogisticRegression`.
        clip_norm: bound on each record's gradient; > 0.
    """

    solver: str
    clip_norm: float

    def __post_init__(self) -> None:
        _ = self.rule  # validates
        object.__setattr__(self, "clip_norm", float(self.clip_norm))

    @property
    def rule(self) -> Clipping:
        return Clipping(self.clip_norm)

    def sampler(self, n: int, batch_size: int) -> AllRecords:
        return AllRecords()

    def calibrate(self, *, n: int, batch_size: int, steps: int, epsilon: float, delta: float, neighboring: str) -> float:
        return calibrate_noise_multiplier(sample_rate=1, steps=1, epsilon=epsilon, delta=delta, neighboring=neighboring)

    def event(self, plan: Plan) -> dp_accounting.DpEvent:
        return dp_accounting.GaussianDpEvent(plan.noise_multiplier)

    def query(self, plan: Plan) -> NoReturn:
        raise TypeError(f"a plan for {self.solver!r} is carried out by dpoptim.solvers, not by dpoptim.attach.")

    def private_side(self, plan: Plan) -> None:
        return None

    def norm_choice(self, plan: Plan) -> None:
        return None

    def unproven_guarantee(self, plan: Plan, delta: float) -> None:
        return None

    def basis(self, plan: Plan) -> tuple[Basis, ...]:
        return (
            bounded(self.clip_norm),
            Basis("enforced", "a privacy filter is asked before every release, and keeps their total within the budget"),
            NOISE,
        )

    def plan(
        self,
        *,
        n: int,
        epsilon: float | None = None,
        delta: float | None = None,
        noise_multiplier: float | None = None,
        neighboring: str = "zero-out",
    ) -> Plan:
        """The budget of a run on ``n`` records, exact and public; ``noise_multiplier`` is 1 / mu."""
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
