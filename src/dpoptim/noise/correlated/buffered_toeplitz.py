"""Buffered linear Toeplitz noise: about the square root's errors, with few vectors of memory.

Strategy coefficients that are a sum of few exponentials, ``c_0 = 1, c_k = sum_j w_j d_j^(k-1)``,
need no more memory than that (Dvijotham, McMahan, Pillutla, Steinke and Thakurta 2024, "Efficient
and near-optimal noise generation for streaming differential privacy"; McMahan, Xu and Zhang 2024).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.optimize import minimize
from scipy.signal import lfilter
from torch import Tensor

from dpoptim.arguments import whole_number
from dpoptim.noise.correlated.banded import most_with_gaps
from dpoptim.noise.correlated.fitting import DECIMALS, best_rows, column_squares, convolved
from dpoptim.noise.correlated.strategy import ROUNDING_OF_SQUARES, NoiseState, Strategy, rounded_up
from dpoptim.noise.correlated.toeplitz import monotone_sensitivity
from dpoptim.noise.correlated.workload import PREFIX_SUMS, Floats, Workload
from dpoptim.noise.stream import KeyStream

# weights found for this many steps serve longer runs; errors are exact for any length
_LONGEST_SEARCH = 1 << 16


@dataclass(frozen=True)
class BufferedToeplitz(Strategy):
    """Correlated noise with ``buffers`` vectors of memory and as many multiplications a step.

    The weights and decays are found by minimising the largest error of a prefix sum over the run's
    steps; sensitivity and errors are then computed from what was found, so a poor minimum costs
    accuracy and never privacy.

    Args:
        buffers: 1 to 4. Three reach the square root's errors within 1 % for a thousand steps.
        scaled: give each step's noise a standard deviation of its own, of least mean error: 2 to
            4 % less. For a record that takes part once that is at most 2 % above the dense optimum
            for two thousand steps. Sensitivities for several participations are then exact only
            where they are regular.
        separation: the steps between a record's participations that weights, decays and deviations
            are found for, by the mean error (McMahan, Xu and Zhang 2024); None: takes part once,
            by the largest error. For 4 passes two buffers are 8 % above the dense optimum (scaled),
            for 16 passes 12 to 14 %.
        workload: of the optimizer whose iterates are to carry little noise; if not prefix sums, by
            the mean error.
    """

    buffers: int = 3
    scaled: bool = False
    separation: int | None = None
    workload: Workload = PREFIX_SUMS

    def __post_init__(self) -> None:
        if self.buffers not in (1, 2, 3, 4) or isinstance(self.buffers, bool):
            raise ValueError(f"buffers must be 1, 2, 3 or 4, got {self.buffers!r}.")
        if self.separation is not None:
            object.__setattr__(
                self, "separation", whole_number("separation", self.separation, least=1)
            )

    def parameters(self, steps: int) -> tuple[Floats, Floats, Floats]:
        """Return weights and decays, (buffers,), and p, (steps,), each step's inverse variance."""
        separation = None if self.separation is None else min(self.separation, steps)
        weights, decays = fitted(self.buffers, steps, separation, self.workload)
        if not self.scaled:
            return weights, decays, np.ones(steps)
        return weights, decays, scaled_rows(self.buffers, steps, separation, self.workload)

    def _sensitivity(self, steps: int, k: int, b: int, *, regular: bool) -> float:
        """Exact, see `toeplitz.monotone_sensitivity`: the coefficients are positive and decreasing.

        Scaled: exact for one participation, and for ``regular`` ones as many as the run has room
        for; else by the triangle inequality.
        """
        weights, decays, rows = self.parameters(steps)
        column = coefficients(weights, decays, steps)
        if not self.scaled:
            return monotone_sensitivity(column, k, b)
        return overlapping_sensitivity(column, rows, k, b, regular=regular)

    def prefix_std(self, steps: int) -> Floats:
        weights, decays, rows = self.parameters(steps)
        response = unit_response(weights, decays, steps)
        return self.workload.errors(response, 1 / rows) * self.sensitivity(steps)

    def increment_std(self, steps: int) -> Floats:
        weights, decays, rows = self.parameters(steps)
        first = unit_response(weights, decays, steps)
        return np.sqrt(convolved(1 / rows, first**2))

    def start(self, steps: int, sizes: Sequence[int], stream: KeyStream) -> NoiseState:
        return BufferedState(steps, sizes, stream, *self.parameters(steps))


class BufferedState(NoiseState):
    """Remembers ``s_j(t) = sum_{i<t} d_j^(t-1-i) y_i`` of increments y.

    C y = z gives ``y_t = z_t / p_t^(1/2) - sum_j w_j s_j(t)``, p as in `fitting`.
    """

    def __init__(
        self,
        steps: int,
        sizes: Sequence[int],
        stream: KeyStream,
        weights: Floats,
        decays: Floats,
        rows: Floats,
    ) -> None:
        super().__init__(steps, sizes, stream)
        self._weights, self._decays, self._deviations = weights, decays, rows**-0.5

    def _increment(self, remembered: list[Tensor], like: Tensor) -> Tensor:
        if not remembered:
            remembered += [like.new_zeros(like.shape) for _ in self._weights]
        increment = self._draw(like).mul_(float(self._deviations[self.step]))
        for weight, buffer in zip(self._weights, remembered, strict=True):
            increment.sub_(buffer, alpha=float(weight))
        for decay, buffer in zip(self._decays, remembered, strict=True):
            buffer.mul_(float(decay)).add_(increment)
        return increment


def coefficients(weights: Floats, decays: Floats, steps: int) -> Floats:
    """First column of C, shape (steps,)."""
    column = weights @ decays[:, None] ** np.arange(steps - 1)
    return np.concatenate([[1.0], column])


def unit_response(weights: Floats, decays: Floats, steps: int) -> Floats:
    """First column of C^-1, (steps,): the increments that answer a unit of noise.

    The generating function of C is ``1 + sum_j w_j x / (1 - d_j x)``, a ratio of polynomials, so
    that of C^-1 is its inverse: a recursive filter's answer to an impulse.
    """
    above, below = _polynomials(weights, decays)
    return np.asarray(lfilter(below, above, _impulse(steps)))


def _polynomials(weights: Floats, decays: Floats) -> tuple[Floats, Floats]:
    """Numerator and denominator of C's generating function, constant coefficient first."""
    of, below = decays.tolist(), _product(decays.tolist())
    above = below
    for j, weight in enumerate(weights.tolist()):
        others = [0.0, *_product([*of[:j], *of[j + 1 :]])]
        above = [a + weight * other for a, other in zip(above, others, strict=True)]
    return np.array(above), np.array(below)


def _impulse(steps: int) -> Floats:
    impulse = np.zeros(steps)
    impulse[0] = 1.0
    return impulse


def _product(decays: list[float]) -> list[float]:
    """Coefficients of prod_j (1 - d_j x), constant first; of few, for which NumPy takes longer."""
    polynomial = [1.0]
    for decay in decays:
        shifted = zip([*polynomial, 0.0], [0.0, *polynomial], strict=True)
        polynomial = [a - decay * b for a, b in shifted]
    return polynomial


def overlapping_sensitivity(
    column: Floats, rows: Floats, k: int, b: int, *, regular: bool
) -> float:
    """Sensitivity of ``C = D T``, T Toeplitz without entries below 0, whose columns may share rows.

    Exact for one participation, and for ``regular`` ones as many as the run has room for: whoever
    starts at step i adds up the same columns as at step 0, i steps later. Else by the triangle
    inequality.

    Args:
        column: first one of T, shape (steps,).
        rows: squares of D's diagonal, shape (steps,).
    """
    steps = len(column)
    if k == 1 or (regular and k == 1 + (steps - 1) // b):
        together = added_up(column, b if k > 1 else steps)
        worst = float(column_squares(together**2, rows).max())
    else:
        worst = most_with_gaps(np.sqrt(column_squares(column**2, rows)), k, b) ** 2
    return rounded_up(math.sqrt(worst * ROUNDING_OF_SQUARES))


def added_up(column: Floats, separation: int) -> Floats:
    """The sum of every ``separation``-th column of C, shape (steps,)."""
    total = column.copy()
    for start in range(separation, len(column), separation):
        total[start:] += column[: len(column) - start]
    return total


@lru_cache(maxsize=64)
def scaled_rows(buffers: int, steps: int, separation: int | None, workload: Workload) -> Floats:
    """Shape (steps,): one over the variance of each step's noise, the first one 1; read-only."""
    parameters = fitted(buffers, steps, separation, workload)
    column, separation = coefficients(*parameters, steps), separation or steps
    costs = workload.costs(unit_response(*parameters, steps))
    rows, _ = best_rows(costs, added_up(column, separation) ** 2, np.arange(separation))
    rows = np.exp(np.round(np.log(rows / rows[0]), DECIMALS))
    rows.flags.writeable = False  # cached
    return rows


@lru_cache(maxsize=64)
def fitted(
    buffers: int, steps: int, separation: int | None, workload: Workload
) -> tuple[Floats, Floats]:
    """(weights, decays), (buffers,) each: weights > 0 of sum at most 1, decays in (0, 1)."""
    horizon = max(2, min(steps, separation or _LONGEST_SEARCH))
    # Start: half-lives spread evenly, on a logarithmic scale, from a step to the whole run.
    spread = (np.arange(buffers) + 0.5) / buffers
    rates = horizon**-spread / 1.5
    # c_1 = 1/2
    start = np.concatenate([np.log(0.5 * rates**0.5 / np.sum(rates**0.5)), np.log(rates)])
    best = minimize(
        _log_error,
        start,
        args=(min(max(2, steps), _LONGEST_SEARCH), separation, workload),
        method="Nelder-Mead",
        options={
            "maxiter": 800 * buffers,
            "maxfev": 800 * buffers,
            "xatol": 1e-5,
            "fatol": 1e-9,
            "adaptive": True,
        },
    )
    # so that a run resumed elsewhere finds the same numbers
    weights, decays = _unpacked(np.round(best.x, 4))
    weights.flags.writeable = decays.flags.writeable = False  # cached
    return weights, decays


def _unpacked(parameters: Floats) -> tuple[Floats, Floats]:
    half = len(parameters) // 2
    # np.clip and np.split take several times as long on few numbers
    weights = np.exp(np.minimum(np.maximum(parameters[:half], -50), 0))
    decays = 1 - np.exp(np.minimum(np.maximum(parameters[half:], -30), -1e-9))
    return weights / max(1.0, float(weights.sum()) * (1 + 1e-12)), decays


def _log_error(parameters: Floats, steps: int, separation: int | None, workload: Workload) -> float:
    """log of a prefix sum's largest error at sensitivity 1; for a pattern, of the mean error."""
    weights, decays = _unpacked(parameters)
    above, below = _polynomials(weights, decays)
    column = lfilter(above, below, _impulse(steps))
    response = lfilter(below, above, _impulse(steps))
    if separation is None and workload == PREFIX_SUMS:
        error = np.linalg.norm(np.cumsum(response))
    else:
        error = np.sqrt(workload.costs(response).sum() / steps)
    if separation is not None:
        column = added_up(column, separation)
    return math.log(np.linalg.norm(column) * error) if np.isfinite(error) else math.inf
