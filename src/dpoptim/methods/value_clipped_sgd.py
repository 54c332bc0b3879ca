"""DP-SGD whose gradients are bounded before they are computed (Fang et al. 2023, Alg. 3)."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from dpoptim.arguments import one_of
from dpoptim.assumptions import Assumption, enforced
from dpoptim.mechanisms.independent import IndependentNoise
from dpoptim.methods.method import TrainingMethod
from dpoptim.methods.sensitive_state import ClipNormPolicy
from dpoptim.sampling import PoissonSampling

Bound = Literal["sharp", "paper"]
PROVED = enforced(
    "bounds on gradients are proved for the model's layers; any other layer is refused"
)


@dataclass(frozen=True)
class ValueClippedSGD(TrainingMethod):
    """DP-SGD with an upper bound in place of each gradient norm: no per-sample gradients.

    One forward and one ordinary backward pass. Linear models and feed-forward nets alone (chains
    of ``nn.Linear`` and activations), for which the bound is proved; whatever else is refused by
    name. In the training loop::

        losses = F.cross_entropy(model(x), y, reduction="none")
        private.backward(losses)

    Args:
        clip_norm: C, the largest norm that one record's gradient may have in the sum; > 0. The
            bound exceeds the norm in nets of several layers, so C may well be larger than for
            `DPSGD`. Or a `PrivateQuantile`, of the bounds.
        bound: ``"sharp"`` (measured slopes and activations; exact for linear models) or ``"paper"``
            (the paper's constants for softmax cross-entropy, with the biases that they leave out).

    Examples:
        >>> import dpoptim
        >>> plan = dpoptim.ValueClippedSGD(clip_norm=4.0).plan(
        ...     n=10_000, batch_size=500, epochs=2, epsilon=4.0, delta=1e-6
        ... )
        >>> plan.method.value_bound
        'sharp'
    """

    clip_norm: float | ClipNormPolicy
    bound: Bound = "sharp"
    name: ClassVar[str] = "value-sgd"
    summary: ClassVar[str] = (
        "DP-SGD by bounds known before the backward pass; feed-forward nets (Fang et al. 2023, "
        "Alg. 3)"
    )
    trains: ClassVar[str] = "feed-forward nets"

    def __post_init__(self) -> None:
        self.check()
        one_of("bound", self.bound, get_args(Bound))

    def sampler(self, n: int, batch_size: int) -> PoissonSampling:
        return PoissonSampling(batch_size / n)

    @property
    def mechanism(self) -> IndependentNoise:
        return IndependentNoise()

    @property
    def value_bound(self) -> str:  # type: ignore[override]
        return self.bound

    def method_assumptions(self) -> tuple[Assumption, ...]:
        return (PROVED,)
