"""A mechanism in one file: each step takes back a share of the noise of the step before."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import dp_accounting
from torch import Tensor

from dpoptim.gate import CorrelatedSum
from dpoptim.mechanisms import RunShape, StepMechanism
from dpoptim.methods import TrainingMethod
from dpoptim.noise.correlated import NoiseState
from dpoptim.sampling import FixedBatches


class Remembered(NoiseState):
    share = 0.5

    def _increment(self, remembered: list[Tensor], like: Tensor) -> Tensor:
        remembered[:] = [self._draw(like) - sum(self.share * before for before in remembered)]
        return remembered[0].clone()


class Returned:
    """The strategy with ones on the diagonal and ``Remembered.share`` below it."""

    def sensitivity(self, steps: int, *pattern: Any, regular: bool = False) -> float:
        return math.hypot(1.0, Remembered.share if steps > 1 else 0.0)  # the norm of a column

    def start(self, steps: int, sizes: Any, stream: Any) -> NoiseState:
        return Remembered(steps, sizes, stream)


@dataclass(frozen=True)
class ReturnedNoise(StepMechanism):
    def audit_family(self, run: RunShape) -> str:
        return "fixed order"

    def event(self, run: RunShape, noise_multiplier: float) -> dp_accounting.DpEvent:
        if run.sampler.participations(run.steps) > 1:
            raise ValueError("epochs must be 1: the noise is for records that take part once.")
        return dp_accounting.GaussianDpEvent(noise_multiplier)

    def query(self, run: RunShape, noise_multiplier: float, norm_bound: float) -> CorrelatedSum:
        return CorrelatedSum(norm_bound, noise_multiplier, Returned(), run.steps)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ReturningSGD(TrainingMethod):
    """One pass over fixed batches with `ReturnedNoise`."""

    clip_norm: float
    name: ClassVar[str] = "returning-sgd"
    summary: ClassVar[str] = "one pass, each step taking back half of the noise before"
    mechanism: ClassVar[StepMechanism] = ReturnedNoise()  # type: ignore[misc]

    def sampler(self, n: int, batch_size: int) -> FixedBatches:
        return FixedBatches(n, batch_size)
