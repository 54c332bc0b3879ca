"""Statistics of each of some groups of the records, at the price of one."""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dpoptim.data.input_arrays import one_axis
from dpoptim.data.numbers import classes_of
from dpoptim.missing_values import is_gap
from dpoptim.statistics import BOUND_ROUNDING, Floats, bounded_sum


@dataclass(frozen=True)
class Groups:
    """Groups of the records, of which each is in one at most.

    Attributes:
        count: how many groups; public.
        places: of each record, shape (rows,); -1 of those in none. Private.
        asked: whether groups were asked for; otherwise all records are one.
    """

    count: int
    places: NDArray[np.int64]
    asked: bool

    @classmethod
    def of(cls, by: Any, groups: Sequence[Any] | None, rows: int, persons: Any = None) -> Self:
        """Args: by: the group of each record, shape (rows,); None: all are one. groups: public.

        Raises:
            ValueError: one of ``by`` and ``groups`` without the other, not one value for each
                record, or ``persons`` beside them.

        **Guarantee.** A record's place depends on its own value in ``by`` alone.
        """
        if by is None and groups is None:
            return cls(1, np.zeros(rows, dtype=np.int64), asked=False)
        if by is None or groups is None:
            raise ValueError(
                "by and groups go together: which groups there are is public knowledge, and not "
                "read off the records. Fix: by=column, groups=['yes', 'no']."
            )
        if isinstance(groups, str | Set | Mapping) or any(map(is_gap, groups)):
            raise ValueError(
                "groups must be a list of names, in order, and a gap is none. Fix: groups=['yes', "
                "'no']; name gaps by a word in by, too, before they are counted."
            )
        if not len(groups):
            raise ValueError("groups is empty: there is nothing to tell. Fix: name at least one.")
        if persons is not None:
            raise ValueError(
                "persons and by: a person's rows may lie in several groups, and move all of them. "
                "Fix: a table with one row a person; or, for counts, private_histogram of texts "
                "that name both (f'{group}, {category}'), with persons=."
            )
        column = one_axis("by", by)
        if len(column) != rows:
            raise ValueError("by must name the group of each record: one value for each.")
        return cls(len(groups), classes_of([*groups], column, "groups", "group"), asked=True)

    def cells(self, places: NDArray[np.int64], width: int) -> NDArray[np.int64]:
        """Places among ``count * width`` cells, group by group; -1 of what is in none."""
        return np.where((self.places >= 0) & (places >= 0), self.places * width + places, -1)

    def sums(self, rows: Floats, norm_bound: float) -> Floats:
        """`bounded_sum` of each group's rows, shape (count, k); of persons, where unasked. Private.

        **Guarantee.** A record adds to one group's sum alone, as there.
        """
        if not self.asked:
            return bounded_sum(rows, norm_bound)[None]
        return np.stack([bounded_sum(rows[own], norm_bound) for own in self.parts()])

    def parts(self) -> list[NDArray[np.int64]]:
        """The rows of each group. Private."""
        order = np.argsort(self.places, kind="stable")
        ends = np.searchsorted(self.places[order], np.arange(self.count + 1))
        return [order[ends[place] : ends[place + 1]] for place in range(self.count)]

    def reach(self, within: float, norm: float, neighboring: str) -> float:
        """The norm bound of all groups' sums together, as one vector.

        Under replace-one a record may leave a group and enter another, whose sums stand at right
        angles: it then moves the vector by sqrt 2 of its norm. The gate takes twice the bound.

        Args:
            within: how far two records in one group may be apart. norm: of one.
        """
        if neighboring != "replace-one":
            return norm * BOUND_ROUNDING
        across = math.sqrt(2) * norm if self.count > 1 else norm
        return max(within, across) / 2 * BOUND_ROUNDING

    def touched(self, neighboring: str) -> int:
        """In how many groups one record changes anything, at most."""
        return 2 if neighboring == "replace-one" and self.count > 1 else 1

    def shaped(self, values: Floats) -> Any:
        """Values of shape (count, ...); those of all records without that axis, or as a float."""
        found = values if self.asked else values[0]
        return found if np.ndim(found) else float(found)
