"""DP-FTRL: noise that later steps take back (Kairouz et al. 2021; Denisov et al. 2022).

On fixed batches it is for whoever cannot sample: data that arrives in order, or that must be read
so. On batches sampled by turns (Choquette-Choo et al. 2023) the noise is amplified as well, and at
least as good as DP-SGD's for every budget.

An optimizer whose iterates are linear in its gradients (SGD, momentum, any learning-rate schedule)
sees prefix sums of what is released, and their noise is small where steps are correlated well.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

from dpoptim.accounting.monte_carlo import FAILURE_SHARE
from dpoptim.arguments import one_of, whole_number
from dpoptim.assumptions import Assumption, enforced, trusted
from dpoptim.clipping import Groups, Style
from dpoptim.mechanisms.correlated import CorrelatedNoise, best_bands
from dpoptim.mechanisms.mechanism import RunShape
from dpoptim.methods.method import TrainingMethod
from dpoptim.methods.sensitive_state import ClipNormPolicy
from dpoptim.methods.value_clipped_sgd import PROVED
from dpoptim.noise.correlated import (
    BandedToeplitz,
    BestStrategy,
    BinaryTree,
    BufferedToeplitz,
    Independent,
    Strategy,
    ToeplitzSquareRoot,
    Workload,
)
from dpoptim.noise.correlated.choose_strategy import BUFFERS
from dpoptim.noise.correlated.workload import Rates, in_words
from dpoptim.sampling import (
    BallsInBins,
    CyclicPoissonSampling,
    FixedBatches,
    MinSeparationSampling,
    Sampler,
)
from dpoptim.sampling.balls_in_bins import bins_of

BY_MONTE_CARLO = (
    f"epsilon is a Monte Carlo bound, whose chance to fail, {FAILURE_SHARE:g} of delta, is part of "
    "delta"
)
MOST_VARIANTS = 4  # bands 2 to 16: more are amplified too little to win where they were tried

Noise = Literal[
    "best",
    "buffered-toeplitz",
    "toeplitz",
    "toeplitz-normalised",
    "tree",
    "tree-honaker",
    "independent",
]
FixedOrder = Literal["shuffled", "given"]
Sampling = Literal["fixed", "cyclic-poisson", "balls-in-bins", "b-min-sep"]
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
    """Private training with correlated noise, in one or several passes.

    Args:
        clip_norm: C, the largest norm that one record's gradient may have in the sum; > 0. Or a
            `PrivateQuantile`: noise is taken back in units of C, so fully only once C has been
            found.
        clipping: ``"flat"``, ``"automatic"``, ``"per-layer"`` or groups; as for `DPSGD`.
        noise: the strategy. ``"best"``: of least mean error that fits into ``buffers`` vectors,
            for the run's length and passes. ``"buffered-toeplitz"`` needs a few times the model's
            memory whatever the number of steps; ``"toeplitz"`` and ``"toeplitz-normalised"`` keep
            one vector for every step so far; ``"tree"`` and ``"tree-honaker"`` one for every
            level; ``"independent"`` is plain noise, for comparison.
        order: of fixed batches: ``"shuffled"`` once, by coins, or as ``"given"`` by the data set,
            if its order depends on no record.
        value_bound: ``"sharp"`` or ``"paper"``: bound gradients before they are computed, as
            `ValueClippedSGD` does.
        sampling: ``"fixed"`` batches, for zero-out or replace-one, n public and exact: a record
            takes part once a pass, exactly ceil(n / batch_size) steps apart. Or
            ``"cyclic-poisson"``, for all relations: records are dealt into ``bands`` parts by
            coins, which take turns in being sampled from (`sampling.cyclic_poisson`). Or
            ``"balls-in-bins"``, for add-or-remove-one or zero-out: each record is in one of n /
            batch_size bins by a coin, and takes part once a pass (`sampling.balls_in_bins`).
            Or ``"b-min-sep"``, likewise: a record has a coin in each step but the ``bands`` - 1
            after taking part (`sampling.min_separation`).
        bands: of the banded strategy on cyclic Poisson or b-min-sep batches, 1 (DP-SGD) to n /
            batch_size, or of that on bins; None: chosen by `plan` for the budget on cyclic Poisson
            batches, and written down in the plan.
        buffers: the most vectors, as long as the model, that ``"best"`` may remember; 0: none, and
            each step draws earlier noise again, 8 times as much as without correlation.
        momentum: of the optimizer, in [0, 1): whose iterates ``"best"`` keeps the noise out of.
        decay: of the optimizer's learning rate, likewise: ``"linear"`` or ``"cosine"``, from 1 in
            the first step towards 0 after the last; ``"none"``; or rates > 0 relative to it,
            of times evenly spread over the run with straight lines between (warm-up and any
            schedule: as many as steps). Public, and no part of the guarantee: a loop with other
            rates or momentum only has more noise than it could.

    Examples:
        >>> import dpoptim
        >>> plan = dpoptim.DPFTRL(clip_norm=1.0).plan(
        ...     n=10_000, batch_size=500, epochs=2, epsilon=4.0, delta=1e-6, neighboring="zero-out"
        ... )
        >>> plan.steps
        40
    """

    clip_norm: float | ClipNormPolicy
    clipping: Style | Groups = "flat"
    noise: Noise = "best"
    order: FixedOrder = "shuffled"
    value_bound: Literal["sharp", "paper"] | None = None
    sampling: Sampling = "fixed"
    bands: int | None = None
    buffers: int = BUFFERS
    momentum: float = 0.0
    decay: Rates = "none"
    name: ClassVar[str] = "dp-ftrl"
    summary: ClassVar[str] = (
        "noise that later steps take back, on fixed batches or sampled by turns (Denisov et al. "
        "2022)"
    )

    def __post_init__(self) -> None:
        self.check()
        one_of("noise", self.noise, get_args(Noise))
        one_of("order", self.order, get_args(FixedOrder))
        one_of("sampling", self.sampling, get_args(Sampling))
        one_of("value_bound", self.value_bound, ("sharp", "paper", None))
        if self.value_bound is not None and self.clipping != "flat":
            raise ValueError(
                f"clipping={self.clipping!r} is of measured norms; with value_bound, use 'flat'."
            )
        best = BestStrategy(self.buffers, self.workload)  # validates
        object.__setattr__(self, "buffers", best.buffers)
        object.__setattr__(self, "momentum", best.workload.momentum)
        object.__setattr__(self, "decay", best.workload.decay)
        if self.decay != "none" and self.noise != "best":
            raise ValueError(
                f"decay={self.decay!r} is for noise='best', which is fitted to it; "
                f"noise={self.noise!r} is not. Fix: leave one of them out."
            )
        if self.sampling != "fixed" and (self.noise != "best" or self.order != "shuffled"):
            raise ValueError(
                f"sampling={self.sampling!r} has banded noise and no order; leave "
                "noise and order out."
            )
        if self.bands is not None:
            if self.sampling == "fixed":
                raise ValueError(
                    "bands is for sampling='cyclic-poisson', 'balls-in-bins' and 'b-min-sep'; on "
                    "fixed batches, noise and buffers decide."
                )
            object.__setattr__(self, "bands", whole_number("bands", self.bands, least=1))

    def sampler(self, n: int, batch_size: int) -> Sampler:
        if self.sampling == "fixed":
            return FixedBatches(n, batch_size, self.order)
        if self.sampling == "balls-in-bins":
            return BallsInBins.of(bins_of(n, batch_size))
        if self.sampling == "b-min-sep":
            return MinSeparationSampling(batch_size / n, self._bands)
        return CyclicPoissonSampling(batch_size / n, self._bands)

    @property
    def workload(self) -> Workload:
        """The optimizer that the noise is fitted to."""
        return Workload(self.momentum, self.decay)

    @property
    def _bands(self) -> int:
        return 1 if self.bands is None else self.bands  # before `settled` there is no plan

    @property
    def mechanism(self) -> CorrelatedNoise:
        if self.sampling != "fixed":
            return CorrelatedNoise(BandedToeplitz(self._bands, workload=self.workload))
        if self.noise == "best":
            return CorrelatedNoise(BestStrategy(self.buffers, self.workload))
        return CorrelatedNoise(STRATEGIES[self.noise])

    def settled(self, run: RunShape, *, epsilon: float | None, delta: float | None) -> "DPFTRL":
        """Choose the number of bands for the budget, where it is left open."""
        if self.sampling == "fixed" or self.bands is not None:
            return self
        if epsilon is None or delta is None:
            raise ValueError(
                "bands is missing: it is chosen for an epsilon and delta. Fix: give these, or "
                "bands=."
            )
        most = min(max(1, run.n // run.batch_size), self.buffers + 1)
        return replace(
            self, bands=best_bands(run, most, self.workload, epsilon=epsilon, delta=delta)
        )

    def variants(self, n: int, batch_size: int) -> tuple[TrainingMethod, ...]:
        """Fixed batches, and by turns with bands in powers of 2, where nothing else is asked."""
        if (self.sampling, self.noise, self.order) != ("fixed", "best", "shuffled"):
            return (self,)
        most = min(n // batch_size, self.buffers + 1)
        turns = [
            replace(self, sampling="cyclic-poisson", bands=2**power)
            for power in range(1, most.bit_length())
        ]
        return (self, *turns[:MOST_VARIANTS])

    def method_assumptions(self) -> tuple[Assumption, ...]:
        if self.sampling == "cyclic-poisson":
            noise = (
                f"the noise is correlated over {self._bands} steps, in which a record takes part "
                "once at most"
            )
        elif self.sampling == "balls-in-bins":
            noise = f"the noise is correlated over {self._bands} steps; {BY_MONTE_CARLO}"
        elif self.sampling == "b-min-sep":
            noise = (
                f"the noise is correlated over {self._bands} steps, in which a record takes part "
                f"once at most; {BY_MONTE_CARLO}"
            )
        else:
            noise = (
                f"the noise is correlated over steps ({self.noise}), for records that take part "
                "once a pass"
            )
        if self.decay != "none":
            noise += f", fitted to learning rates of {in_words(self.decay)}"
        order = trusted("the order of the data set depends on no record")
        return (
            *([] if self.value_bound is None else [PROVED]),
            enforced(noise),
            *([order] if self.order == "given" else []),
        )
