"""DP-SGD: clip every record's gradient, sum, add noise, divide by the expected batch size (Abadi et al. 2016).

Das et al. Alg. 1, Fang et al. Alg. 1 and Zhang et al. Alg. 1 are this algorithm with the 1/B in three places.
"""

from dataclasses import dataclass
from typing import ClassVar

from dpoptim.clipping import Style
from dpoptim.mechanisms.independent import IndependentNoise
from dpoptim.methods.method import TrainingMethod
from dpoptim.methods.sensitive_state import ClipNormPolicy
from dpoptim.opacus_words import knows_opacus
from dpoptim.sampling import PoissonSampling


@dataclass(frozen=True)
class DPSGD(TrainingMethod):
    """Differentially private SGD; Adam and all other first-order optimizers are post-processing of its noisy mean.

    Args:
        clip_norm: C, the largest norm that one record's gradient may have in the sum; > 0. Or a `PrivateQuantile`, by which
            the run finds it within its budget.
        clipping: ``"flat"`` (g min(1, C/|g|)), ``"automatic"`` (C g / (|g| + 0.01))
            or ``"per-layer"`` (each of the L layers by itself, to C / sqrt(L)).
    """

    clip_norm: float | ClipNormPolicy
    clipping: Style = "flat"
    name: ClassVar[str] = "dp-sgd"
    summary: ClassVar[str] = "clipped gradients of Poisson batches, with independent noise (Abadi et al. 2016)"

    def __post_init__(self) -> None:
        self.check()

    def sampler(self, n: int, batch_size: int) -> PoissonSampling:
        return PoissonSampling(batch_size / n)

    @property
    def mechanism(self) -> IndependentNoise:
        return IndependentNoise()


DPSGD.__init__ = knows_opacus(DPSGD.__init__)  # type: ignore[method-assign]  # DPSGD(max_grad_norm=...)
