"""A method in one file: DP-SGD whose noise decays geometrically, so that late steps are the exact
ones.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dpoptim.arguments import positive_number
from dpoptim.clipping import Style
from dpoptim.mechanisms import IndependentNoise
from dpoptim.methods import TrainingMethod
from dpoptim.sampling import Floats, PoissonSampling


@dataclass(frozen=True)
class DecayingNoise(IndependentNoise):
    """Independent noise whose standard deviation falls by half every ``half_life`` steps."""

    half_life: float = 100.0

    def scales(self, steps: int) -> Floats:
        return 0.5 ** (np.arange(steps) / self.half_life)


@dataclass(frozen=True)
class DecayingSGD(TrainingMethod):
    """DP-SGD with `DecayingNoise`.

    Args:
        clip_norm, clipping: as for `dpoptim.DPSGD`.
        half_life: steps in which the noise falls by half; > 0.
    """

    clip_norm: float
    clipping: Style = "flat"
    half_life: float = 100.0
    name: ClassVar[str] = "decaying-sgd"
    summary: ClassVar[str] = "DP-SGD with noise that decays geometrically"

    def __post_init__(self) -> None:
        self.check()
        object.__setattr__(self, "half_life", positive_number("half_life", self.half_life))

    def sampler(self, n: int, batch_size: int) -> PoissonSampling:
        return PoissonSampling(batch_size / n)

    @property
    def mechanism(self) -> DecayingNoise:
        return DecayingNoise(self.half_life)
