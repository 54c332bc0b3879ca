"""The workload: how an optimizer makes iterates of what is released, and noise with it.

SGD with momentum m and learning rates l_0, l_1, ... has after step i moved by ``sum_{t <= i} l_t
sum_k (1 - m) m^k y_{t-k}``, y the releases. A strategy is fitted to the least noise in these
(Denisov et al. 2022; Choquette-Choo et al. 2023). Constant rates without momentum: the prefix sums.

A unit of noise in step n that is taken back by increments of the *response* r has moved the iterate
j steps later by ``sum_{k <= j} l_{n+k} r_k``. Decays with names are those for which ``l_{n+k} =
sum_a u_a(n) v_a(k)`` with few a, so that nothing takes more than T operations: with ``P_a(j) =
sum_{k <= j} v_a(k) r_k`` that is ``sum_a u_a(n) P_a(j)``. For others see `planned_rates`.

Nothing of it is part of a guarantee: a loop with other rates has more noise than it could, and the
same privacy.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dpoptim.arguments import one_of, positive_number, real_number
from dpoptim.noise.correlated import planned_rates

Floats = NDArray[np.float64]
Decay = Literal["none", "linear", "cosine"]
Rates = Decay | tuple[float, ...]


@dataclass(frozen=True)
class Workload:
    """Public settings of the optimizer that a strategy is fitted to.

    Args:
        momentum: heavy-ball, in [0, 1), scaled so that a release moves as far in the end.
        decay: of the learning rate, from 1 in the first step towards 0 after the last, t of T:
            ``"linear"``, 1 - t / T, or ``"cosine"``, (1 + cos(pi t / T)) / 2. Or any rates > 0,
            two or more, relative to the optimizer's: of times evenly spread from the first step to
            the last, straight lines between; as many as steps: of each step.
    """

    momentum: float = 0.0
    decay: Rates = "none"

    def __post_init__(self) -> None:
        momentum = real_number("momentum", self.momentum)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {momentum!r}.")
        object.__setattr__(self, "momentum", momentum)
        object.__setattr__(self, "decay", checked_rates(self.decay))

    def factors(self, steps: int) -> tuple[Floats, Floats]:
        """Return u and v, (a, steps) each: the rate of step n + k is ``sum_a u_a(n) v_a(k)``.

        Of a decay with a name.
        """
        part, one = np.arange(steps) / steps, np.ones(steps)
        match self.decay:
            case "none":
                return np.array([one]), np.array([one])
            case "linear":
                return np.array([1 - part, one]), np.array([one, -part])
            case "cosine":
                cosine, sine = np.cos(math.pi * part), np.sin(math.pi * part)
                return np.array([one, cosine, -sine]) / 2, np.array([one, cosine, sine])
        raise AssertionError(f"{self.decay} has no factors")

    def rates(self, steps: int) -> Floats:
        """Return the learning rates, (steps,), relative to the optimizer's."""
        if not isinstance(self.decay, str):
            return planned_rates.rates_of(self.decay, steps)
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

    def costs(self, response: Floats) -> Floats:
        """Return the squared errors of all iterates by a unit of noise in each step, (steps,)."""
        steps, sped = len(response), self.sped(response)
        if not isinstance(self.decay, str):
            return planned_rates.costs(self.rates(steps), sped)
        before, after = self.factors(steps)
        ahead = np.cumsum(pairs(np.cumsum(after * sped, axis=-1)), axis=-1)[..., ::-1]
        return np.asarray((pairs(before) * ahead).sum((0, 1)))

    def error(self, variances: Floats) -> Callable[[Floats], tuple[float, Floats]]:
        """Return a function of the response: squared errors and half of their slopes.

        The errors are those of all iterates, the slopes by the response with momentum.

        Args:
            variances: of each step's noise, shape (steps,).
        """
        steps = len(variances)
        if not isinstance(self.decay, str):
            rates = self.rates(steps)
            return lambda response: planned_rates.error(rates, self.sped(response), variances)
        before, after = self.factors(steps)
        weights = np.cumsum(variances * pairs(before), axis=-1)[..., ::-1]

        def value(response: Floats) -> tuple[float, Floats]:
            answers = np.cumsum(after * self.sped(response), axis=-1)
            pull = np.einsum("abj,bj->aj", weights, answers)
            slopes = (after * np.cumsum(pull[:, ::-1], axis=1)[:, ::-1]).sum(0)
            return float(np.sum(answers * pull)), slopes

        return value

    def errors(self, response: Floats, variances: Floats) -> Floats:
        """Return the standard deviation of each iterate's error, shape (steps,)."""
        from scipy.signal import oaconvolve

        steps, sped = len(response), self.sped(response)
        if not isinstance(self.decay, str):
            return planned_rates.errors(self.rates(steps), sped, variances)
        before, after = self.factors(steps)
        own, later = variances * pairs(before), pairs(np.cumsum(after * sped, axis=-1))
        squares = oaconvolve(own, later, axes=-1).sum((0, 1))[:steps]
        return np.sqrt(np.maximum(squares, 1e-300))


def checked_rates(decay: object) -> Rates:
    """Return a decay's name, or rates as a tuple.

    Raises:
        ValueError: neither.
    """
    if isinstance(decay, str) or not isinstance(decay, Iterable):
        one_of("decay", decay, get_args(Decay))
        return decay  # type: ignore[return-value]
    rates = tuple(positive_number(f"decay[{i}]", rate) for i, rate in enumerate(decay))
    if len(rates) < 2:
        raise ValueError(
            f"decay must be {', '.join(map(repr, get_args(Decay)))}, or two rates or more, got "
            f"{len(rates)}."
        )
    return rates


def in_words(decay: Rates) -> str:
    """Return what happens to the learning rate; nothing: an empty text."""
    if isinstance(decay, str):
        return "" if decay == "none" else f"{decay} decay"
    return f"a plan from {decay[0]:g} over {max(decay):g} to {decay[-1]:g}"


def pairs(of: Floats) -> Floats:
    """Return products of each two rows, (a, a, steps)."""
    return of[:, None] * of[None]


PREFIX_SUMS = Workload()
