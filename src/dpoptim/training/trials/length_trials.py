"""Records much longer than others: at attaching, and when a batch of the loop has such a one.

A model, loss or collate function may compare the length to which a batch is padded with a number
of its own, and treat everybody otherwise beyond it: one long record moves all others then.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from dpoptim.errors import PrivacyError, SamplesInteractError
from dpoptim.training.batches import records as forms
from dpoptim.training.trials.axes_of_records import (
    Axes,
    axes_of,
    is_array,
    length_along,
    of_lengths,
    resized,
)
from dpoptim.training.trials.batch_shapes import Axis, BatchShapes, Sizes, beyond, widened
from dpoptim.training.trials.deterministic_runs import put_back
from dpoptim.training.trials.program import Program, compare_if_possible
from dpoptim.training.trials.variations import Units

TIMES_LONGER = (16, 4, 2)
MOST_WORK = 1 << 31  # multiplications of a trial's forward pass, if all of them grow by the square
FEW = 4  # positions that no table of positions lacks twice as many of
TURNS = 4  # in which a record's length is found that a batch's size comes from
OF_LENGTHS = (
    "a batch has another length than all that were tried, and beside made-up records of it the "
    "gradients of others move: model, loss or collate_fn compare the length to which a batch is "
    "padded with a number (attention scaled by it, a coarser path, RoPE that changes beyond a "
    "length), or divide by it. Nothing of this batch was released. Fix: pad each record to one "
    "public length in collate_fn; or decide by each record's own length; or "
    'dpoptim.attach(..., isolation="alone"), in which no record meets another.'
)


@dataclass
class LengthTrials:
    """Trials of lengths that batches have, each once.

    Attributes:
        program: that is tried.
        records: made-up ones that it takes.
        shapes: of its batches.
        axes: of records that may be of another length; the likeliest first, for each size.
        tried: sizes of batches so far.
    """

    program: Program
    records: Units
    shapes: BatchShapes
    axes: list[list[Axes]]
    tried: Sizes = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, records: Units) -> "LengthTrials | None":
        """None where the collate function does not take such records twice."""
        row = records[0][0]
        try:
            with put_back(program.model):
                shapes = BatchShapes.of_collate(program.collate, row)
                made = cls(program, records, shapes, axes_of(row))
                made.tried = made._sizes([row])
        except Exception:  # whatever the user's function raises on made-up records
            return None
        return made

    def compare_longer(self, work: int | None, *, anywhere: bool) -> None:
        """Compare records of which one is much longer, and others are shorter, along each axis.

        Args:
            work: of a pass with the records as they are; None: nobody knows.
            anywhere: whether positions beyond a table raise; elsewhere they end the process's work.

        Raises:
            PrivacyError: records are mixed.
        """
        with put_back(self.program.model):
            for place, candidates in enumerate(self.axes):
                chosen = next((a for a in candidates if self._longer(a, work, anywhere)), None)
                if chosen is not None:  # a later trial begins with it
                    others = [each for each in candidates if each != chosen]
                    self.axes[place] = [chosen, *others]

    def _longer(self, axes: Axes, work: int | None, anywhere: bool) -> bool:
        """Whether records could be compared of which one is longer along these axes."""
        whole = max(1, length_along(self.records[0][0], axes))
        as_is = self._sizes(all_rows(self.records))
        for times in times_longer(whole, work, anywhere):
            lengths = [whole * times, *(max(1, whole // n) for n in (4, 1, 2, 1))]
            changed = of_lengths(self.records, axes, lengths)
            try:
                sizes, shortest = self._sizes(all_rows(changed)), self._sizes(changed[1])
            except Exception:  # whatever the user's function raises: so does any other length
                return False
            if sizes == as_is:
                return False
            if not compare_if_possible(self.program, changed):
                self.tried = widened(widened(self.tried, sizes), shortest)
                return True
        return False

    def see(self, batch: Any, apart: Callable[[], AbstractContextManager[object]]) -> None:
        """Try the lengths of a batch of the loop, if some are shorter or longer than any so far.

        Args:
            apart: a ``with`` in which the model is not attached.

        Raises:
            SamplesInteractError: beside a record of such a length others' gradients are others.

        **Guarantee.** Of the batch, the shapes of tensors are used, and told are none.
        """
        try:
            sizes = self.shapes.sizes(batch)
        except Exception:  # whatever a batch's own classes raise when they are looked at
            return
        new, before = beyond(sizes, self.tried), self.tried
        self.tried = widened(before, sizes)
        if new:
            try:
                with apart(), put_back(self.program.model):
                    self._compare(new)
            except BaseException:  # the batch waits, and its lengths are not tried yet
                self.tried = before
                raise

    def _compare(self, new: set[Axis]) -> None:
        for candidates in self.axes:
            for axes in candidates:
                compared = self._of_lengths(axes, new)
                if compared is not None and self._agrees(compared):
                    break

    def _agrees(self, records: Units) -> bool:
        """Whether records could be compared, and are not mixed."""
        try:
            return not compare_if_possible(self.program, records)
        except SamplesInteractError:
            raise SamplesInteractError(OF_LENGTHS) from None
        except PrivacyError:
            return False

    def _of_lengths(self, axes: Axes, new: set[Axis]) -> Units | None:
        """Records as long and as short as batches were, and one as it was made up.

        That one is there as a record of one position has nothing that could be weighed otherwise.
        None: these axes move none of these sizes.
        """
        first, varied = self.records[0][0], max((rows[0] for rows in self.records), key=changes)
        length = length_along(first, axes)
        try:
            as_is, doubled = (
                self._sizes([resized(first, axes, n)]) for n in (length, 2 * length + 2)
            )
            moved = [axis for axis in sorted(new) if as_is.get(axis) != doubled.get(axis)]
            if not moved:
                return None
            axis = max(moved, key=lambda axis: self.tried[axis][1])
            low, high = self.tried[axis]
            between = resized(varied, axes, min(high, max(low, length)))
            ends = self._reached(first, axes, axis, high), self._reached(varied, axes, axis, low)
        except Exception:  # whatever the user's function raises on records of other lengths
            return None
        return [[row] * len(self.records[0]) for row in (*ends, between)]

    def _reached(self, row: Any, axes: Axes, axis: Axis, wanted: int) -> Any:
        """The record, so long that its batch is as long as wanted, or as nearly as can be."""
        length, found = max(1, wanted), row
        for _ in range(TURNS):
            changed = resized(row, axes, length)
            got = self._sizes([changed])[axis][1]
            if got <= wanted:
                found = changed
            if got == wanted:
                break
            near = abs(wanted - got) * 4 <= got
            length = max(1, length + wanted - got if near else length * wanted // max(1, got))
        return found

    def _sizes(self, rows: Sequence[Any]) -> Sizes:
        return self.shapes.sizes(self.program.collate([*rows]))


def times_longer(length: int, work: int | None, anywhere: bool) -> list[int]:
    """How many times longer a record may be tried; see `LengthTrials.compare_longer`."""
    if not anywhere:
        return [2, 1] if length <= FEW else [1]
    most = MOST_WORK // (work or MOST_WORK // 4)  # all of it may grow by the square
    return [*(times for times in TIMES_LONGER if times**2 <= most), 1]


def all_rows(records: Units) -> list[Any]:
    return [row for rows in records for row in rows]


def changes(row: Any) -> int:
    """How often the numbers of a record change along it: of equal ones any mean is the same."""
    found = 0
    for path, leaf in forms.leaves_of(row):
        if is_array(leaf) and not forms.is_mask(path):
            values = torch.as_tensor(leaf)
            found += int((values[1:] != values[:-1]).sum())
    return found
