"""Mechanisms: given a sampler, each states the noise of every step and the cost of the run."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import dp_accounting

from dpoptim.accounting.calibration import calibrate_noise_multiplier, calibrate_remembered
from dpoptim.accounting.guarantee import Guarantee
from dpoptim.assumptions import Assumption
from dpoptim.gate import Query
from dpoptim.sampling import Sampler


@dataclass(frozen=True)
class RunShape:
    """The public numbers of a run, its noise apart.

    Attributes:
        sampler: who takes part in which step.
        n: records, nominal or exact.
        batch_size: expected; what noisy sums are divided by.
        steps: noisy sums.
        neighboring: the relation, by name.
    """

    sampler: Sampler
    n: int
    batch_size: int
    steps: int
    neighboring: str


class Mechanism(ABC):
    """Public settings of the noise of a whole run: a frozen dataclass.

    The noise multiplier is whatever `event` takes it for; by convention the noise's standard
    deviation over the bound that a record's own part has, so that 0 is no noise.
    """

    @abstractmethod
    def audit_family(self, run: RunShape) -> str:
        """Return the attack that the run must stand up to.

        One of `dpoptim.audit.attack_families`, or ``"package.module:function"``: a function like
        those there.
        """

    @abstractmethod
    def event(self, run: RunShape, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Return what the whole run costs with this noise, > 0."""

    def event_of_part(
        self, run: RunShape, noise_multiplier: float, *, released: int, repeated: int
    ) -> dp_accounting.DpEvent | None:
        """Return the charge of a run that ended after ``released`` steps; None: only the whole's.

        Args:
            released: in [0, run.steps].
            repeated: so many of these steps were released twice, by parts that were taken up from
                a checkpoint.

        **Guarantee.** Each step is a mechanism of its own, given everything released before, and
        the event covers those released, wherever the run ends and whatever that depends on
        ("Giving back" in `dpoptim.accounting.budget`).
        """
        return None

    def calibrate(self, run: RunShape, *, epsilon: float, delta: float) -> float:
        """Return the noise multiplier of a run that costs at most this, at least 99 % of it."""
        match self.event(run, 1.0):
            case dp_accounting.SelfComposedDpEvent(
                event=dp_accounting.PoissonSampledDpEvent(
                    sampling_probability=rate,
                    event=dp_accounting.GaussianDpEvent(noise_multiplier=1.0),
                ),
                count=count,
            ):
                return calibrate_noise_multiplier(
                    sample_rate=rate,
                    steps=count,
                    epsilon=epsilon,
                    delta=delta,
                    neighboring=run.neighboring,
                )
            case dp_accounting.SelfComposedDpEvent(
                event=dp_accounting.GaussianDpEvent(noise_multiplier=1.0), count=count
            ):
                pass
            case dp_accounting.GaussianDpEvent(noise_multiplier=1.0):
                count = 1
            case _:
                return calibrate_remembered(
                    lambda noise: self.event(run, noise),
                    epsilon=epsilon,
                    delta=delta,
                    neighboring=run.neighboring,
                )
        return calibrate_noise_multiplier(
            sample_rate=1, steps=count, epsilon=epsilon, delta=delta, neighboring=run.neighboring
        )

    def claim(self, run: RunShape, noise_multiplier: float, delta: float) -> Guarantee | None:
        """Return what is claimed without a proof, if that is what was asked for; else None."""
        return None

    def assumptions(self, run: RunShape) -> tuple[Assumption, ...]:
        """Return what the event rests on beyond the sampler's promise and the bound on records."""
        return ()


class StepMechanism(Mechanism):
    """A mechanism that releases one noisy sum a step, as a training loop needs it."""

    @abstractmethod
    def query(self, run: RunShape, noise_multiplier: float, norm_bound: float) -> Query:
        """Return what the gate releases, a record's part of a sum at most ``norm_bound`` long."""

    def prefix_noise(self, run: RunShape) -> float:
        """Return the noise in the sums of the first t steps, over that of independent noise.

        It is the root mean square over t at a noise multiplier of 1, over independent noise as
        large as the norm bound: public, and what a planner compares mechanisms by. (Where noise is
        fitted to an optimizer's momentum and decay, in its iterates, for both.) Here it is that of
        independent noise as the query states it.
        """
        return self.query(run, 1.0, 1.0).standard_deviation
