"""Records of which something is missing: NaN, labels that say so, or what a loss treats apart.

Which numbers say so is the program's own choice: it is run once on made-up records, and the numbers
that it compares them with, or ignores, are tried as well as those that are common.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpoptim.training.batches import records as forms
from dpoptim.training.trials.batch_sizes import Work
from dpoptim.training.trials.compared_numbers import (
    BOTH_SIDES,
    MOVES,
    SELECTS,
    ComparedNumbers,
    farthest_first,
    representable,
)
from dpoptim.training.trials.deterministic_runs import looked_at
from dpoptim.training.trials.own_generators import generators_of
from dpoptim.training.trials.program import Program
from dpoptim.training.trials.variations import Units, is_float

# Of labels, by habit, whatever a loss is seen to compare them with; and of floats.
WHOLE, FLOATS = (forms.IGNORED_LABEL, -1, 255), (math.nan, -1)
SMALL = 16  # numbers of a leaf that may be a label, whatever its name is
MOST_LEAVES, MOST_NUMBERS = 8, 4  # to be tried by themselves
Paths = frozenset[forms.Path]
Leaves = list[tuple[forms.Path, Any]]
Share = Callable[[int, int], float]  # of a record's numbers, by its place among so many


@dataclass(frozen=True)
class Missing:
    """A number that takes the place of others.

    Attributes:
        paths: of the leaves in which it does.
        whole: whether these hold whole numbers.
        flags: whether they say of what is beside them that it counts, as masks do.
    """

    paths: Paths
    filler: float
    whole: bool
    flags: bool = False

    def mixed(self, records: Units) -> Units:
        """Records of which ever more is missing; of single numbers every other one.

        Of floats every other record has all: one of which something is no number may have no loss.
        """
        of_many = ever_more if self.whole or self.flags else ever_more_of_every_other
        return self._filled(records, of_many, lambda i, _: i % 2)

    def half(self, records: Units) -> Units:
        """Records of which half is missing, for programs that want equally much of each."""
        return self._filled(records, lambda _, n: 0.5, lambda i, _: i % 2)

    def nearly_all(self, records: Units) -> Units:
        """Records of which all is missing, but for the first one."""
        return self._filled(records, but_the_first, but_the_first)

    @property
    def usual(self) -> bool:
        """Whether it is one of those by habit, and not the program's own, which may be private."""
        return self.flags or not math.isfinite(self.filler) or self.filler in (*WHOLE, *FLOATS)

    @property
    def words(self) -> str:
        """Say what is missing, and no number of the program's own."""
        if self.flags:
            return "flags that are False"
        number = f"{self.filler:g}" if self.usual else "one that the loss compares labels with"
        return f"missing numbers ({number})"

    @property
    def by_itself(self) -> bool:
        """Whether it is to be told that it could not be tried; of labels one will do."""
        return self.flags or not math.isfinite(self.filler)

    def single(self, row: Any) -> bool:
        """Whether these are single numbers, of which a record has all or none."""
        leaves = forms.leaves_of(row)
        return all(numbers_in(leaf) == 1 for path, leaf in leaves if path in self.paths)

    def is_padding(self, row: Any) -> bool:
        """Whether `masked_after` puts that into the same leaves."""
        leaves = [each for each in forms.leaves_of(row) if each[0] in self.paths]
        length, filler = forms.length_of(row), 0 if self.flags else forms.IGNORED_LABEL
        return self.filler == filler and all(
            (self.flags or forms.is_label(path))
            and forms.masked(path, leaf, 0) is not leaf
            and len(leaf) == length
            for path, leaf in leaves
        )

    def _filled(self, records: Units, of_many: Share, of_one: Share) -> Units:
        def filled(i: int, path: forms.Path, leaf: Any) -> Any:
            if path not in self.paths:
                return leaf
            share = of_one if numbers_in(leaf) == 1 else of_many
            # what counts comes first: a record may be looked at from there on
            return partly_filled(leaf, self.filler, share(i, len(records)), last=self.flags)

        return [
            [forms.map_leaves(row, partial(filled, i)) for row in rows]
            for i, rows in enumerate(records)
        ]


@dataclass(frozen=True)
class Watched:
    """Findings about a loss by its operators.

    Attributes:
        numbers: that it compares records with, by leaf; by all if nothing tells which.
        looks: whether it looks for what is no number, as it may where nothing can be told.
        work: how many multiplications it takes, roughly; None: that cannot be told.
    """

    numbers: Mapping[forms.Path, set[float]]
    looks: bool
    work: int | None


def missing_numbers(watched: Watched, records: Units) -> list[Missing]:
    """List what may be missing of a program's records.

    Labels, and whatever is small enough to be one; of any other leaf what the loss compares it
    with; and flags.
    """
    row = records[0][0]
    leaves = [(path, leaf) for path, leaf in forms.leaves_of(row) if numbers_in(leaf)]
    found: dict[tuple[Paths, str], Missing] = {}
    tried = [*habits(leaves, WHOLE, is_whole), *habits(leaves, FLOATS, is_float)]
    tried += [own for leaf in leaves for own in compared_with(watched, *leaf)]
    if watched.looks:  # for what is no number, perhaps in what it computes of these
        tried.append(([(path, leaf) for path, leaf in leaves if is_float(leaf)], math.nan))
    for group, filler in tried:
        if group:
            paths = frozenset(path for path, _ in group)
            found[paths, f"{filler:g}"] = Missing(paths, filler, is_whole(group[0][1]))
    flags = missing_flags(row)
    return [*found.values(), *([] if flags is None else [flags])]


def missing_flags(row: Any) -> Missing | None:
    """All flags, as missing where they are False; None where there are none."""
    flags = [path for path, leaf in forms.leaves_of(row) if forms.is_flag(path, leaf)]
    return Missing(frozenset(flags), 0, whole=False, flags=True) if flags else None


def compared_with(watched: Watched, path: forms.Path, leaf: Any) -> list[tuple[Leaves, float]]:
    """Numbers that the loss compares a leaf with."""
    known = watched.numbers.get(path, ())
    own = [n for n in known if fits(n, [(path, leaf)]) and worth(n, leaf)]
    return [([(path, leaf)], n) for n in farthest_first(own)[:MOST_NUMBERS]]


def habits(
    leaves: Leaves, fillers: Sequence[float], is_one: Callable[[Any], bool]
) -> list[tuple[Leaves, float]]:
    """Numbers that may be missing by habit, in all labels, and in small leaves by themselves."""
    data = [(path, leaf) for path, leaf in leaves if is_one(leaf) and not forms.is_flag(path, leaf)]
    labels = [(path, leaf) for path, leaf in data if forms.is_label(path)]
    small = [(path, leaf) for path, leaf in data if numbers_in(leaf) <= SMALL]
    groups = [labels, *([each] for each in small[:MOST_LEAVES]), small[MOST_LEAVES:]]
    return [(group, filler) for group in groups for filler in fillers if fits(filler, group)]


def ever_more(place: int, records: int) -> float:
    return place / records


def ever_more_of_every_other(place: int, records: int) -> float:
    return place % 2 * place / records


def but_the_first(place: int, _: int) -> float:
    return float(place > 0)


def watch_loss(program: Program, records: Units) -> Watched:
    """Run the loss once, and look at its operators."""
    row, found = records[0][0], defaultdict[forms.Path, set[float]](set)
    model, paths = program.model, [path for path, _ in forms.leaves_of(row)]
    try:
        with looked_at(model, generators_of(model)), torch.enable_grad():
            batch = program.collate([row for rows in records for row in rows])
            leaves = [leaf for _, leaf in forms.leaves_of(batch)]
            followed = ComparedNumbers(model, leaves, BOTH_SIDES, (*MOVES, *SELECTS))
            with followed as compared, Work() as work:
                program.loss(model, batch)
    except Exception:  # whatever the user's loss raises where operators are watched
        return Watched(found, True, None)
    for place, numbers in compared.found.items():
        for path in [paths[place]] if len(paths) == len(leaves) else paths:
            found[path] |= {n for n in numbers if not math.isnan(n)}
    return Watched(found, compared.looks, work.done)


def numbers_in(leaf: Any) -> int:
    """How many numbers a leaf has; 0: it is none of numbers."""
    if isinstance(leaf, Tensor | np.ndarray):
        return math.prod(leaf.shape)
    return int(isinstance(leaf, int | float | np.number | np.bool_))


def is_whole(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)
    return type(leaf) is int or getattr(getattr(leaf, "dtype", None), "kind", "") in "iu"


def fits(number: float, group: Leaves) -> bool:
    """Whether all of these leaves can hold a number."""
    return all(representable(float(number), torch.as_tensor(leaf)) for _, leaf in group)


def worth(number: float, leaf: Any) -> bool:
    """Whether it is none of those that made-up arrays of whole numbers are full of."""
    return number not in (0, 1) or numbers_in(leaf) == 1 or is_float(leaf)


def partly_filled(leaf: Any, filler: float, share: float, *, last: bool) -> Any:
    """The leaf with such a number at the first or last places, a share of all."""
    whole = numbers_in(leaf)
    count = int(share * whole)
    if not isinstance(leaf, Tensor | np.ndarray):
        return type(leaf)(filler) if count else leaf
    found = leaf.clone() if isinstance(leaf, Tensor) else leaf.copy()
    found.reshape(-1)[whole - count if last else 0 : whole if last else count] = filler
    return found
