"""Poisson batches cut to pieces that memory holds, with "this is the last piece" travelling along."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from dpoptim.noise.stream import KeyStream
from dpoptim.sampling import PoissonSampling, into_groups, number_of_groups

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """A physical batch.

    Attributes:
        groups: how many records each of its groups has; they arrive in this order.
        null: whether its record stands in for an empty batch.
        last: whether it ends the step.
    """

    groups: tuple[int, ...]
    null: bool
    last: bool

    @property
    def rows(self) -> int:
        return sum(self.groups)


class BatchQueue:
    """The logical batches of a run: drawn when first wanted, kept until their noisy sum has been released.

    A batch that was drawn is never replaced by another draw: whoever could look at batches and ask for new ones would
    choose who takes part, and Poisson accounting would no longer hold.
    """

    def __init__(self, sampler: PoissonSampling, coins: KeyStream, records: int, steps: int) -> None:
        self._sampler, self._coins, self._records = sampler, coins, records
        self._steps = steps
        self._released = 0
        self._waiting: deque[Indices] = deque()  # of steps _released, _released + 1, ...

    def ahead(self) -> Iterator[Indices]:
        """All unreleased batches in order, drawn as they are asked for.

        **Guarantee.** Each step's batch is one draw of the plan's sampler, whatever the caller does. Private.
        """
        for step in range(self._released, self._steps):
            if step == self._released + len(self._waiting):
                self._waiting.append(self._sampler.draw(self._coins, self._records))
            yield self._waiting[step - self._released]

    def released(self) -> None:
        """The oldest batch's noisy sum is out."""
        self._waiting.popleft()
        self._released += 1


class PieceSampler(Sampler[list[int]]):
    """Deals batches into groups and groups into pieces, noting each piece in ``drawn`` in the order of delivery.

    Data-loader workers run ahead of training, so pieces are cut before they are delivered; the loader keeps the order,
    so the first note always belongs to the next delivery.

    Args:
        batches: where the batches come from.
        expected_batch: their expected size, a public number.
        coins: decide each record's group.
        physical_batch_size: rows that memory holds; None: all.
    """

    def __init__(
        self, batches: BatchQueue, expected_batch: float, coins: KeyStream, physical_batch_size: int | None
    ) -> None:
        self.batches, self.size, self._coins = batches, physical_batch_size, coins
        self._groups = number_of_groups(expected_batch, physical_batch_size)
        self.drawn: deque[Piece] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        for indices in self.pieces():
            yield indices.tolist()

    def pieces(self) -> Iterator[Indices]:
        for indices in self.batches.ahead():
            if len(indices) == 0:
                # The step must still happen: record 0 is delivered, and counts as zero.
                self.drawn.append(Piece((1,), null=True, last=True))
                yield np.zeros(1, dtype=np.int64)
                continue
            pieces = list(self._cut(into_groups(self._coins, indices, self._groups)))
            for number, groups in enumerate(pieces, 1):
                self.drawn.append(Piece(tuple(map(len, groups)), null=False, last=number == len(pieces)))
                yield np.concatenate(groups)

    def _cut(self, groups: list[Indices]) -> Iterator[list[Indices]]:
        """Pieces of whole groups where they fit; a group that does not fit into memory by itself is cut."""
        piece: list[Indices] = []
        rows = 0
        for group in groups:
            size = self.size or max(1, len(group))
            for part in (group[start : start + size] for start in range(0, len(group), size)):
                if self.size is not None and rows + len(part) > self.size:
                    yield piece
                    piece, rows = [], 0
                piece.append(part)
                rows += len(part)
        yield piece


def deliveries(
    dataset: Dataset[Any],
    pieces: PieceSampler,
    *,
    num_workers: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    pin_memory: bool,
) -> Iterator[tuple[Any, Piece]]:
    """The collated pieces with their notes, in order."""
    if type(dataset) is TensorDataset and collate_fn is None and num_workers == 0 and not pin_memory:
        # What DataLoader would give, without a Python call for each record.
        for indices in pieces.pieces():
            index = torch.from_numpy(indices)
            yield [tensor[index.to(tensor.device)] for tensor in dataset.tensors], pieces.drawn.popleft()
        return
    loader = DataLoader(dataset, batch_sampler=pieces, num_workers=num_workers, collate_fn=collate_fn, pin_memory=pin_memory)
    for batch in loader:
        yield batch, pieces.drawn.popleft()
