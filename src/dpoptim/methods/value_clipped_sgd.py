"""DP-SGD whose gradients are bounded before they are computed (Fang et al. 2023, Alg. 3)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import dp_accounting
from dp_accounting import NeighboringRelation

from dpoptim.accounting.calibration import calibrate_noise_multiplier
from dpoptim.clipping import Clipping
from dpoptim.gate import GaussianSum
from dpoptim.methods.basis import NOISE, bounded
from dpoptim.plan import Basis, Plan, make_plan
from dpoptim.sampling import PoissonSampling

Bound = Literal["sharp", "paper"]


@dataclass(frozen=True)
class ValueClippedSGD:
    """DP-SGD with an upper bound on each record's gradient norm in place of the norm: no per-record gradients at all.

    One forward and one ordinary backward pass. Linear models and feed-forward nets alone (chains of ``nn.Linear`` and
    activations), for which the bound is proved; whatever else is refused by name. In the training loop::

        losses = F.cross_entropy(model(x), y, reduction="none")
        private.backward(losses)

    Args:
        clip_norm: C, the largest norm that one record's gradient may have in the sum; > 0. The bound exceeds the norm in
            nets of several layers, so C may well be larger than for `DPSGD`.
        bound: ``"sharp"`` (measured slopes and activations; exact for linear models) or ``"paper"`` (the paper's constants
            for softmax cross-entropy, with the biases that they leave out).
    """

    clip_norm: float
    bound: Bound = "sharp"

    def __post_init__(self) -> None:
        _ = self.rule  # validates
        if self.bound not in get_args(Bound):
            raise ValueError(f"bound must be 'sharp' or 'paper', got {self.bound!r}.")
        object.__setattr__(self, "clip_norm", float(self.clip_norm))

    @cached_property
    def rule(self) -> Clipping:
        return Clipping(self.clip_norm)

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
        return GaussianSum(self.clip_norm, plan.noise_multiplier)

    def private_side(self, plan: Plan) -> None:
        return None

    def norm_choice(self, plan: Plan) -> None:
        return None

    def unproven_guarantee(self, plan: Plan, delta: float) -> None:
        return None

    def basis(self, plan: Plan) -> tuple[Basis, ...]:
        proof = Basis("enforced", "bounds on gradients are proved for the model's layers; any other layer is refused")
        return (bounded(self.clip_norm), proof, NOISE)

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
        """Decide everything about a private run before it starts; arguments and errors as for `DPSGD.plan`."""
        return make_plan(
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
