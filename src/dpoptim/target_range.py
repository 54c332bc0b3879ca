"""The range of a number to predict: known without the data, as clipping it must be."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from dpoptim.arguments import positive_number, real_number

Floats = np.ndarray[Any, np.dtype[np.float64]]
TargetBound = float | tuple[float, float]


@dataclass(frozen=True)
class TargetRange:
    """From ``middle - half`` to ``middle + half``, which are -1 and 1 where models learn."""

    middle: float
    half: float

    @classmethod
    def of(cls, target_bound: object) -> Self:
        """The range that a bound on |y|, or the lowest and the highest y, allows.

        Raises:
            ValueError: not one finite number above 0, nor two in rising order.
        """
        pair = isinstance(target_bound, Sequence | np.ndarray) and not isinstance(target_bound, str)
        if not pair:
            return cls(0.0, positive_number("target_bound", target_bound))
        given: list[object] = list(target_bound)  # type: ignore[call-overload]
        numbers = [real_number("target_bound", each) for each in given]
        rising = len(numbers) == 2 and -math.inf < numbers[0] < numbers[1] < math.inf
        if not rising or numbers[1] / 2 - numbers[0] / 2 <= 0:  # as of the smallest numbers
            raise ValueError(
                "target_bound must be a bound on |y|, or the lowest and the highest y, "
                f"(low, high), got {target_bound!r}."
            )
        low, high = numbers
        return cls(low / 2 + high / 2, high / 2 - low / 2)

    def __str__(self) -> str:
        if not self.middle:
            return f"{self.half:g}"
        return f"({self.middle - self.half:g}, {self.middle + self.half:g})"

    def part(self, inner: Self) -> "TargetRange":
        """The range that is ``inner`` where this one is from -1 to 1."""
        return TargetRange(self.middle + self.half * inner.middle, self.half * inner.half)

    def scaled(self, y: Floats) -> Floats:
        """Numbers cut to the range, as they are learnt: within [-1, 1].

        **Guarantee.** Each depends on its own number alone, and is at most 1 long.
        """
        return np.clip(self.in_units(y), -1.0, 1.0)

    def in_units(self, y: Floats) -> Floats:
        """Numbers in units of the range, also those beyond it."""
        with np.errstate(over="ignore"):  # a warning would tell of that number
            return (y - self.middle) / self.half

    def unscaled(self, outputs: Floats) -> Floats:
        """Outputs of a model that learnt them, as numbers like the targets."""
        return outputs * self.half + self.middle
