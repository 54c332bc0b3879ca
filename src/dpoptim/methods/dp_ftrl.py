"""DP-FTRL: no sampling, but noise that later steps take back (Kairouz et al. 2021; Denisov et al. 2022).

For whoever cannot sample: data that arrives in order, or that must be read in fixed batches. An optimizer whose iterates
are linear in its gradients (SGD, momentum, any learning-rate schedule) sees prefix sums of what is released, and their
noise is small where batches are correlated well.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import dp_accounting
from dp_accounting import NeighboringRelation

from dpoptim.accounting.calibration import calibrate_noise_multiplier
from dpoptim.clipping import Clipping, Style
from dpoptim.gate import CorrelatedSum
from dpoptim.methods.basis import NOISE, bounded
from dpoptim.noise.correlated import BinaryTree, BufferedToeplitz, Independent, Mechanism, ToeplitzSquareRoot
from dpoptim.plan import Basis, Plan, make_plan
from dpoptim.sampling import FixedBatches

Noise = Literal["buffered-toeplitz", "toeplitz", "toeplitz-normalised", "tree", "tree-honaker", "independent"]
FixedOrder = Literal["shuffled", "given"]
MECHANISMS: dict[str, Mechanism] = {
    "buffered-toeplitz": BufferedToeplitz(),
    "toeplitz": ToeplitzSquareRoot(),
    "toeplitz-normalised": ToeplitzSquareRoot(normalised=True),
    "tree": BinaryTree(),
    "tree-honaker": BinaryTree(estimate="honaker"),
    "independent": Independent(),
}


@dataclass(frozen=True)
class DPFTRL:
    """Private training on fixed batches with correlated noise, in one or several passes of the same order.

    Args:
        clip_norm: C, the largest norm that one record's gradient may have in the sum; > 0.
        clipping: ``"flat"``, ``"automatic"`` or ``"per-layer"``; as for `DPSGD`.
        noise: the mechanism. ``"buffered-toeplitz"`` needs a few times the model's memory whatever the number of steps;
            ``"toeplitz"`` and ``"toeplitz-normalised"`` are a little better, and keep one vector for every step so far;
            ``"tree"`` and ``"tree-honaker"`` keep one for every level; ``"independent"`` is plain noise, for comparison.
        order: ``"shuffled"`` once, by coins, or as ``"given"`` by the data set, if its order depends on no record.

    Fixed batches: zero-out or replace-one only, n public and exact. A record takes part once a pass, exactly
    ceil(n / batch_size) steps apart, which is what the noise is made for.
    """

    clip_norm: float
    clipping: Style = "flat"
    noise: Noise = "buffered-toeplitz"
    order: FixedOrder = "shuffled"

    def __post_init__(self) -> None:
        _ = self.rule  # validates
        for name, value, choices in (("noise", self.noise, Noise), ("order", self.order, FixedOrder)):
            if value not in get_args(choices):
                raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(choices)))}, got {value!r}.")
        object.__setattr__(self, "clip_norm", float(self.clip_norm))  # numpy's numbers would not survive JSON

    @cached_property
    def rule(self) -> Clipping:
        """What the engine does with each record's gradient."""
        return Clipping(self.clip_norm, self.clipping)

    def sampler(self, n: int, batch_size: int) -> FixedBatches:
        return FixedBatches(n, batch_size, self.order)

    def calibrate(self, *, n: int, batch_size: int, steps: int, epsilon: float, delta: float, neighboring: str) -> float:
        return calibrate_noise_multiplier(sample_rate=1, steps=1, epsilon=epsilon, delta=delta, neighboring=neighboring)

    def event(self, plan: Plan) -> dp_accounting.DpEvent:
        """One Gaussian for the whole run (Denisov et al. 2022, Theorem 2.1)."""
        return dp_accounting.GaussianDpEvent(plan.noise_multiplier)

    def query(self, plan: Plan) -> CorrelatedSum:
        batches = plan.sampler
        assert isinstance(batches, FixedBatches)
        return CorrelatedSum(
            self.clip_norm,
            plan.noise_multiplier,
            MECHANISMS[self.noise],
            plan.steps,
            participations=batches.participations(plan.steps),
            separation=batches.separation,
        )

    def private_side(self, plan: Plan) -> None:
        return None

    def norm_choice(self, plan: Plan) -> None:
        return None

    def unproven_guarantee(self, plan: Plan, delta: float) -> None:
        return None

    def basis(self, plan: Plan) -> tuple[Basis, ...]:
        return (
            bounded(self.clip_norm),
            Basis("enforced", f"the noise is correlated over steps ({self.noise}), for records that take part once a pass"),
            NOISE,
            *([Basis("trusted", "the order of the data set depends on no record")] if self.order == "given" else []),
        )

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
        neighboring: str | NeighboringRelation = "zero-out",
    ) -> Plan:
        """Decide everything about a private run before it starts; arguments as for `DPSGD.plan`, but for two.

        Args:
            n: the number of records, exact and public.
            epochs: whole passes over fixed batches.
            noise_multiplier: 1 / mu: the noise multiplier of the one Gaussian that the whole run costs.
            neighboring: ``"zero-out"`` or ``"replace-one"``.

        Raises:
            ValueError, TypeError: naming the argument and the fix.
        """
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
