"""A few records together, one at a time, and beside others: what a comparison is made of."""

from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.gradients.oracle import Loss
from dpoptim.runtime.torch_internals import pytree
from dpoptim.training.trials.fixed_noise import drawn_for
from dpoptim.training.trials.wider_copies import widened_batch


def shapes_in(batch: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]


def own_containers(value: Any, shared: Collection[int] = ()) -> Any:
    """A batch of the same tensors, in lists and mappings of its own.

    A loss may take its labels out of it (``batch.pop("labels")``), and is called again.

    Args:
        shared: ids of containers that are handed on as they are.
    """
    if id(value) in shared:
        return value
    if type(value) is dict:
        return {key: own_containers(each, shared) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(own_containers(each, shared) for each in value)
    return copy(value) if isinstance(value, MutableMapping) or is_dataclass(value) else value


def container_ids(value: Any) -> set[int]:
    """Ids of what `own_containers` would copy."""
    inner = value.values() if type(value) is dict else value
    if type(value) in (dict, list, tuple):
        return {id(value)}.union(*map(container_ids, inner))
    return {id(value)} if isinstance(value, MutableMapping) or is_dataclass(value) else set()


@dataclass(frozen=True)
class Batches:
    """A few records, together and one at a time.

    Attributes:
        collate: makes a batch of a list of rows, the same again of the same.
        records: the rows of each, of all equally many.
        order: which record is at each place of the batch; all are in it, some more than once.
        rows: of each batch that was made, by its id.
    """

    collate: Callable[[list[Any]], Any]
    records: Sequence[Sequence[Any]]
    order: Sequence[int]
    rows: dict[int, list[int]] = field(default_factory=dict)

    def of(self, order: Sequence[int]) -> Any:
        """A batch of these records."""
        per_record = len(self.records[0])
        rows = [i * per_record + row for i in order for row in range(per_record)]
        with drawn_for(rows):
            batch = self.collate([row for i in order for row in self.records[i]])
        self.rows[id(batch)] = rows
        return batch

    def records_in(self, batch: Any) -> int:
        """How many records a batch has that was made here."""
        return len(self.rows[id(batch)]) // len(self.records[0])

    def loss_of(self, loss: Loss, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch that was made here, whose rows draw what they draw in any other."""
        with drawn_for(self.rows[id(batch)]):
            return loss(model, own_containers(batch, self.shared))

    @cached_property
    def shared(self) -> set[int]:
        """Ids of containers that all of ``collate``'s batches have: they may carry records on."""
        first, second = self.of([0]), self.of([0])
        return container_ids(first) & container_ids(second)

    @cached_property
    def together(self) -> Any:
        return self.of(self.order)

    def widened(self) -> "Batches":
        """The same, with numbers in float64."""
        return replace(self, collate=lambda rows: widened_batch(self.collate(rows)))

    def beside_others(self) -> Iterator[tuple[slice, Any]]:
        """Batches as `together`, but for every other place, which has the next record.

        Of the same shapes, in which what is kept is rounded alike. With the places that are kept.
        """
        for kept in (0, 1):
            order = [
                i if place % 2 == kept else (i + 1) % len(self.records)
                for place, i in enumerate(self.order)
            ]
            batch = self.of(order)
            if shapes_in(batch) == shapes_in(self.together):
                yield slice(kept, None, 2), batch

    @cached_property
    def alone(self) -> list[Any]:
        """A batch of one of each record."""
        return [self.of([i]) for i in range(len(self.records))]
