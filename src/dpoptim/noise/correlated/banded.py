"""Banded Toeplitz strategies, optimised for a pattern of participations.

Whoever takes part in steps that are at least ``bands`` apart is seen in separate queries: columns
that far apart share no row. So the noise can be amplified by sampling (`sampling.cyclic_poisson`),
and several participations cost no more than they must.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from dpoptim.arguments import whole_number
from dpoptim.noise.correlated.fitting import column_squares, convolved, fitted, inverse
from dpoptim.noise.correlated.strategy import ROUNDING_OF_SQUARES, NoiseState, Strategy, rounded_up
from dpoptim.noise.correlated.workload import PREFIX_SUMS, Floats, Workload
from dpoptim.noise.stream import KeyStream


@dataclass(frozen=True)
class BandedToeplitz(Strategy):
    """Noise that is taken back within ``bands`` steps. Remembers bands - 1 vectors.

    Args:
        bands: 1 (independent noise) to ``separation``.
        separation: the steps between a record's participations that the strategy is made for;
            None: takes part once.
        workload: of the optimizer whose iterates are to carry little noise.
    """

    bands: int
    separation: int | None = None
    workload: Workload = PREFIX_SUMS

    def __post_init__(self) -> None:
        object.__setattr__(self, "bands", whole_number("bands", self.bands, least=1))
        if self.separation is not None:
            object.__setattr__(
                self, "separation", whole_number("separation", self.separation, least=1)
            )
            if self.bands > self.separation:
                raise ValueError(
                    f"bands={self.bands} must be at most separation={self.separation}."
                )

    def coefficients(self, steps: int) -> tuple[Floats, Floats]:
        """Return c, shape (at most bands,), and p, shape (steps,): see `fitting`."""
        separation = steps if self.separation is None else min(self.separation, steps)
        return fitted(steps, min(self.bands, separation), separation, self.workload)

    def _sensitivity(self, steps: int, k: int, b: int, *, regular: bool) -> float:
        """Exact for participations ``bands`` apart or more, else by the triangle inequality.

        ``regular``: a record takes part in steps i, i + b, i + 2b, ... for some i, and no others.
        """
        column, rows = self.coefficients(steps)
        squares = column_squares(column**2, rows)
        if len(column) > b and k > 1:
            worst = float(np.sort(np.sqrt(squares))[-k:].sum()) ** 2
        elif k == 1:
            worst = float(squares.max())
        elif regular:
            worst = max(
                float(np.sort(squares[start::b])[-k:].sum()) for start in range(min(b, steps))
            )
        else:
            worst = most_with_gaps(squares, k, b)
        return rounded_up(math.sqrt(worst * ROUNDING_OF_SQUARES))

    def prefix_std(self, steps: int) -> Floats:
        return self.errors(steps) * self.sensitivity(steps)

    def errors(self, steps: int) -> Floats:
        """Standard deviation of each iterate's error where z's is 1; shape (steps,)."""
        column, rows = self.coefficients(steps)
        return self.workload.errors(inverse(column, steps), 1 / rows)

    def increment_std(self, steps: int) -> Floats:
        column, rows = self.coefficients(steps)
        return np.sqrt(convolved(1 / rows, inverse(column, steps) ** 2))

    def outputs_of_bins(self, steps: int, bins: int) -> Floats:
        """Sums of every ``bins``-th column of C, from each of the first: (steps, bins), >= 0."""
        column, rows = self.coefficients(steps)
        outputs, step = np.zeros((steps, bins)), np.arange(steps)
        for lag, coefficient in enumerate(column):
            outputs[step[lag:], (step[lag:] - lag) % bins] += coefficient
        return np.sqrt(rows)[:, None] * outputs

    def start(self, steps: int, sizes: Sequence[int], stream: KeyStream) -> NoiseState:
        return BandedState(steps, sizes, stream, *self.coefficients(steps))


class BandedState(NoiseState):
    """Remembers the last increments y, newest first: ``y_t = z_t / d_t - sum_k c_k y_{t-k}``."""

    def __init__(
        self, steps: int, sizes: Sequence[int], stream: KeyStream, column: Floats, rows: Floats
    ) -> None:
        super().__init__(steps, sizes, stream)
        self._column, self._deviations = column, rows**-0.5

    def _increment(self, remembered: list[Tensor], like: Tensor) -> Tensor:
        increment = self._draw(like).mul_(float(self._deviations[self.step]))
        for coefficient, earlier in zip(self._column[1:], remembered, strict=False):
            increment.sub_(earlier, alpha=float(coefficient))
        remembered.insert(0, increment.clone())
        del remembered[len(self._column) - 1 :]
        return increment


def most_with_gaps(values: Floats, count: int, gap: int) -> float:
    """The largest sum of at most ``count`` values >= 0 whose places are ``gap`` or more apart."""
    best = np.zeros(len(values) + gap)  # of the places from here on, with one choice fewer
    for _ in range(count):
        taken = values + best[gap : gap + len(values)]
        best = np.concatenate([np.maximum.accumulate(taken[::-1])[::-1], np.zeros(gap)])
    return float(best[0])
