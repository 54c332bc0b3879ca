"""Calls of the model on made-up records of the data set's form."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpoptim.gradients.arithmetic.precision import NARROW
from dpoptim.gradients.hooks.seen_outputs import tensors_of
from dpoptim.runtime.torch_internals import pytree
from dpoptim.training.batches.records import is_sparse, refuse_sparse
from dpoptim.training.trials.calls import call_of_loss, calls
from dpoptim.training.trials.deterministic_runs import Quieted
from dpoptim.training.trials.made_up_batches import collated_batch, made_up_batch
from dpoptim.training.trials.wider_copies import widened_batch

Model = Callable[..., Any]


@dataclass(frozen=True)
class Returned:
    """A floating-point tensor with records, among what the model returns.

    Attributes:
        place: among all tensors returned (see `tensors_of`).
        axis: the records'.
        folded: whether the first axis holds records and positions; ``axis`` is the records' place
            among these two.
    """

    place: int
    axis: int
    folded: bool = False

    def records_first(self, tensors: Sequence[Tensor], rows: int) -> Tensor:
        tensor = tensors[self.place]
        if self.folded:
            tensor = tensor.unflatten(0, (-1, rows) if self.axis else (rows, -1))
        return tensor.movedim(self.axis, 0)


@dataclass(frozen=True)
class Sample:
    """A call of the model on made-up records.

    Attributes:
        args, kwargs: of the call.
        rows: records in it, of a number unlike every other axis in sight.
        axis: the records' axis in what the model is given: 0, or 1 for (time, batch, ...); tensors
            of one axis have them there.
        second: places among the call's leaves of tensors that have them on the second axis, where
            others have them first, as initial states of layers with batch_first=False do.
        returned: where what the model returns has records; where it has them first, and is given
            them so, not what has them on its second axis (time first, as CTC wants it), or folded
            with positions.
        least: whole numbers are this or one more.
        whole: whether all numbers are whole, as where a table of floats holds categories.
        quieted: how the model is made deterministic on it, once that is known.
        autocast: what it is called under; None: what the program is under.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    axis: int = 0
    second: frozenset[int] = frozenset()
    returned: tuple[Returned, ...] = ()
    least: int = 0
    whole: bool = False
    quieted: Quieted | None = None
    autocast: torch.dtype | None = None

    def call(self, model: Model) -> Any:
        if self.autocast is None:
            return model(*self.args, **self.kwargs)
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        device = next(leaf.device.type for leaf in leaves if isinstance(leaf, Tensor))
        with torch.autocast(device, self.autocast):
            return model(*self.args, **self.kwargs)

    def outputs(self, model: Model) -> list[Tensor]:
        """The tensors that the model returns with a row for each record: records first."""
        tensors = tensors_of(self.call(model))
        return [each.records_first(tensors, self.rows) for each in self.returned]

    @torch.no_grad()
    def tried(self, model: Model) -> "Sample":
        """The same, with `returned` as this run of the model shows."""
        kinds: dict[str, list[Returned]] = {"first": [], "second": [], "folded": []}
        for i, leaf in enumerate(tensors_of(self.call(model))):
            if (place := self._place(i, leaf)) is not None:
                kinds[place[0]].append(place[1])
        first, second, folded = kinds.values()
        given_first = first and not self.axis
        return replace(self, returned=tuple(first if given_first else first + second + folded))

    def _place(self, i: int, leaf: Tensor) -> tuple[str, Returned] | None:
        """Where an output has records, and how sure that is; None where its sizes do not show."""
        if not leaf.is_floating_point() or not leaf.dim():
            return None
        axes = [a for a in (self.axis, 0) if leaf.dim() > a and leaf.shape[a] == self.rows]
        if axes:
            return "first", Returned(i, axes[0])
        if leaf.dim() > 1 and leaf.shape[1] == self.rows:
            return "second", Returned(i, 1)
        folded = len(leaf) > self.rows and len(leaf) % self.rows == 0
        return ("folded", Returned(i, 0, folded=True)) if folded else None

    @property
    def folded(self) -> bool:
        """Whether the model returns records and positions on one axis."""
        return any(each.folded for each in self.returned)

    def positions_first(self) -> "Sample":
        """The same, where what is folded has the positions first."""
        return replace(self, returned=tuple(replace(each, axis=1) for each in self.returned))

    def records(self, indices: list[int]) -> "Sample":
        """Some of the records, in this order."""
        return replace(self.map_records(lambda x: x[indices]), rows=len(indices))

    def map_records(self, change: Callable[[Tensor], Tensor]) -> "Sample":
        """With every tensor of records changed; it is handed over with the records first."""
        return self.map_places(lambda x, _: change(x))

    def map_places(self, change: Callable[[Tensor, int], Tensor]) -> "Sample":
        """The same, for what depends on a tensor's place among the call's leaves, too."""

        def change_one(leaf: Tensor, axis: int, place: int) -> Tensor:
            return change(leaf.movedim(axis, 0), place).movedim(0, axis)

        return self._map_tensors(change_one)

    def _map_tensors(self, change: Callable[[Tensor, int, int], Tensor]) -> "Sample":
        """With every tensor of records changed, given with the records' axis and its place."""
        leaves, structure = pytree.tree_flatten((self.args, self.kwargs))
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and not no_records(leaf, self.rows):
                axis = 1 if place in self.second else self.axis
                leaves[place] = change(leaf, axis if leaf.dim() > axis else 0, place)
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        return replace(self, args=args, kwargs=kwargs)

    def widened(self) -> "Sample":
        """With numbers in float64."""
        args, kwargs = widened_batch((self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)

    def with_ones(self) -> "Sample":
        """With whole numbers, of which some may be masks, all one."""
        return self.map_records(lambda x: x if x.is_floating_point() else torch.ones_like(x))

    def with_gaps(self) -> "Sample":
        """With everything 0 or 1, as masks are, of which each record has another part."""

        def gaps(x: Tensor) -> Tensor:
            drawn = torch.randint(0, 2, x.shape).to(x)
            if x.dim() > 1:
                drawn[:, 0] = 1  # nobody without any token
                drawn[0] = 1
                drawn[-1, 1:] = 0
            return drawn

        return self.map_records(gaps)

    def from_one(self) -> "Sample":
        """With whole numbers 1 and 2 for 0 and 1, for models that pack records of these lengths.

        What is one number a record ends higher than it begins: sorted by it, from the longest on,
        records change places.
        """

        def lengths(x: Tensor) -> Tensor:
            if x.is_floating_point() or x.dtype == torch.bool:
                return x
            x = x + 1
            if x.dim() == 1:
                x[0], x[-1] = 1, 2
            return x

        return replace(self.map_records(lengths), least=1)

    def in_whole_numbers(self) -> "Sample":
        """With floats that are 0 or 1, for models that look categories up by them."""

        def whole(x: Tensor) -> Tensor:
            return torch.randint_like(x, 0, 2) if x.is_floating_point() else x

        return replace(self.map_records(whole), whole=True)

    def with_another_first(self, size: float) -> "Sample":
        """With another first record, of numbers of about this size."""

        def change(x: Tensor) -> Tensor:
            changed = x.clone()
            if x.is_floating_point() and not self.whole:
                changed[0] = torch.randn_like(x[0]) * size
            elif x.dtype != torch.bool:
                most = self.least + 1
                changed[0] = self.least + most - x[0].clamp(self.least, most)
            return changed

        return self.map_records(change)

    def within_one(self) -> Iterator["Sample"]:
        """With floats within 0 and 1; and with a first record of others, and one of zeros.

        Nothing, if there are no floats.
        """
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        floats = any(isinstance(x, Tensor) and x.is_floating_point() for x in leaves)
        if self.whole or not floats:
            return

        def change(first: Tensor | None, x: Tensor) -> Tensor:
            if not x.is_floating_point():
                return x
            changed = x.sigmoid()
            if first is not None:
                turns = torch.arange(x[0].numel(), device=x.device) % len(first)
                changed[0] = first.to(x)[turns].view_as(x[0])
            return changed

        for first in (None, torch.tensor([2.0, -1.0, 0.0]), torch.zeros(1)):
            yield self.map_records(partial(change, first))

    def time_first(self) -> "Sample":
        """The same records on the second axis of whatever has two."""

        def turn(leaf: Tensor, axis: int, _: int) -> Tensor:
            return leaf.transpose(0, 1).contiguous() if leaf.dim() > 1 and not axis else leaf

        return replace(self._map_tensors(turn), axis=1, second=frozenset())


def samples(
    model: nn.Module,
    train_set: Dataset[Any],
    collate: Callable[[list[Any]], Any] | None,
    loss: Callable[[nn.Module, Any], Any] | None = None,
) -> Iterator[Sample]:
    """Calls that a loop might make, likeliest first: what its loss calls the model with.

    Where the loop's collate function runs on made-up records, models are given what it makes: by
    another one, as lists are stacked, a model may run that treats them otherwise. Last under
    autocast, without which a model may not run whose layers differ in dtype. None with sparse
    tensors: a loss may make them dense before it calls the model.
    """
    refuse_sparse(train_set[0], "records have")
    taken = set[int]()
    for _ in range(2):
        found = None if collate is None else collated_batch(model, train_set, collate, taken)
        found = found or made_up_batch(model, train_set, taken)
        if found is None:
            return
        batch, rows = found
        of_loss = call_of_loss(loss, model, batch)
        if not (taken := confused_with(rows, pytree.tree_leaves(of_loss))):
            break
    likely = [
        Sample(args, kwargs, rows, *axes)
        for args, kwargs in (*of_loss, *calls(model, batch))
        if not any(map(is_sparse, pytree.tree_leaves((args, kwargs))))
        and (axes := axes_of_records(pytree.tree_leaves((args, kwargs)), rows)) is not None
    ]
    likely += [
        *(sample.from_one() for sample in likely),
        *(sample.in_whole_numbers() for sample in likely),
    ]
    yield from likely
    narrow = next((p.dtype for p in model.parameters() if p.dtype in NARROW), torch.bfloat16)
    yield from (replace(sample, autocast=narrow) for sample in likely)


def confused_with(rows: int, leaves: Sequence[Any]) -> set[int]:
    """Sizes of axes that a loss gives what it calls the model with, as long as that of records.

    Such as where it cuts the first token off; of another number of records they are not.
    """
    shapes = [list(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
    for shape in shapes:
        if rows in shape:
            shape.remove(rows)
    return {size for shape in shapes for size in shape if size and size % rows == 0}


def no_records(x: Tensor, rows: int) -> bool:
    """Whether a tensor is none of so many records: no axis is as long, or a multiple of it."""
    return all(size % rows for size in x.shape)


def axes_of_records(leaves: Sequence[Any], rows: int) -> tuple[int, frozenset[int]] | None:
    """The axis that all tensors of records have these on, the only one if they have one.

    Or 0, and the places of those that have them on the second axis instead; None: not all have.
    """
    tensors = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    shapes = {place: t.shape for place, t in tensors.items() if not no_records(t, rows)}
    for axis in (0, 1):
        if {shape[axis if len(shape) > axis else 0] for shape in shapes.values()} == {rows}:
            return axis, frozenset()
    second = frozenset(place for place, shape in shapes.items() if shape[0] != rows)
    found = shapes and all(rows in shape[:2] for shape in shapes.values())
    return (0, second) if found else None
