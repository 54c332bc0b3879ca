"""The workload: how an optimizer makes iterates of what is released, and noise with it.

SGD with momentum m and learning rates l_0, l_1, ... has after step i moved by ``sum_{t <= i} l_t
sum_k (1 - m) m^k y_{t-k}``, y the releases. A strategy is fitted to the least noise in these
(Denisov et al. 2022; Choquette-Choo et al. 2023). Constant rates without momentum: the prefix sums.

A unit of noise in step n that is taken back by increments of the *response* r has moved the iterate
j steps later by ``sum_{k <= j} l_{n+k} r_k``. Decays are those for which ``l_{n+k} = sum_a u_a(n)
v_a(k)`` with few a, so that nothing takes more than T operations: with ``P_a(j) = sum_{k <= j}
v_a(k) r_k`` that is ``sum_a u_a(n) P_a(j)``.

Nothing of it is part of a guarantee: a loop with other rates has more noise than it could, and the
same privacy.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dpoptim.arguments import one_of, real_number

Floats = NDArray[np.float64]
Decay = Literal["none", "linear", "cosine"]


@dataclass(frozen=True)
class Workload:
    """Public settings of the optimizer that a strategy is fitted to.

    Args:
        momentum: heavy-ball, in [0, 1), scaled so that a release moves as far in the end.
        decay: of the learning rate, from 1 in the first step towards 0 after the last, t of T:
            ``"linear"``, 1 - t / T, or ``"cosine"``, (1 + cos(pi t / T)) / 2.
    """

    momentum: float = 0.0
    decay: Decay = "none"

    def __post_init__(self) -> None:
        momentum = real_number("momentum", self.momentum)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {momentum!r}.")
        object.__setattr__(self, "momentum", momentum)
        one_of("decay", self.decay, get_args(Decay))

    def factors(self, steps: int) -> tuple[Floats, Floats]:
        """Return u and v, (a, steps) each: the rate of step n + k is ``sum_a u_a(n) v_a(k)``."""
        part, one = np.arange(steps) / steps, np.ones(steps)
        match self.decay:
            case "none":
                return np.array([one]), np.array([one])
            case "linear":
                return np.array([1 - part, one]), np.array([one, -part])
            case "cosine":
                cosine, sine = np.cos(math.pi * part), np.sin(math.pi * part)
                return np.array([one, cosine, -sine]) / 2, np.array([one, cosine, sine])

    def rates(self, steps: int) -> Floats:
        """Return the learning rates, (steps,), the first one 1."""
        before, after = self.factors(steps)
        return np.asarray(before.T @ after[:, 0])

    def matrix(self, steps: int) -> Floats:
        """Return the iterates by the releases, (steps, steps)."""
        lag = np.subtract.outer(np.arange(steps), np.arange(steps))
        velocity = np.where(lag < 0, 0, (1 - self.momentum) * self.momentum ** np.maximum(lag, 0))
        return np.cumsum(self.rates(steps)[:, None] * velocity, axis=0)

    def sped(self, response: Floats) -> Floats:
        """Return the response with momentum, which answers a unit of noise by more increments."""
        from scipy.signal import lfilter

        m = self.momentum
        return response if m == 0 else np.asarray(lfilter([1 - m], [1.0, -m], response))

    def answers(self, response: Floats) -> Floats:
        """Return P, (a, steps), of a response to a unit of noise."""
        _, after = self.factors(len(response))
        return np.cumsum(after * self.sped(response), axis=-1)

    def costs(self, response: Floats) -> Floats:
        """Return the squared errors of all iterates by a unit of noise in each step, (steps,)."""
        before, _ = self.factors(len(response))
        answers = self.answers(response)
        ahead = np.cumsum(pairs(answers), axis=-1)[..., ::-1]
        return np.asarray((pairs(before) * ahead).sum((0, 1)))

    def weights(self, variances: Floats) -> Floats:
        """Return H, (a, a, steps): squared errors add up to ``sum_j P(j)^T H(j) P(j)``.

        Args:
            variances: of each step's noise, shape (steps,).
        """
        before, _ = self.factors(len(variances))
        return np.cumsum(variances * pairs(before), axis=-1)[..., ::-1]

    def errors(self, response: Floats, variances: Floats) -> Floats:
        """Return the standard deviation of each iterate's error, shape (steps,)."""
        from scipy.signal import oaconvolve

        before, _ = self.factors(len(response))
        own, later = variances * pairs(before), pairs(self.answers(response))
        squares = oaconvolve(own, later, axes=-1).sum((0, 1))[: len(response)]
        return np.sqrt(np.maximum(squares, 1e-300))


def pairs(of: Floats) -> Floats:
    """Return products of each two rows, (a, a, steps)."""
    return of[:, None] * of[None]


PREFIX_SUMS = Workload()
