"""Poisson batches cut to microbatches that memory holds, the end of each step marked."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpoptim.gradients.accumulation.summation_groups import EXPECTED_GROUP, into_groups
from dpoptim.gradients.arithmetic.products import BLOCK_GROUPS
from dpoptim.noise.stream import KeyStream
from dpoptim.sampling import Draws, Indices, Position
from dpoptim.training.batches.privacy_units import present_rows

# batches, of so many records in all, are drawn and dealt in one go: one by one takes several times
# as long
TOGETHER, RECORDS_TOGETHER = 32, 1 << 17


@dataclass(frozen=True)
class Microbatch:
    """A physical batch.

    Attributes:
        groups: blocks of groups of records, by their sizes; they arrive in this order.
        null: whether its record stands in for an empty batch.
        last: whether it ends the step.
        present: which of the records' rows are there, (records, K); None: all.
    """

    groups: tuple[tuple[int, ...], ...]
    null: bool
    last: bool
    present: Tensor | None = None

    @property
    def records(self) -> int:
        return sum(map(sum, self.groups))


class BatchQueue:
    """The logical batches of a run, kept from their drawing until their noisy sum is released.

    A batch that was drawn is never replaced by another draw: whoever could look at batches and ask
    for new ones would choose who takes part, and Poisson accounting would no longer hold. Nor are
    the rows that they bring.

    Args:
        sampler: draws units.
        coins: by these.
        units: in the data set.
        steps: of the run.
        bring: what the units of a batch bring to it; see `Units.bring`. None: themselves.
        together: batches that may be drawn in one go. 1: only those that are asked for, so that a
            checkpoint has none of later steps, and goes on where records lie elsewhere.
    """

    def __init__(
        self,
        sampler: Draws,
        coins: KeyStream,
        units: int,
        steps: int,
        bring: Callable[[Indices], Indices] | None = None,
        together: int = TOGETHER,
    ) -> None:
        self.together = together
        self._position = Position()
        drawn = sampler.batches(coins, units, self._position)
        self._drawn = drawn if bring is None else map(bring, drawn)
        self._steps = steps
        self._released = 0
        self._waiting: deque[Indices] = deque()  # of steps _released, _released + 1, ...

    def ahead(self) -> Iterator[Indices]:
        """All unreleased batches in order, drawn as they are asked for: see `Units.bring`.

        **Guarantee.** Each step's batch is one draw of the plan's sampler, whatever the caller
        does. Private.
        """
        for step in range(self._released, self._steps):
            if step == self._released + len(self._waiting):
                self._waiting.append(next(self._drawn))
            yield self._waiting[step - self._released]

    @property
    def steps_released(self) -> int:
        return self._released

    @property
    def drawn_ahead(self) -> int:
        """Batches that wait for their release."""
        return len(self._waiting)

    def draw_ahead(self, batches: int) -> None:
        """Draw until so many wait; ranks that share draws catch up with those that drew more."""
        self._waiting.extend(next(self._drawn) for _ in range(batches - len(self._waiting)))

    def released(self) -> None:
        """The oldest batch's noisy sum is out."""
        self._waiting.popleft()
        self._released += 1

    def secret_state(self) -> dict[str, Any]:
        """For a checkpoint: members of steps drawn ahead, and the order in force. Secret."""
        order = self._position.order
        return {
            "released": self._released,
            "drawn": self._position.drawn,
            "order": None if order is None else torch.from_numpy(order.copy()),
            "waiting": [torch.from_numpy(indices.copy()) for indices in self._waiting],
        }

    def restore(self, secret: dict[str, Any]) -> None:
        """Go on, from a fresh start on the same data set, where `secret_state` was taken."""
        self._released, self._position.drawn = secret["released"], secret["drawn"]
        order = secret["order"]
        self._position.order = None if order is None else order.numpy()
        self._waiting = deque(indices.numpy() for indices in secret["waiting"])


class MicrobatchSampler:
    """Deals batches into groups and groups into microbatches, which are loaded.

    Each is noted in ``drawn`` in the order of delivery. All rows of a person are in one, next to
    each other.

    Data-loader workers run ahead of training, so batches are cut before they are delivered; the
    loader keeps the order, so the first note always belongs to the next delivery.

    Args:
        batches: where the batches come from.
        groups: that each is dealt into, a public number.
        coins: decide each record's group; a step's, by its number.
        most: records that memory holds; None: all.
        microbatches_of_all: from the number of a batch's microbatches in this process to the most
            in any; what is missing is made up by some of record 0, which count as zero.
    """

    def __init__(
        self,
        batches: BatchQueue,
        groups: int,
        coins: Callable[[int], KeyStream],
        most: int | None,
        microbatches_of_all: Callable[[int], int] = lambda own: own,
    ) -> None:
        self.batches, self.size, self._coins = batches, most, coins
        self._microbatches_of_all = microbatches_of_all
        self._groups = groups
        # Blocks must not be cut by the size of others, so microbatches that hold few groups have
        # blocks of one.
        roomy = most is None or most >= 2 * BLOCK_GROUPS * EXPECTED_GROUP
        self._block = BLOCK_GROUPS if roomy else 1
        self.drawn: deque[Microbatch] = deque()

    def microbatches(self) -> Iterator[Indices]:
        for shape, microbatches in self._dealt():
            # The step must happen in any case.
            count = self._microbatches_of_all(max(1, len(microbatches)))
            for number, microbatch in enumerate(microbatches, 1):
                sizes = tuple(tuple(map(len, block)) for block in microbatch)
                items, present = present_rows(
                    np.concatenate([group for block in microbatch for group in block])
                )
                self.drawn.append(
                    Microbatch(sizes, null=False, last=number == count, present=present)
                )
                yield items
            for number in range(len(microbatches) + 1, count + 1):
                # record 0 is delivered, and counts as zero
                self.drawn.append(Microbatch(((1,),), null=True, last=number == count))
                yield np.zeros(math.prod(shape[1:]), dtype=np.int64)

    def _dealt(self) -> Iterator[tuple[tuple[int, ...], list[list[list[Indices]]]]]:
        """Each batch's shape and its microbatches, of blocks of groups."""
        ahead = enumerate(self.batches.ahead(), self.batches.steps_released)
        fitting = max(1, RECORDS_TOGETHER // (self._groups * EXPECTED_GROUP))
        batches = min(self.batches.together, fitting)
        while together := list(islice(ahead, batches)):
            yield from [(indices.shape, self._deal(step, indices)) for step, indices in together]

    def _deal(self, step: int, indices: Indices) -> list[list[list[Indices]]]:
        if not len(indices):
            return []
        groups = into_groups(self._coins(step), indices, self._groups)
        blocks = [groups[i : i + self._block] for i in range(0, len(groups), self._block)]
        return list(self._cut(blocks))

    def _cut(self, blocks: list[list[Indices]]) -> Iterator[list[list[Indices]]]:
        """Microbatches of whole blocks where they fit; blocks too large for memory are cut."""
        microbatch: list[list[Indices]] = []
        for whole in blocks:
            for block in [whole] if self._fits([whole]) else self._single_groups(whole):
                if microbatch and not self._fits([*microbatch, block]):
                    yield microbatch
                    microbatch = []
                microbatch.append(block)
        yield microbatch

    def _fits(self, blocks: list[list[Indices]]) -> bool:
        return (
            self.size is None or sum(len(group) for block in blocks for group in block) <= self.size
        )

    def _single_groups(self, block: list[Indices]) -> Iterator[list[Indices]]:
        assert self.size is not None
        for group in block:
            for start in range(0, max(1, len(group)), self.size):
                yield [group[start : start + self.size]]
