"""DP-SGD that moves the rows of embedding tables alone that noisy counts select (DP-AdaFEST).

Ghazi et al. 2023, "Sparsity-Preserving Differentially Private Training of Large Embedding Models",
Alg. 1. Noise on every row of a table of a million makes a step cost the table, and buries rows that
few records touch; here a step costs the rows that are selected, and the others stay where they are.
"""

from dataclasses import dataclass
from typing import ClassVar

from dpoptim.arguments import positive_number, proportion
from dpoptim.clipping import Groups, Style
from dpoptim.mechanisms.mechanism import RunShape
from dpoptim.mechanisms.selected_rows import RowSelection
from dpoptim.methods.dp_sgd import refuse_unused_noise
from dpoptim.methods.method import TrainingMethod
from dpoptim.sampling import PoissonSampling


@dataclass(frozen=True)
class SparseSGD(TrainingMethod):
    """DP-SGD for models with embedding tables, of which a step moves selected rows only.

    Each record adds 1 / sqrt(k) to the counts of the k table rows that it looks up. A row is
    selected where its count with noise exceeds a threshold. Noise is added to the clipped
    gradients of the selected rows, and of all parameters that are no tables; gradients of other
    rows are thrown away. Counts and gradients share the budget: the run costs what `DPSGD` costs
    at the same noise multiplier.

    `torch.optim.SGD` without momentum and weight decay, ``SparseAdam`` and ``Adagrad`` find a
    sparse ``.grad`` of the selected rows and touch no others; other optimizers find zeros there.

    Args:
        clip_norm: C, the largest norm that one record's gradient may have in the sum, tables
            included; > 0.
        clipping: as for `DPSGD`.
        share: of the budget (of the square of mu) that the counts take, in (0, 1). Their noise is
            the noise multiplier over sqrt(share); that on gradients grows by 1 / sqrt(1 - share).
        false_positives: of the rows that no record looked up, the proportion that is selected, in
            (0, 0.5]. It sets the threshold: the more rows, the smaller it should be.
        noise_schedule: as for `DPSGD`.

    Examples:
        >>> import dpoptim
        >>> plan = dpoptim.SparseSGD(clip_norm=1.0).plan(
        ...     n=10_000, batch_size=500, epochs=2, epsilon=4.0, delta=1e-6
        ... )
        >>> dense = dpoptim.DPSGD(clip_norm=1.0).plan(
        ...     n=10_000, batch_size=500, epochs=2, epsilon=4.0, delta=1e-6
        ... )
        >>> plan.noise_multiplier == dense.noise_multiplier, plan.event == dense.event
        (True, True)
    """

    clip_norm: float
    clipping: Style | Groups = "flat"
    share: float = 0.1
    false_positives: float = 1e-3
    noise_schedule: tuple[float, ...] = ()
    name: ClassVar[str] = "sparse-sgd"
    summary: ClassVar[str] = (
        "DP-SGD that moves the table rows alone that noisy counts select (DP-AdaFEST, Ghazi et al. "
        "2023)"
    )
    trains: ClassVar[str] = "models with embedding tables"
    for_tables: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check()
        if self.policy is not None:
            raise ValueError(
                "clip_norm must be a number for sparse-sgd, whose counts and gradients are one "
                f"query; got {type(self.policy).__name__}. Fix: clip_norm=1.0, or dpoptim.DPSGD."
            )
        for name in ("share", "false_positives"):
            object.__setattr__(self, name, proportion(name, getattr(self, name)))
        if self.false_positives > 0.5:
            raise ValueError(
                f"false_positives must be at most 0.5, got {self.false_positives!r}: more would "
                "select most rows that nobody looked up. Fix: 1e-3, or dpoptim.DPSGD for all rows."
            )
        schedule = tuple(positive_number("noise_schedule", value) for value in self.noise_schedule)
        object.__setattr__(self, "noise_schedule", schedule)

    def sampler(self, n: int, batch_size: int) -> PoissonSampling:
        return PoissonSampling(batch_size / n)

    @property
    def mechanism(self) -> RowSelection:
        return RowSelection(self.share, self.false_positives, schedule=self.noise_schedule)

    def settled(self, run: RunShape, *, epsilon: float | None, delta: float | None) -> "SparseSGD":
        """Return the method itself. ValueError: a part of the schedule would never come."""
        refuse_unused_noise(self.noise_schedule, run.steps)
        return self
