"""Places of records in a batch: an empty slot is told by its place, which collating must keep.

A collate function that sorts or shuffles moves made-up records to places of real ones, whose
gradients would then be left out, while those of made-up records count. Two things show it: a trial
on made-up records when a loop begins; and in every batch the rows of its empty slots, which must
be what is made of made-up records where no real one is beside them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpoptim.errors import PrivacyError
from dpoptim.training.batches import records as forms
from dpoptim.training.randomness.drawing_collates import DRAWS, HeldDraws
from dpoptim.training.randomness.generators import everywhere, generators_in, states_of

FEW = 8  # items of the trial
EMPTY_ONES = (1, 4, 7)  # of these, beside made-up records that differ
MOVED = (
    "fixed_shape=True, but collate_fn sorts or shuffles records, or makes something else of one "
    "beside others: an empty slot is told by its place, and records would be left out in the stead "
    "of made-up ones. Fix: a collate_fn that returns records in the order in which it gets them, "
    "each as it would be alone; or private.batches() without fixed_shape=True."
)
CollateItems = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Rows:
    """Where a leaf of a batch has its items: a run of entries along one axis for each.

    Attributes:
        axis: that is longer with more items.
        each: entries of an item.
        empty: what made-up records are there, (each, ...) with the axis first; for every item in
            turn, where they differ by place.
    """

    axis: int
    each: int
    empty: Tensor

    def are_empty(self, leaf: Tensor, places: Sequence[int]) -> bool:
        """Whether the items at these places are as made-up ones."""
        index = entries_of(places, self.each)
        found = leaf.index_select(self.axis, index.to(leaf.device)).movedim(self.axis, 0)
        if self.same_everywhere:
            index = index % self.each
        return alike(found, self.empty[index].to(found.device))

    @property
    def same_everywhere(self) -> bool:
        return len(self.empty) == self.each


def rows_of_empty(collate: CollateItems, empty: Callable[[], Any], items: int) -> dict[Any, Rows]:
    """Where batches of so many items have them, by the paths of their leaves.

    Args:
        collate: draws nothing.
        empty: makes an empty slot's item.
    """
    few = min(items, 3)
    if few < 2:
        return {}  # an item alone has no other place
    shorter = tensors_of(collate([empty() for _ in range(few - 1)]))
    whole = tensors_of(collate([empty() for _ in range(few)]))
    found = {}
    for path, leaf in whole.items():
        axis = axis_of_items(shorter.get(path), leaf, few)
        if axis is None:
            continue
        each = leaf.shape[axis] // few
        first, *others = leaf.movedim(axis, 0).split(each)
        if not all(alike(first, other) for other in others):
            every = tensors_of(collate([empty() for _ in range(items)]))[path]
            first = every.movedim(axis, 0)
        found[path] = Rows(axis, each, first.clone())
    return found


def tensors_of(batch: Any) -> dict[Any, Tensor]:
    return {path: leaf for path, leaf in forms.leaves_of(batch) if isinstance(leaf, Tensor)}


def axis_of_items(shorter: Tensor | None, longer: Tensor, items: int) -> int | None:
    """The axis that has as many entries for each of so many items as for one less."""
    if shorter is None or shorter.dim() != longer.dim() or forms.is_sparse(longer):
        return None
    for axis, (less, size) in enumerate(zip(shorter.shape, longer.shape, strict=True)):
        if size > less and less * items == size * (items - 1):
            return axis
    return None


def drawn_by(collate: CollateItems, items: list[Any]) -> tuple[bool, bool]:
    """Whether collating these draws from torch's own generator, and whether from others."""
    others = everywhere(generators_in(collate))
    before = torch.get_rng_state(), states_of(others)
    collate(items)
    return not torch.equal(before[0], torch.get_rng_state()), before[1] != states_of(others)


def refuse_moving(collate: CollateItems, empty: Callable[[], Any], items: int) -> dict[Any, Rows]:
    """Try a collate function on made-up records, some of them those of empty slots.

    Returns:
        where the rows of empty slots can be told in each batch; none of a function that draws.

    Raises:
        PrivacyError: what it makes of a record depends on the record's place, or on others.
    """
    few = min(items, FEW)
    with torch.random.fork_rng([]):
        by_torch, by_others = drawn_by(collate, [empty() for _ in range(few)])
        if by_others:  # nobody can hold what is drawn
            return {}
        if by_torch:
            collate, items = HeldDraws(collate, DRAWS["nothing"]), few
        rows = rows_of_empty(collate, empty, items)
        try_on_made_up(collate, empty, few, rows)
        return {} if by_torch else rows


def try_on_made_up(
    collate: CollateItems, empty: Callable[[], Any], items: int, rows: dict[Any, Rows]
) -> None:
    """Look where rows go when made-up records change places.

    Records that nobody can make up, or that it does not take, show nothing: batches do.
    """
    generator = torch.Generator().manual_seed(0)
    try:
        made_up = [
            empty() if place in EMPTY_ONES else forms.made_up(empty(), generator)
            for place in range(items)
        ]
        orders = [[*range(items)], [*range(1, items), 0], [*range(items)][::-1]]
        first, *others = (
            tensors_of(collate([again(made_up[place]) for place in order])) for order in orders
        )
    except Exception:  # whatever the user's function raises
        return
    told = {path: of for path, of in rows.items() if of.same_everywhere and path in first}
    for order, batch in zip(orders[1:], others, strict=True):
        for path, of in told.items():
            index = entries_of(order, of.each).to(first[path].device)
            if path in batch and not alike(first[path].index_select(of.axis, index), batch[path]):
                raise PrivacyError(MOVED)


def entries_of(places: Sequence[int], each: int) -> Tensor:
    """Indices of the entries of the items at these places."""
    return (torch.tensor(places)[:, None] * each + torch.arange(each)).flatten()


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same but for rounding, which lanes of a processor may decide."""
    if not a.is_floating_point() or a.shape != b.shape:
        return torch.equal(a, b)
    return torch.allclose(a.float(), b.float(), rtol=1e-4, atol=1e-6, equal_nan=True)


def again(record: Any) -> Any:
    """The record in containers of its own: a collate function may take entries out of them."""
    return forms.map_leaves(record, lambda _, leaf: leaf)
