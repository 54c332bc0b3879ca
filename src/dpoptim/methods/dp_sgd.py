"""DP-SGD: clip each record's gradient, sum, add noise, divide (Abadi et al. 2016).

Das et al. Alg. 1, Fang et al. Alg. 1 and Zhang et al. Alg. 1 are this algorithm with the 1/B in
three places.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dpoptim.arguments import positive_number, whole_number
from dpoptim.clipping import Groups, Style
from dpoptim.mechanisms.independent import IndependentNoise
from dpoptim.mechanisms.mechanism import RunShape
from dpoptim.methods.method import TrainingMethod
from dpoptim.methods.private_quantile import PrivateQuantile
from dpoptim.methods.sensitive_state import ClipNormPolicy
from dpoptim.sampling import PlannedPoissonSampling, PoissonSampling, TruncatedPoissonSampling
from dpoptim.sampling.poisson import SamplingByCoins, largest_batch_of


@dataclass(frozen=True)
class DPSGD(TrainingMethod):
    """Differentially private SGD; optimizers such as Adam post-process its noisy mean.

    Args:
        clip_norm: C, the largest norm that one record's gradient may have in the sum; > 0. Or a
            `PrivateQuantile`, by which the run finds it within its budget, a `PlannedClipNorm`, or
            a `ScaledClipNorm`.
        clipping: ``"flat"`` (g min(1, C/|g|)), ``"automatic"`` (C g / (|g| + 0.01))
            or ``"per-layer"`` (each of the L layers by itself, to C / sqrt(L)). Or a mapping,
            such as {"encoder": 1, "": 3}: the layers below the module "encoder" together, and all
            others together, to norms in this proportion that make up C.
        noise_schedule: the noise in equal stretches of the run, over the plan's noise multiplier:
            (2, 1) is twice as much in the first half; at most one for each step. Accounted step by
            step. Empty: the same throughout.
        batch_schedule: pairs (s, f): from step s on, counted from 0, batches are f times
            ``batch_size``; s >= 1, ascending, and within the run. Each step's noisy sum is divided
            by its own expected batch, and accounted at its own rate.
        largest_batch: as a multiple of ``batch_size``, >= 1: larger batches lose a random part
            (`TruncatedPoissonSampling`; n must be exact), so that memory is known beforehand. None:
            they are as large as they come.

    Examples:
        >>> import dpoptim
        >>> plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        ...     n=10_000, batch_size=500, epochs=2, epsilon=4.0, delta=1e-6
        ... )
        >>> plan.steps, plan.guarantee.epsilon <= 4.0
        (40, True)
    """

    clip_norm: float | ClipNormPolicy
    clipping: Style | Groups = "flat"
    noise_schedule: tuple[float, ...] = ()
    batch_schedule: tuple[tuple[int, float], ...] = ()
    largest_batch: float | None = None
    name: ClassVar[str] = "dp-sgd"
    summary: ClassVar[str] = (
        "clipped gradients of Poisson batches, with independent noise (Abadi et al. 2016)"
    )

    def __post_init__(self) -> None:
        self.check()
        schedule = tuple(positive_number("noise_schedule", value) for value in self.noise_schedule)
        object.__setattr__(self, "noise_schedule", schedule)
        object.__setattr__(self, "batch_schedule", changes_of(self.batch_schedule))
        if self.batch_schedule and (
            self.largest_batch is not None or isinstance(self.policy, PrivateQuantile)
        ):
            raise ValueError(
                "batch_schedule goes with neither largest_batch nor a PrivateQuantile, which count "
                "on batches of one size. Fix: leave one of them out."
            )
        if self.largest_batch is not None:
            factor = positive_number("largest_batch", self.largest_batch)
            if factor < 1:
                raise ValueError(
                    f"largest_batch must be at least 1, got {factor!r}: it is a multiple of "
                    "batch_size. Fix: 1.2."
                )
            object.__setattr__(self, "largest_batch", factor)

    def sampler(self, n: int, batch_size: int) -> SamplingByCoins:
        if self.batch_schedule:
            most = max(factor for _, factor in self.batch_schedule)
            if most * batch_size > n:
                raise ValueError(
                    f"batch_schedule asks for batches of {most:g} times batch_size={batch_size}, "
                    f"more than n={n} records. Fix: smaller multiples, or a smaller batch_size."
                )
            return PlannedPoissonSampling(batch_size / n, self.batch_schedule)
        if self.largest_batch is None:
            return PoissonSampling(batch_size / n)
        largest = largest_batch_of(batch_size, self.largest_batch)
        return TruncatedPoissonSampling(batch_size / n, n, largest)

    @property
    def mechanism(self) -> IndependentNoise:
        return IndependentNoise(schedule=self.noise_schedule)

    def settled(self, run: RunShape, *, epsilon: float | None, delta: float | None) -> "DPSGD":
        """Return the method itself. ValueError: a part of a schedule would never come."""
        refuse_unused_noise(self.noise_schedule, run.steps)
        late = [step for step, _ in self.batch_schedule if step >= run.steps]
        if late:
            raise ValueError(
                f"batch_schedule changes the batches from step {late[0]} on, counted from 0, but "
                f"the run has {run.steps} steps. Fix: leave that change out, or train longer."
            )
        return self


def refuse_unused_noise(schedule: Sequence[float], steps: int) -> None:
    """Refuse a noise schedule of more stretches than steps, of which some would be dropped."""
    if len(schedule) > steps:
        raise ValueError(
            f"noise_schedule plans more stretches than the {steps} steps of the run. Fix: at most "
            "one a step."
        )


def changes_of(schedule: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return the pairs of a batch schedule, also from a plan's JSON.

    Raises:
        ValueError, TypeError: a step or a multiple out of range or order.
    """
    changes = tuple(
        (whole_number("batch_schedule", step, least=1), positive_number("batch_schedule", factor))
        for step, factor in schedule
    )
    steps = [step for step, _ in changes]
    if steps != sorted(set(steps)):
        raise ValueError(
            f"batch_schedule must name ascending steps, got {steps}; such as ((100, 2), (200, 4))."
        )
    return changes
