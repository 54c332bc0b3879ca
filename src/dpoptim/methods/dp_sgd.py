"""DP-SGD: clip every record's gradient, sum, add noise, divide by the expected batch size (Abadi et al. 2016).

Das et al. Alg. 1, Fang et al. Alg. 1 and Zhang et al. Alg. 1 are this algorithm with the 1/B in three places.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import dp_accounting
from dp_accounting import NeighboringRelation

from dpoptim.accounting.calibration import calibrate_noise_multiplier
from dpoptim.clipping import Clipping, Style
from dpoptim.gate import GaussianSum
from dpoptim.methods.basis import NOISE, bounded
from dpoptim.methods.private_quantile import PrivateQuantile, QuantileSearch
from dpoptim.plan import Basis, Plan, make_plan
from dpoptim.sampling import PoissonSampling


@dataclass(frozen=True)
class DPSGD:
    """Differentially private SGD; Adam and all other first-order optimizers are post-processing of its noisy mean.

    Args:
        clip_norm: C, the largest norm that one record's gradient may have in the sum; > 0. Or a `PrivateQuantile`, by which
            the run finds it within its budget.
        clipping: ``"flat"`` (g min(1, C/|g|)), ``"automatic"`` (C g / (|g| + 0.01))
            or ``"per-layer"`` (each of the L layers by itself, to C / sqrt(L)).
    """

    clip_norm: float | PrivateQuantile
    clipping: Style = "flat"

    def __post_init__(self) -> None:
        if isinstance(self.clip_norm, Mapping):  # from a plan's JSON
            object.__setattr__(self, "clip_norm", PrivateQuantile(**self.clip_norm))
        _ = self.rule  # validates
        if not isinstance(self.clip_norm, PrivateQuantile):
            object.__setattr__(self, "clip_norm", float(self.clip_norm))  # numpy's numbers would not survive JSON

    @cached_property
    def rule(self) -> Clipping:
        """What the engine does with each record's gradient; at the start, if that changes."""
        fixed = self.clip_norm.start if isinstance(self.clip_norm, PrivateQuantile) else self.clip_norm
        return Clipping(fixed, self.clipping)

    def sampler(self, n: int, batch_size: int) -> PoissonSampling:
        return PoissonSampling(batch_size / n)

    def calibrate(self, *, n: int, batch_size: int, steps: int, epsilon: float, delta: float, neighboring: str) -> float:
        return calibrate_noise_multiplier(
            sample_rate=batch_size / n, steps=steps, epsilon=epsilon, delta=delta, neighboring=neighboring
        )

    def event(self, plan: Plan) -> dp_accounting.DpEvent:
        """Poisson-sampled Gaussians, composed."""
        assert isinstance(plan.sampler, PoissonSampling)
        return plan.sampler.event(dp_accounting.GaussianDpEvent(plan.noise_multiplier), plan.steps)

    def query(self, plan: Plan) -> GaussianSum:
        """Sums of gradients; with a `PrivateQuantile`, of whatever its steps release, scaled to the norm bound 1."""
        return GaussianSum(1.0 if isinstance(self.clip_norm, PrivateQuantile) else self.clip_norm, plan.noise_multiplier)

    def private_side(self, plan: Plan) -> None:
        return None

    def norm_choice(self, plan: Plan) -> QuantileSearch | None:
        if not isinstance(self.clip_norm, PrivateQuantile):
            return None
        return QuantileSearch(
            self.clip_norm,
            self.clipping,
            batch_size=plan.batch_size,
            steps=plan.steps,
            capacity=plan.sampler.capacity(plan.n),
        )

    def unproven_guarantee(self, plan: Plan, delta: float) -> None:
        return None

    def basis(self, plan: Plan) -> tuple[Basis, ...]:
        if isinstance(self.clip_norm, PrivateQuantile):
            bound = Basis("enforced", "each record adds at most the current clip norm to the sum, rounding included")
            return (bound, self.clip_norm.basis(), NOISE)
        return (bounded(self.clip_norm), NOISE)

    def plan(
        self,
        *,
        n: int,
        batch_size: int,
        epochs: float | None = None,
        steps: int | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        noise_multiplier: float | None = None,
        neighboring: str | NeighboringRelation = "add-or-remove-one",
    ) -> Plan:
        """Decide everything about a private run before it starts.

        Args:
            n: number of records, a public number. Under add-or-remove-one it is nominal: never derived from the data.
            batch_size: expected size of a Poisson batch, 1 <= batch_size <= n; the noisy sum is divided by it.
            epochs, steps: how long to train; give one of the two. Epochs are rounded up to whole steps.
            epsilon, delta: the budget; the noise is calibrated so as not to exceed it. epsilon > 0, 1e-14 < delta < 1.
            noise_multiplier: instead of epsilon: noise std on the sum over the clip norm, the same for every relation.
                Still give delta, at which the guarantee is stated. 0 turns the noise off and promises nothing.
            neighboring: ``"add-or-remove-one"``, ``"zero-out"`` or ``"replace-one"``.

        Raises:
            ValueError, TypeError: naming the argument and the fix.
        """
        plan = make_plan(
            self,
            n=n,
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            epsilon=epsilon,
            delta=delta,
            noise_multiplier=noise_multiplier,
            neighboring=neighboring,
        )
        if isinstance(self.clip_norm, PrivateQuantile):
            self.clip_norm.require_signal(
                batch_size=plan.batch_size, steps=plan.steps, noise_multiplier=plan.noise_multiplier
            )
        return plan
