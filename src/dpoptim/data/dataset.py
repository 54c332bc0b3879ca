"""A data set in memory: features and labels, and whether anything computed from it may be shown."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Data:
    """Features (records, ...) and labels 0..classes-1, for training and, where there is one, a hold-out.

    Attributes:
        public: whether anything computed from the data may be shown (hold-out curves, non-private comparison).
    """

    name: str
    x: Floats
    y: Labels
    x_test: Floats | None
    y_test: Labels | None
    class_names: tuple[str, ...]
    public: bool

    @property
    def classes(self) -> int:
        return len(self.class_names)


def hold_out_fifth(data: Data, seed: int) -> Data:
    """Hold out a random fifth of a public data set."""
    order = np.random.default_rng(seed).permutation(len(data.x))
    held_out, rest = order[: len(order) // 5], order[len(order) // 5 :]
    return replace(data, x=data.x[rest], y=data.y[rest], x_test=data.x[held_out], y_test=data.y[held_out])
