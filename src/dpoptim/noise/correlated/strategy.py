"""The promise of a strategy for prefix sums, and the secret state of one run of it.

Vectors g_0, g_1, ..., g_{T-1} arrive one by one, each possibly a function of everything released
before. Released are g_t + (B z)_t, where z is Gaussian noise of standard deviation s in every
entry and B undoes a *strategy* matrix C: the increments of the prefix sums of noisy g. Whoever
adds them up sees every prefix sum with an error that stays small, because later noise takes back
earlier noise.

**Guarantee.** Let one record change at most ``participations`` of the vectors, any two of them at
least ``separation`` steps apart, and each by at most 1 in Euclidean norm. With s =
sensitivity(...) / mu the whole run is mu-GDP: one Gaussian, whatever T, and also when the g_t
depend on what was released. (Square lower-triangular C: Denisov et al. 2022, Theorem 2.1. Trees: a
node's noisy sum is a Gaussian query on inputs that were fixed when the node was closed, and the
squared shifts of all nodes add up to at most sensitivity^2 on every path.)
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NoReturn, Self

import numpy as np
import torch
from torch import Tensor

from dpoptim.arguments import whole_number
from dpoptim.errors import PrivacyError
from dpoptim.noise.correlated.workload import PREFIX_SUMS, Floats, Workload
from dpoptim.noise.gaussian import fill_standard_normal
from dpoptim.noise.stream import KeyStream

ROUNDING = 1e-12  # sensitivities are computed in float64 and rounded up by this share
ROUNDING_OF_SQUARES = 1 + 1e-9  # of what is convolved by Fourier transforms
SAME = 1e-9  # share by which the numbers of one strategy differ at most between processors


class Strategy(ABC):
    """Public settings of a strategy: a frozen dataclass.

    Attributes:
        workload: of the optimizer whose iterates `prefix_std` is about.
    """

    workload: Workload = PREFIX_SUMS

    def sensitivity(
        self,
        steps: int,
        participations: int = 1,
        separation: int | None = None,
        *,
        regular: bool = False,
    ) -> float:
        """An upper bound on how far one record moves C g, if it moves each g_t by at most 1.

        Args:
            steps: T, the length of the run; >= 1.
            participations: in how many steps one record takes part at most; >= 1.
            separation: fewest steps from one participation to the next (consecutive steps: 1);
                None if nothing is known.
            regular: whether a record takes part in steps i, i + separation, i + 2 separation, ...
                for some i, and no others; strategies that gain nothing from it give the bound for
                any pattern.

        Raises:
            ValueError: naming the argument.
        """
        k, b = most_participations(steps, participations, separation)
        return self._sensitivity(steps, k, b, regular=regular)

    @abstractmethod
    def _sensitivity(self, steps: int, k: int, b: int, *, regular: bool) -> float:
        """`sensitivity` for k participations, as many as fit, at least b steps apart."""

    @abstractmethod
    def prefix_std(self, steps: int) -> Floats:
        """Standard deviation of each iterate's error, per entry, at 1-GDP for one participation.

        With constant learning rates and without momentum these are the prefix sums.
        Shape (steps,); divide by mu and multiply by the norm bound. Exact but for rounding.
        """

    def increment_std(self, steps: int) -> Floats:
        """Standard deviation of each step's noise where z's is 1, (steps,); nan: not known.

        The lengths of the rows of C^-1.
        """
        return np.full(steps, math.nan)

    @abstractmethod
    def start(self, steps: int, sizes: Sequence[int], stream: KeyStream) -> "NoiseState":
        """The noise of ``steps`` releases of tensors with ``sizes`` entries. For the gate alone."""


class NoiseState(ABC):
    """The noise of one run, made as needed. A secret: who knows it can subtract it.

    It shows nothing when printed, and cannot be pickled or copied. `secret_state` hands out what a
    checkpoint needs, to be kept like the data itself. ``stream`` may not be one whose draws were
    used before.
    """

    def __init__(self, steps: int, sizes: Sequence[int], stream: KeyStream) -> None:
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps!r}.")
        self.steps, self.sizes = steps, tuple(sizes)
        self.step = 0
        self._interrupted = False  # whether a step was begun and not ended
        self._stream = stream
        self._standard_deviation: float | None = None
        # of each buffer: what the mechanism remembers
        self._vectors: list[list[Tensor]] = [[] for _ in self.sizes]

    def add(self, buffers: Sequence[Tensor], standard_deviation: float) -> None:
        """Add this step's increment to ``buffers`` (float64, contiguous) in place; go on a step.

        Args:
            buffers: tensors with ``sizes`` entries, on any device, the same ones in every step.
            standard_deviation: of the entries of z; the same in every step (of the first step, if
                it was computed elsewhere and rounded otherwise).

        Raises:
            ValueError: other sizes, another dtype, another standard deviation, or more than
                ``steps`` steps. Nothing has been added then.
            PrivacyError: the step before was interrupted.
        """
        if self.step >= self.steps:
            raise ValueError(
                f"the noise was made for {self.steps} steps, and they are over; start with more "
                "steps."
            )
        if tuple(b.numel() for b in buffers) != self.sizes or any(
            b.dtype != torch.float64 or not b.is_contiguous() for b in buffers
        ):
            raise ValueError(
                f"buffers must be contiguous float64 tensors with {self.sizes} entries, as at the "
                "start."
            )
        if not 0 < standard_deviation < math.inf:
            raise ValueError(
                f"standard_deviation must be positive and finite, got {standard_deviation!r}."
            )
        first = self._standard_deviation or standard_deviation
        if not math.isclose(first, standard_deviation, rel_tol=SAME):
            raise ValueError(
                "standard_deviation changed: later noise takes back earlier noise, so it must stay "
                "the same."
            )
        if self._interrupted:
            raise PrivacyError(
                "a step was interrupted while its correlated noise was drawn, which later noise "
                "cannot take back any more. Fix: go on from a checkpoint (private.save, "
                "attach(..., resume=...)), or start a new run."
            )
        self._standard_deviation = first
        self._interrupted = True
        for remembered, buffer in zip(self._vectors, buffers, strict=True):
            # elsewhere after `restore`
            remembered[:] = [vector.to(buffer.device) for vector in remembered]
            if buffer.numel():
                buffer.view(-1).add_(self._increment(remembered, buffer.view(-1)), alpha=first)
        self.step += 1
        self._interrupted = False

    def secret_state(self) -> dict[str, Any]:
        """State for a checkpoint, to take the noise to come back. **Secret**; copies."""
        return {
            "step": self.step,
            "sizes": list(self.sizes),
            "standard_deviation": self._standard_deviation,
            "vectors": [[vector.clone() for vector in remembered] for remembered in self._vectors],
        }

    def restore(self, secret: dict[str, Any]) -> Self:
        """Continue a run's `secret_state` in this fresh state, with draws of this state's stream.

        Raises:
            ValueError: this state is not fresh, or the secret belongs to a run of another shape.
        """
        vectors = secret["vectors"]
        if self.step != 0:
            raise ValueError("restore wants a state that has added nothing yet; start a new one.")
        if not 0 <= secret["step"] <= self.steps or secret["sizes"] != list(self.sizes):
            raise ValueError(
                "secret belongs to a run of another length or of other tensors; start with the "
                "same ones."
            )
        for size, remembered in zip(self.sizes, vectors, strict=True):
            if any(
                vector.shape != (size,) or vector.dtype != torch.float64 for vector in remembered
            ):
                raise ValueError(
                    "secret belongs to a run of other tensors; start with the same ones."
                )
        self.step, self._standard_deviation = secret["step"], secret["standard_deviation"]
        self._vectors = [[vector.clone() for vector in remembered] for remembered in vectors]
        return self

    @abstractmethod
    def _increment(self, remembered: list[Tensor], like: Tensor) -> Tensor:
        """This step's noise at standard deviation 1 for one buffer; updates ``remembered``."""

    def _draw(self, like: Tensor) -> Tensor:
        """Fresh standard normal noise; float64, shape and device of ``like``."""
        out = torch.empty_like(like)
        fill_standard_normal(self._stream, out)
        return out

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: secret noise of step {self.step} of {self.steps}>"

    def __reduce__(self) -> NoReturn:  # which copy.copy and copy.deepcopy ask, too
        raise TypeError(
            "the noise of a run cannot be pickled or copied: two copies would hide two releases "
            "with one noise; a checkpoint's secret part keeps secret_state()"
        )


def most_participations(steps: int, participations: int, separation: int | None) -> tuple[int, int]:
    """(k, b): how often one record can take part at most, and the fewest steps between.

    Raises ValueError naming the argument.
    """
    for name, value in (
        ("steps", steps),
        ("participations", participations),
        ("separation", separation or 1),
    ):
        whole_number(name, value, least=1)
    if separation == 0:
        raise ValueError(
            "separation must be at least 1 (a record takes part in consecutive steps), got 0."
        )
    b = separation or 1
    return min(participations, 1 + (steps - 1) // b), b


def rounded_up(value: float) -> float:
    return value * (1 + ROUNDING)
