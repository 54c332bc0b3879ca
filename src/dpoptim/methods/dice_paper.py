"""DiceSGD as published (Zhang et al. 2024): for reproducing the paper, not for protecting anyone.

Theorem 3.7 sets ``sigma_1^2 = 32 T (C1^2 + 2 C^2) log(1/delta) / (N^2 epsilon^2)`` on the mean,
for C1 <= C2 <= C / B; the automatic version (App. C.4) has ``96 T log(1/delta) C1^2`` instead,
with C1 = C2. Both are false: at a claimed epsilon of 1 it is at least 8 and 200 (n = 1000, B = 20,
T = 400, delta = 1e-5, one record with a huge gradient). What is certain is much weaker: a record
moves every step by at most C1 + 2 B C2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import dp_accounting
import torch
from torch import Tensor

from dpoptim.accounting.guarantee import Guarantee, parse_neighboring
from dpoptim.assumptions import Assumption
from dpoptim.clipping import AUTOMATIC_GAMMA, SMALLEST_FACTOR, Directions, Units
from dpoptim.gate import GaussianSum
from dpoptim.mechanisms.mechanism import RunShape, StepMechanism

LARGEST_SHARE = 0.2  # of the records in a step, by Theorem 3.7
REFUTED = "unproven (counterexample known)"


@dataclass(frozen=True)
class PublishedSplit:
    """The published automatic factors: C1 / (|g| + gamma), and 1 minus that, without a bound."""

    norm: float

    @property
    def directions(self) -> Directions:
        return ((1.0, 0.0),)

    def units(self, layers: Sequence[str]) -> Units:
        return Units.one(self, layers)

    def factors(self, squared_norms: Tensor, margin: float) -> Tensor:
        """Shape (2, B), see `Clipping.factors`; the second is negative for short gradients."""
        kept = self.norm * (1 - margin) / (squared_norms.sqrt() + AUTOMATIC_GAMMA)
        countable = kept >= SMALLEST_FACTOR
        return torch.stack(
            [torch.where(countable, kept, 0.0), torch.where(countable, 1 - kept, 0.0)]
        )


def product_of_epsilon_and_noise(
    *, clip: float, feedback: float, sample_rate: float, steps: int, delta: float, automatic: bool
) -> float:
    """epsilon times (noise standard deviation on the sum / C1) by the paper's formulas.

    Args:
        clip, feedback: C1, and B C2 = C, the smallest C that the theorem allows.
        sample_rate: B / N; the theorem asks for at most 1/5.

    Raises:
        ValueError: outside the theorem's conditions.
    """
    if sample_rate > LARGEST_SHARE:
        raise ValueError(
            f"batch_size / n = {sample_rate:.3g}, but the paper's theorem needs at most 1/5. "
            "Fix: a batch_size of at most n / 5."
        )
    constant = 96.0 if automatic else 32 * (1 + 2 * (feedback / clip) ** 2)
    return sample_rate * math.sqrt(constant * steps * math.log(1 / delta))


@dataclass(frozen=True)
class PublishedNoise(StepMechanism):
    """The noise of the paper's theorems. **No guarantee**: its claim is false; `event` is sure.

    Args:
        clip, feedback: C1 and C2.
        automatic: App. C.4 instead of Theorem 3.7.
    """

    clip: float
    feedback: float
    automatic: bool

    def audit_family(self, run: RunShape) -> str:
        return "error feedback as published"

    def event(self, run: RunShape, noise_multiplier: float) -> dp_accounting.DpEvent:
        """Every step a Gaussian of sensitivity C1 + 2 B C2, without amplification."""
        step = dp_accounting.GaussianDpEvent(
            noise_multiplier * self.clip / (self.clip + 2 * self.feedback * run.batch_size)
        )
        return dp_accounting.SelfComposedDpEvent(step, run.steps)

    def calibrate(self, run: RunShape, *, epsilon: float, delta: float) -> float:
        return self._product(run, delta) / epsilon

    def claim(self, run: RunShape, noise_multiplier: float, delta: float) -> Guarantee:
        source = "App. C.4" if self.automatic else "Theorem 3.7"
        epsilon = self._product(run, delta) / noise_multiplier
        relation = parse_neighboring(run.neighboring)
        return Guarantee(epsilon, delta, relation, f"{source} of Zhang et al. 2024", status=REFUTED)

    def query(self, run: RunShape, noise_multiplier: float, norm_bound: float) -> GaussianSum:
        return GaussianSum(norm_bound, noise_multiplier)

    def _product(self, run: RunShape, delta: float) -> float:
        return product_of_epsilon_and_noise(
            clip=self.clip,
            feedback=self.feedback * run.batch_size,
            sample_rate=run.batch_size / run.n,
            steps=run.steps,
            delta=delta,
            automatic=self.automatic,
        )

    def assumptions(self, run: RunShape) -> tuple[Assumption, ...]:
        text = (
            "the paper's Theorem 3.7, which audits refute: the true epsilon is several times larger"
        )
        return (Assumption("unproven", text),)
