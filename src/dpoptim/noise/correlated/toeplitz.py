"""The square root of the matrix of prefix sums (Fichtenberger, Henzinger and Upadhyay 2023).

``A = C C`` for A of ones on and below the diagonal and C Toeplitz with first column ``c_k =
binom(2k, k) / 4^k``, the coefficients of (1 - x)^(-1/2). Its inverse has those of (1 - x)^(1/2),
``c_k - c_{k-1}``. For Toeplitz strategies the largest error is within a constant of the best
possible one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from torch import Tensor

from dpoptim.noise.correlated.strategy import NoiseState, Strategy, rounded_up
from dpoptim.noise.correlated.workload import Floats
from dpoptim.noise.stream import KeyStream


@dataclass(frozen=True)
class ToeplitzSquareRoot(Strategy):
    """The exact square root: step t remembers t vectors, and multiplies as many.

    Args:
        normalised: divide each column of C by its norm. A record then costs the same in whichever
            step it takes part, and the noise of late steps is smaller: errors are 4 to 7 % smaller.
            Errors, and sensitivities for several participations, then take T^2 operations to
            compute.
    """

    normalised: bool = False

    def _sensitivity(self, steps: int, k: int, b: int, *, regular: bool) -> float:
        """Norm of the first column of C (1 if normalised) for one participation.

        For several, exact for the plain square root (see `monotone_sensitivity`), and for the
        normalised one where they are ``regular`` and as many as the run has room for. Else an upper
        bound for the normalised one: columns that are h steps apart have a product of at most r_h
        = the largest over all such pairs and all larger h, so k of them at least b apart have a
        squared sum of at most ``k r_0 + 2 sum_m (k - m) r_{m b}``.
        """
        if not self.normalised:
            return monotone_sensitivity(square_root_coefficients(steps), k, b)
        if k == 1:
            return rounded_up(1.0)
        if regular and k == 1 + (steps - 1) // b:
            return rounded_up(_regular_shift(steps, b))
        lags = _largest_products(steps)
        multiples = np.arange(1, k)
        return rounded_up(
            float(np.sqrt(k * lags[0] + 2 * np.sum((k - multiples) * lags[multiples * b])))
        )

    def prefix_std(self, steps: int) -> Floats:
        if not self.normalised:
            return np.sqrt(np.cumsum(square_root_coefficients(steps) ** 2)) * self.sensitivity(
                steps
            )
        inverse, scale = inverse_coefficients(steps), _column_norms(steps)
        variance = np.zeros(steps)
        for column in range(steps):  # of A D C^-1, which has T^2 entries: one column at a time
            variance[column:] += np.cumsum(scale[column:] * inverse[: steps - column]) ** 2
        return np.sqrt(variance) * self.sensitivity(steps)

    def increment_std(self, steps: int) -> Floats:
        if self.normalised:
            return super().increment_std(steps)
        return np.sqrt(np.cumsum(inverse_coefficients(steps) ** 2))

    def start(self, steps: int, sizes: Sequence[int], stream: KeyStream) -> NoiseState:
        return ToeplitzState(
            steps, sizes, stream, _column_norms(steps) if self.normalised else np.ones(steps)
        )


class ToeplitzState(NoiseState):
    """Remembers z_0, ..., z_t. Increment t is ``scale_t sum_k a_k z_{t-k}``."""

    def __init__(self, steps: int, sizes: Sequence[int], stream: KeyStream, scale: Floats) -> None:
        super().__init__(steps, sizes, stream)
        self._coefficients, self._scale = inverse_coefficients(steps), scale

    def _increment(self, remembered: list[Tensor], like: Tensor) -> Tensor:
        remembered.append(self._draw(like))
        total = like.new_zeros(like.shape)
        for coefficient, z in zip(
            self._coefficients[: self.step + 1], reversed(remembered), strict=True
        ):
            total.add_(z, alpha=float(coefficient))
        return total.mul_(float(self._scale[self.step]))


def square_root_coefficients(steps: int) -> Floats:
    """c_0, ..., c_{steps-1}, C's first column: positive, decreasing, to steps * 2^-52."""
    k = np.arange(1, steps, dtype=np.float64)
    return np.concatenate([[1.0], np.cumprod((2 * k - 1) / (2 * k))])


def inverse_coefficients(steps: int) -> Floats:
    """First column of C^-1: 1, then ``c_k - c_{k-1} = -c_k / (2k - 1)``, without cancelling."""
    c = square_root_coefficients(steps)
    return np.concatenate([[1.0], -c[1:] / (2 * np.arange(1, steps) - 1)])


def monotone_sensitivity(column: Floats, participations: int, separation: int) -> float:
    """Sensitivity, exact, of a Toeplitz strategy whose column is non-negative and non-increasing.

    The worst record takes part as early and as often as it can: in steps 0, b, 2b, ... (Kalinin
    and Lampert 2024, Theorem 2). Moving participations earlier only lengthens columns and brings
    them closer together.
    """
    # rounding; what it can cost is in ROUNDING
    if np.any(column < 0) or np.any(np.diff(column) > 1e-14):
        raise ValueError(
            "column must be non-negative and non-increasing; else the worst pattern is another."
        )
    total = np.zeros_like(column)
    for start in range(0, participations * separation, separation):
        total[start:] += column[: len(column) - start]
    return rounded_up(float(np.linalg.norm(total)))


def _column_norms(steps: int) -> Floats:
    """Norm of each column of C; column j has ``steps - j`` entries."""
    return np.sqrt(np.cumsum(square_root_coefficients(steps) ** 2))[::-1].copy()


@lru_cache(maxsize=64)
def _regular_shift(steps: int, separation: int) -> float:
    """Largest norm of a sum of every ``separation``-th normalised column; T^2 operations."""
    c, norms = square_root_coefficients(steps), _column_norms(steps)
    largest = 0.0
    for start in range(min(separation, steps)):
        total = np.zeros(steps)
        for column in range(start, steps, separation):
            total[column:] += c[: steps - column] / norms[column]
        largest = max(largest, float(np.linalg.norm(total)))
    return largest


def _largest_products(steps: int) -> Floats:
    """Shape (steps,): largest product of two normalised columns h steps or more apart."""
    c, norms = square_root_coefficients(steps), _column_norms(steps)
    largest = np.empty(steps)
    for lag in range(steps):
        # Columns j and j + lag share the last steps - j - lag rows: products of the tails'
        # beginnings.
        products = np.cumsum(c[lag:] * c[: steps - lag])[::-1]
        largest[lag] = np.max(products / (norms[: steps - lag] * norms[lag:]))
    return np.maximum.accumulate(largest[::-1])[::-1]
