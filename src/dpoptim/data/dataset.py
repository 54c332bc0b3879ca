"""A data set in memory: features, labels, their owners, and whether results may be shown."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dpoptim.data.preparation import Preparation
from dpoptim.data.schema import Schema

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Data:
    """Features (records, ...) and labels 0..classes-1, for training and maybe a hold-out.

    Attributes:
        public: whether anything computed from the data may be shown (hold-out curves, non-private
            comparison).
        target_bounds: of a number to predict; the labels are then that number scaled to [-1, 1],
            float32, and there are no classes. None: classification.
        persons: number of the person, 0, 1, ..., whose record each is; None: every record is
            somebody else's.
        class_weights: public factors of the classes' losses, at most 1, in the classes' order;
            None: all are 1.
        encoding: what makes such features of new records: a schema for tables, steps for arrays.
            None: nothing known.
    """

    name: str
    x: Floats
    y: Labels | Floats
    x_test: Floats | None
    y_test: Labels | Floats | None
    class_names: tuple[str, ...]
    public: bool
    target_bounds: tuple[float, float] | None = None
    persons: Labels | None = None
    encoding: Schema | Preparation | None = None
    class_weights: tuple[float, ...] | None = None

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def outputs(self) -> int:
        """Numbers that a model gives for a record: one a class, or the one to predict."""
        return 1 if self.target_bounds is not None else self.classes

    @property
    def units(self) -> int:
        """The number of persons, or of records where nobody has several."""
        return len(self.x) if self.persons is None else int(self.persons.max()) + 1


def hold_out_fifth(data: Data, seed: int) -> Data:
    """Hold out a random fifth of a public data set, by persons where it has them.

    Args:
        data: public, without a hold-out.
        seed: of the draw.

    Returns:
        the same data set with a hold-out.

    Examples:
        >>> from dpoptim.data import hold_out_fifth, load_digits
        >>> digits = load_digits()
        >>> whole = hold_out_fifth(digits, seed=1)
        >>> len(whole.x_test) == len(digits.x) // 5
        True
    """
    order = np.random.default_rng(seed).permutation(data.units)
    if data.persons is None:
        held_out, rest = order[: len(order) // 5], order[len(order) // 5 :]
        return replace(
            data, x=data.x[rest], y=data.y[rest], x_test=data.x[held_out], y_test=data.y[held_out]
        )
    test = order[data.persons] < data.units // 5
    _, persons = np.unique(data.persons[~test], return_inverse=True)
    return replace(
        data,
        x=data.x[~test],
        y=data.y[~test],
        x_test=data.x[test],
        y_test=data.y[test],
        persons=persons.astype(np.int64),
    )
