"""Independent noise on sums whose tables release the rows alone that noisy counts select."""

from dataclasses import dataclass

from dpoptim.assumptions import Assumption, enforced
from dpoptim.gate import SelectedRows
from dpoptim.mechanisms.independent import IndependentNoise
from dpoptim.mechanisms.mechanism import RunShape

COUNTED = enforced(
    "each record adds at most 1, in whole numbers, to the counts that select rows of tables; the "
    "guarantee covers which rows are selected"
)


@dataclass(frozen=True)
class RowSelection(IndependentNoise):
    """Counts of the rows that records touch and clipped sums, together one Gaussian query a step.

    Args:
        share: of the query's budget (of the square of mu) that the counts take.
        false_positives: of rows that nobody touched, the proportion selected.
        schedule: as for `IndependentNoise`.

    **Guarantee.** The run's event is that of `IndependentNoise`, under every relation: with noise
    of multiplier z / sqrt(share) on the counts and z / sqrt(1 - share) on the sums over the clip
    norm, z^2 = 1 / (share / z^2 + (1 - share) / z^2), a step is one Gaussian query of noise
    multiplier z on a vector to which a record adds at most 1 (both parts are of one batch, so one
    coin of the sampler amplifies them together). What of the noisy sums is kept is decided by the
    noisy counts, so it is post-processing (`gate.row_selection`): it needs no composition, and
    nothing that is thrown away needs noise.
    """

    share: float = 0.5
    false_positives: float = 0.5

    def audit_family(self, run: RunShape) -> str:
        return "selected rows"

    def query(self, run: RunShape, noise_multiplier: float, norm_bound: float) -> SelectedRows:
        plain = super().query(run, noise_multiplier, norm_bound)
        return SelectedRows(
            norm_bound, noise_multiplier, plain.scales, self.share, self.false_positives
        )

    def prefix_noise(self, run: RunShape) -> float:
        return super().prefix_noise(run) / (1 - self.share) ** 0.5

    def assumptions(self, run: RunShape) -> tuple[Assumption, ...]:
        return (*super().assumptions(run), COUNTED)
