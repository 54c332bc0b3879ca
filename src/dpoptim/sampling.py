"""Which records take part in a step, and what the accountant may make of it.

A sampler owns both the draw and the event, so that what is sampled and what is accounted cannot drift apart.
"""

import math
from dataclasses import dataclass

import dp_accounting
import numpy as np
from numpy.typing import NDArray

from dpoptim.noise.stream import KeyStream


@dataclass(frozen=True)
class PoissonSampling:
    """Every record takes part in every step independently with probability ``sample_rate``.

    Args:
        sample_rate: q in (0, 1]; 1 takes every record in every step.
    """

    sample_rate: float

    def __post_init__(self) -> None:
        if not 0 < self.sample_rate <= 1:
            raise ValueError(
                f"sample_rate must be in (0, 1], got {self.sample_rate!r}; it is batch_size / n with batch_size <= n."
            )

    def event(self, step: dp_accounting.DpEvent, steps: int) -> dp_accounting.DpEvent:
        """The event of ``steps`` sampled steps."""
        if self.sample_rate < 1:
            step = dp_accounting.PoissonSampledDpEvent(self.sample_rate, step)
        return dp_accounting.SelfComposedDpEvent(step, steps)

    def draw(self, coins: KeyStream, records: int) -> NDArray[np.int64]:
        """Indices of the records of one step, ascending. One coin of 53 bits for each record.

        **Guarantee.** Each of the ``records`` indices is in the result independently of all others and of all other
        steps; the probability is ``sample_rate`` to 2^-53. The result is private.
        """
        return coins.coins(records, self.sample_rate)

    def capacity(self, n: int) -> int:
        """A size that a batch of ``n`` nominal records exceeds with negligible probability (public)."""
        if self.sample_rate == 1:
            return n
        expected = n * self.sample_rate
        return min(n, math.ceil(expected + 9 * math.sqrt(expected * (1 - self.sample_rate)) + 32))
