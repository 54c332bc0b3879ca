"""Noise that later steps take back, so that prefix sums of what is released carry little of it (Denisov et al. 2022)."""

from dataclasses import dataclass

import dp_accounting

from dpoptim.gate import CorrelatedSum
from dpoptim.mechanisms.mechanism import RunShape, StepMechanism
from dpoptim.noise.correlated.strategy import Strategy


@dataclass(frozen=True)
class CorrelatedNoise(StepMechanism):
    """Gaussian noise that is correlated over the steps by a strategy matrix.

    **Guarantee.** The whole run is **one** Gaussian of the noise multiplier, if a record adds at most the norm bound to each
    sum that it takes part in, at most ``sampler.participations`` of them and ``sampler.separation`` steps apart: the
    strategy's sensitivity for that pattern is in the noise (Denisov et al. 2022, Theorem 2.1).

    Args:
        strategy: how the noise of different steps hangs together.
    """

    strategy: Strategy

    def audit_family(self, run: RunShape) -> str:
        return "fixed order"

    def event(self, run: RunShape, noise_multiplier: float) -> dp_accounting.DpEvent:
        return dp_accounting.GaussianDpEvent(noise_multiplier)

    def query(self, run: RunShape, noise_multiplier: float, norm_bound: float) -> CorrelatedSum:
        return CorrelatedSum(
            norm_bound,
            noise_multiplier,
            self.strategy,
            run.steps,
            participations=run.sampler.participations(run.steps),
            separation=run.sampler.separation,
        )
