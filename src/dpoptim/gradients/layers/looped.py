"""Modules that run record by record inside a batch's forward pass, where ``vmap`` cannot take them.

Such as functions of autograd without ``setup_context``, numbers read with ``item()``, rows picked
by a mask (experts that are given their tokens), and branches that data decide. All else in the
model keeps the batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from dpoptim.gradients.hooks.forwards import as_they_are
from dpoptim.gradients.layers.vmapped import One, VmapLayer

# The place in the batch of the record that runs by itself; None: all do.
RECORD: ContextVar[int | None] = ContextVar("which record runs by itself", default=None)


class LoopedLayer(VmapLayer):
    """Runs a module once for each record, with its own row of the parameters. See `VmapLayer`.

    As many calls as records, so much slower than ``vmap``; but any Python may decide what is done
    with a record.

    **Guarantee.** The gradient of row i of the parameters is record i's own: the module is given
    its numbers and its row, and nothing of other records, and what it returns of that record alone
    is computed by that row. What the module keeps in its attributes from one
    call to the next is outside of this, and watched as in every model (`ModelWatch`). What it
    returns beside tensors has to be the same for all, and its tensors of one shape; else it is
    refused.
    """

    def _of_each(
        self,
        one: One,
        parameters: tuple[Tensor, ...],
        tensors: list[Tensor],
        axes: tuple[int | None, ...],
    ) -> tuple[Tensor, ...]:
        rows = zip(*(p.unbind() for p in parameters), strict=True)
        # what all share has no end
        records = zip(*map(parts_by_record, tensors, axes), strict=False)
        found = []
        with as_they_are():
            for i, (row, record) in enumerate(zip(rows, records, strict=False)):
                with running(i):
                    found.append(one(row, *record))
        together = zip(*found, strict=False)  # unequal structures are refused as such
        try:
            return tuple(map(torch.stack, together))
        except (RuntimeError, TypeError):
            raise self._refusal("its results differ in shape from record to record") from None


def parts_by_record(t: Tensor, axis: int | None) -> Iterator[Tensor]:
    """Each record's part of a tensor, without the axis of records; forever what all share.

    What all share is a copy for each, so that nobody sees what was written there for another one.
    So is what is differentiated, which else may not be written in place.
    """
    while axis is None:
        yield t.clone()
    for part in t.unbind(axis):
        yield part.clone() if part.requires_grad else part


@contextmanager
def running(place: int) -> Iterator[None]:
    """Say whose forward pass it is, for random numbers that have to be a record's own."""
    before = RECORD.set(place)
    try:
        yield
    finally:
        RECORD.reset(before)
