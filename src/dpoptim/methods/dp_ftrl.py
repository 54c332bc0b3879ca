"""DP-FTRL: no sampling, but noise that later steps take back (Kairouz et al. 2021; Denisov et al. 2022).

For whoever cannot sample: data that arrives in order, or that must be read in fixed batches. An optimizer whose iterates
are linear in its gradients (SGD, momentum, any learning-rate schedule) sees prefix sums of what is released, and their
noise is small where batches are correlated well.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from dpoptim.arguments import one_of
from dpoptim.assumptions import Assumption
from dpoptim.clipping import Style
from dpoptim.mechanisms.correlated import CorrelatedNoise
from dpoptim.methods.method import TrainingMethod
from dpoptim.methods.sensitive_state import ClipNormPolicy
from dpoptim.methods.value_clipped_sgd import PROVED
from dpoptim.noise.correlated import BinaryTree, BufferedToeplitz, Independent, Strategy, ToeplitzSquareRoot
from dpoptim.sampling import FixedBatches

Noise = Literal["buffered-toeplitz", "toeplitz", "toeplitz-normalised", "tree", "tree-honaker", "independent"]
FixedOrder = Literal["shuffled", "given"]
STRATEGIES: dict[str, Strategy] = {
    "buffered-toeplitz": BufferedToeplitz(),
    "toeplitz": ToeplitzSquareRoot(),
    "toeplitz-normalised": ToeplitzSquareRoot(normalised=True),
    "tree": BinaryTree(),
    "tree-honaker": BinaryTree(estimate="honaker"),
    "independent": Independent(),
}


@dataclass(frozen=True)
class DPFTRL(TrainingMethod):
    """Private training on fixed batches with correlated noise, in one or several passes of the same order.

    Args:
        clip_norm: C, the largest norm that one record's gradient may have in the sum; > 0. Or a `PrivateQuantile`: noise is
            taken back in units of C, so fully only once C has been found.
        clipping: ``"flat"``, ``"automatic"`` or ``"per-layer"``; as for `DPSGD`.
        noise: the strategy. ``"buffered-toeplitz"`` needs a few times the model's memory whatever the number of steps;
            ``"toeplitz"`` and ``"toeplitz-normalised"`` are a little better, and keep one vector for every step so far;
            ``"tree"`` and ``"tree-honaker"`` keep one for every level; ``"independent"`` is plain noise, for comparison.
        order: ``"shuffled"`` once, by coins, or as ``"given"`` by the data set, if its order depends on no record.
        value_bound: ``"sharp"`` or ``"paper"``: bound gradients before they are computed, as `ValueClippedSGD` does.

    Fixed batches: zero-out or replace-one only, n public and exact. A record takes part once a pass, exactly
    ceil(n / batch_size) steps apart, which is what the noise is made for.
    """

    clip_norm: float | ClipNormPolicy
    clipping: Style = "flat"
    noise: Noise = "buffered-toeplitz"
    order: FixedOrder = "shuffled"
    value_bound: Literal["sharp", "paper"] | None = None
    name: ClassVar[str] = "dp-ftrl"
    summary: ClassVar[str] = "fixed batches, with noise that later steps take back (Denisov et al. 2022)"

    def __post_init__(self) -> None:
        self.check()
        one_of("noise", self.noise, get_args(Noise))
        one_of("order", self.order, get_args(FixedOrder))
        one_of("value_bound", self.value_bound, ("sharp", "paper", None))
        if self.value_bound is not None and self.clipping != "flat":
            raise ValueError(f"clipping={self.clipping!r} is of measured norms; with value_bound, use 'flat'.")

    def sampler(self, n: int, batch_size: int) -> FixedBatches:
        return FixedBatches(n, batch_size, self.order)

    @property
    def mechanism(self) -> CorrelatedNoise:
        return CorrelatedNoise(STRATEGIES[self.noise])

    def method_assumptions(self) -> tuple[Assumption, ...]:
        noise = f"the noise is correlated over steps ({self.noise}), for records that take part once a pass"
        order = Assumption("trusted", "the order of the data set depends on no record")
        return (
            *([] if self.value_bound is None else [PROVED]),
            Assumption("enforced", noise),
            *([order] if self.order == "given" else []),
        )
