"""Toeplitz strategies whose inverse is banded: noise that is drawn again instead of remembered.

Where the inverse of T in ``C = D T`` (`fitting`) is Toeplitz with first column ``1, -a_1, ...,
-a_{p-1}``, the noise of step t is ``z_t / d_t - sum_k a_k z_{t-k} / d_{t-k}``: of the last p draws.
Draws of a counter-based stream can be made again, so such noise needs no memory but p draws a step,
whatever the model's size. (Banded inverses: Kalinin, McKenna, Upadhyay and Lampert 2025, "Back to
square roots". Theirs cuts off the square root's coefficients; here they, and each step's deviation,
are fitted to the run.)

All ``a_k >= 0``, so C has no entry below 0. What is found is only rounded, never trusted: errors
and sensitivities are computed from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpoptim.arguments import whole_number
from dpoptim.noise.correlated.buffered_toeplitz import added_up, overlapping_sensitivity
from dpoptim.noise.correlated.fitting import (
    DECIMALS,
    ITERATIONS,
    LONGEST_SCALED,
    best_rows,
    convolved,
    inverse,
)
from dpoptim.noise.correlated.strategy import NoiseState, Strategy
from dpoptim.noise.correlated.toeplitz import inverse_coefficients
from dpoptim.noise.correlated.workload import PREFIX_SUMS, Floats, Workload
from dpoptim.noise.gaussian import add_normal, fill_standard_normal
from dpoptim.noise.stream import SECRET_BYTES, KeyStream

BANDS = 8  # draws a step


@dataclass(frozen=True)
class RedrawnToeplitz(Strategy):
    """Noise that is taken back by the ``bands - 1`` steps that follow. Remembers nothing.

    Args:
        bands: draws a step, >= 1.
        separation: the steps between a record's participations that the strategy is made for;
            None: takes part once.
        workload: of the optimizer whose iterates are to carry little noise.
    """

    bands: int = BANDS
    separation: int | None = None
    workload: Workload = PREFIX_SUMS

    def __post_init__(self) -> None:
        object.__setattr__(self, "bands", whole_number("bands", self.bands, least=1))
        if self.separation is not None:
            separation = whole_number("separation", self.separation, least=1)
            object.__setattr__(self, "separation", separation)

    def parameters(self, steps: int) -> tuple[Floats, Floats]:
        """Return ``1, -a_1, ...``, (at most bands,), and D's squares, (steps,)."""
        separation = steps if self.separation is None else min(self.separation, steps)
        return fitted(steps, min(self.bands, steps), separation, self.workload)

    def inverse_matrix(self, steps: int) -> Floats:
        """Return C^-1, (steps, steps): what draws are multiplied by."""
        response, rows = self.parameters(steps)
        return sum(r * np.eye(steps, k=-lag) for lag, r in enumerate(response)) * rows**-0.5

    def _sensitivity(self, steps: int, k: int, b: int, *, regular: bool) -> float:
        response, rows = self.parameters(steps)
        return overlapping_sensitivity(inverse(response, steps), rows, k, b, regular=regular)

    def prefix_std(self, steps: int) -> Floats:
        response, rows = self.parameters(steps)
        errors = self.workload.errors(padded(response, steps), 1 / rows)
        return errors * self.sensitivity(steps)

    def increment_std(self, steps: int) -> Floats:
        response, rows = self.parameters(steps)
        return np.sqrt(convolved(1 / rows, response**2))

    def start(self, steps: int, sizes: Sequence[int], stream: KeyStream) -> NoiseState:
        return RedrawnState(steps, sizes, stream, *self.parameters(steps))


class RedrawnState(NoiseState):
    """Remembers a secret of each of the last steps, from which its draws are made, and made again.

    After `restore`, draws of steps before are remembered until the last of them is taken back.

    **Guarantee.** The draws of different steps and tensors are independent: each step has a key of
    its own from the run's stream, and its tensors follow one another in what that key makes.
    """

    def __init__(
        self, steps: int, sizes: Sequence[int], stream: KeyStream, response: Floats, rows: Floats
    ) -> None:
        super().__init__(steps, sizes, stream)
        self._response, self._deviations = response, rows**-0.5
        self._keys: list[bytes] = []  # this state's own, newest first; `_vectors` goes on from them
        self._devices = [torch.device("cpu")] * len(self.sizes)
        self._open = -1, list[KeyStream]()  # a step, and the streams of it and of those before

    def add(self, buffers: Sequence[Tensor], standard_deviation: float) -> None:
        super().add(buffers, standard_deviation)
        self._devices = [buffer.device for buffer in buffers]

    def _increment(self, remembered: list[Tensor], like: Tensor) -> Tensor:
        if self._open[0] != self.step:
            self._open = self.step, self._begin()
        fresh, *earlier = self._open[1]
        own = 1 + len(earlier)
        lags = range(min(len(self._response), self.step + 1))
        deviations = self._deviations[self.step - np.array(lags)]
        # all but this step's with the sign changed
        stds = np.abs(self._response[: len(lags)] * deviations).tolist()
        increment = torch.zeros_like(like)
        for stream, std in zip(earlier, stds[1:own], strict=True):
            add_normal(stream, increment, std)
        for draws, std in zip(remembered, stds[own:], strict=True):
            increment.add_(draws, alpha=std)
        del remembered[max(0, len(self._response) - 1 - own) :]
        increment.neg_()
        add_normal(fresh, increment, stds[0])
        return increment

    def _begin(self) -> list[KeyStream]:
        """Draw a step's key; return streams of it and of those that it takes back, newest first."""
        key = bytearray(SECRET_BYTES)
        self._stream.fill(key)
        self._keys = [bytes(key), *self._keys][: len(self._response)]
        return [self._draws_of(each) for each in self._keys]

    def _draws_of(self, key: bytes) -> KeyStream:
        """A stream that begins with a step's draws, of one tensor after the other."""
        return KeyStream.from_secret(key, "correlated noise")

    def secret_state(self) -> dict[str, Any]:
        """State for a checkpoint, with the draws that are still to be taken back. **Secret**."""
        state = super().secret_state()
        drawn: list[list[Tensor]] = [[] for _ in self.sizes]
        for stream in map(self._draws_of, self._keys[: len(self._response) - 1]):
            for draws, size, device in zip(drawn, self.sizes, self._devices, strict=True):
                draws.append(torch.empty(size, dtype=torch.float64, device=device))
                fill_standard_normal(stream, draws[-1])
        earlier = state["vectors"]
        state["vectors"] = [[*new, *old] for new, old in zip(drawn, earlier, strict=True)]
        return state


def padded(response: Floats, steps: int) -> Floats:
    return np.concatenate([response, np.zeros(steps - len(response))])


@lru_cache(maxsize=64)
def fitted(steps: int, bands: int, separation: int, workload: Workload) -> tuple[Floats, Floats]:
    """Return ``1, -a_1, ..., -a_{bands-1}`` and p, (steps,), of little mean error; read-only.

    All a are above 0 and add up to less than 1, so that C does not grow: found are the logarithms
    of these shares of 1, and of what is left of it.
    """
    from scipy.optimize import minimize
    from scipy.signal import lfilter

    error_of = workload.error(np.ones(steps))

    def shares(logarithms: Floats) -> Floats:
        found = np.exp(logarithms - logarithms.max())
        return np.asarray(found / found.sum())

    def value(logarithms: Floats) -> tuple[float, Floats]:
        """Logarithm of squared errors times squared sensitivity, and its slopes."""
        a = shares(logarithms)
        short = np.concatenate([[1.0], -a[1:]])
        column = inverse(short, steps)
        twice = lfilter([1.0], short, column)  # a change of a_k by 1 adds it, k steps later
        together, added = added_up(column, separation), added_up(twice, separation)
        error, pulled = error_of(padded(short, steps))
        by_response = workload.sped(pulled[::-1])[::-1]  # backwards in time
        length = float(together @ together)
        by_a = np.array([0.0, *(together[k:] @ added[: steps - k] for k in range(1, bands))])
        by_a = 2 * by_a / length - 2 * np.append(0.0, by_response[1:bands]) / error
        return float(np.log(error * length)), a * (by_a - a @ by_a)

    start = -inverse_coefficients(bands)
    start[0] = 1 - start[1:].sum()
    found = minimize(
        value, np.log(start), jac=True, method="L-BFGS-B", options={"maxiter": ITERATIONS}
    )
    response = -np.round(shares(found.x), DECIMALS)
    response[0] = 1.0
    rows = np.ones(steps)
    if steps <= LONGEST_SCALED:
        together = added_up(inverse(response, steps), separation)
        costs = workload.costs(padded(response, steps))
        rows, _ = best_rows(costs, together**2, np.arange(separation))
        rows = np.exp(np.round(np.log(rows / rows[0]), DECIMALS))
    response.flags.writeable = rows.flags.writeable = False  # cached
    return response, rows
