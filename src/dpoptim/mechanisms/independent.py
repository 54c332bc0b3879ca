"""Independent Gaussian noise in every step: DP-SGD's mechanism, amplified by the sampler."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import dp_accounting
import numpy as np

from dpoptim.gate import GaussianSum
from dpoptim.mechanisms.mechanism import RunShape, StepMechanism
from dpoptim.origins import of_this_library
from dpoptim.sampling import FixedBatches, Floats, PlannedPoissonSampling, PoissonSampling


@dataclass(frozen=True)
class IndependentNoise(StepMechanism):
    """Fresh noise in every step, of one size or of planned ones.

    Args:
        schedule: noise in equal stretches of the run, over the plan's noise multiplier; > 0.
            Empty: 1 throughout.

    **Guarantee.** The run is the sampler's composition of Gaussians (`Sampler.event`), one for
    each step at that step's noise multiplier, if a record adds at most the norm bound to each sum
    that it takes part in.
    """

    def scales(self, steps: int) -> Floats:
        """Return each step's noise over the noise multiplier; positive, (steps,). Public."""
        return in_stretches(self.schedule or (1.0,), steps)

    schedule: tuple[float, ...] = field(default=(), kw_only=True)

    def audit_family(self, run: RunShape) -> str:
        if self.says_poisson(run):
            return "two worlds"
        own = isinstance(run.sampler, FixedBatches) and of_this_library(type(run.sampler))
        return "fixed order" if own else "everybody"

    def says_poisson(self, run: RunShape) -> bool:
        """Whether the run is priced as Poisson batches of the planned size, whoever draws them."""
        sampler, scales = run.sampler, self.scales(run.steps)
        if not isinstance(sampler, PoissonSampling | PlannedPoissonSampling):
            return False
        if of_this_library(type(sampler)):
            return True
        plain = (
            PoissonSampling(run.batch_size / run.n)
            if isinstance(sampler, PoissonSampling)
            else PlannedPoissonSampling(run.batch_size / run.n, sampler.changes)
        )
        try:
            return bool(sampler.event(scales) == plain.event(scales))
        except ValueError:  # it has no price for noise of several sizes
            return False

    def event(self, run: RunShape, noise_multiplier: float) -> dp_accounting.DpEvent:
        return run.sampler.event(noise_multiplier * self.scales(run.steps))

    def event_of_part(
        self, run: RunShape, noise_multiplier: float, *, released: int, repeated: int
    ) -> dp_accounting.DpEvent | None:
        """The sampler's composition of the steps released.

        Steps made twice count at the least noise of the run, and have a price only where a record's
        coins are fresh in every step, at one rate.
        """
        noise = noise_multiplier * self.scales(run.steps)
        of_one_kind = not isinstance(run.sampler, PlannedPoissonSampling)
        if repeated and not (of_one_kind and run.sampler.participations(run.steps) == run.steps):
            return None  # of batches that are dealt out, a record may see both
        if released + repeated == 0:
            return dp_accounting.NoOpDpEvent()
        again = np.full(repeated, noise.min())
        return run.sampler.event(np.concatenate([noise[:released], again]))

    def query(self, run: RunShape, noise_multiplier: float, norm_bound: float) -> GaussianSum:
        scales = self.scales(run.steps)
        return GaussianSum(
            norm_bound, noise_multiplier, () if np.all(scales == 1) else tuple(scales.tolist())
        )

    def prefix_noise(self, run: RunShape) -> float:
        squares = np.cumsum(self.scales(run.steps) ** 2)
        return float(np.sqrt(np.mean(squares) / ((run.steps + 1) / 2)))


def in_stretches(values: Sequence[float], steps: int) -> Floats:
    """Return each step's value where ``values`` take stretches of the run, as equal as may be."""
    return np.asarray(values, dtype=np.float64)[np.arange(steps) * len(values) // steps]
