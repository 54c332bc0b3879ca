"""Made-up records of the data set's form, and how the model is called with them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from dpoptim.gradients.arithmetic.precision import NARROW
from dpoptim.gradients.hooks.seen_outputs import tensors_of
from dpoptim.runtime.torch_internals import pytree
from dpoptim.training.batches.records import made_up
from dpoptim.training.trials.calls import call_of_loss, calls
from dpoptim.training.trials.deterministic_runs import Quieted
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
        returned: where what the model returns has records; on its second axis (time first, as CTC
            wants it) only if nothing has them first, and folded with positions only if nothing has
            them on an axis of their own.
        least: whole numbers are this or one more.
        whole: whether all numbers are whole, as where a table of floats holds categories.
        quieted: how the model is made deterministic on it, once that is known.
        autocast: what it is called under; None: what the program is under.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    axis: int = 0
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
        # of outputs of both other kinds nobody knows which is which
        other = [] if second and folded else second or folded
        return replace(self, returned=tuple(first or other))

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

        def map_one(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or no_records(leaf, self.rows):
                return leaf
            axis = self.axis if leaf.dim() > self.axis else 0
            return change(leaf.movedim(axis, 0)).movedim(0, axis)

        args, kwargs = pytree.tree_map(map_one, (self.args, self.kwargs))
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

    def time_first(self) -> "Sample":
        """The same records on the second axis of whatever has two."""
        turned = replace(self, axis=1)

        def turn(leaf: Any) -> Any:
            return (
                leaf.transpose(0, 1).contiguous()
                if isinstance(leaf, Tensor) and leaf.dim() > 1 and not no_records(leaf, self.rows)
                else leaf
            )

        args, kwargs = pytree.tree_map(turn, (self.args, self.kwargs))
        return replace(turned, args=args, kwargs=kwargs)


def made_up_batch(model: nn.Module, train_set: Dataset[Any]) -> tuple[Any, int] | None:
    """Random records of record 0's form, collated, and how many; None if that cannot be done.

    **Guarantee.** Only the structure, shapes and dtypes of record 0 are used, never its values.
    """
    record = train_set[0]
    try:
        form = default_collate([record])
    except (TypeError, RuntimeError):  # strings, graphs, classes of the user's own
        return None
    leaves = [leaf for leaf in pytree.tree_leaves(form) if isinstance(leaf, Tensor)]
    if not leaves:
        return None
    rows = odd_batch_size(model, leaves)
    device = next(model.parameters()).device

    def fresh(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return None
        mask = "mask" in pytree.keystr(path)
        made = (
            torch.ones(rows, *leaf.shape[1:], dtype=leaf.dtype)
            if mask
            else random_like(leaf[0], rows)
        )
        return made.to(device)

    return pytree.tree_map_with_path(fresh, form), rows


def collated_batch(
    model: nn.Module, train_set: Dataset[Any], collate: Callable[[list[Any]], Any]
) -> tuple[Any, int] | None:
    """As `made_up_batch`, by the loop's collate function, which may take any form of records."""
    generator = torch.Generator().manual_seed(0)
    row, device = train_set[0], next(model.parameters()).device

    def batch_of(rows: int) -> Any:
        found = collate([made_up(row, generator) for _ in range(rows)])
        found = dict(found) if isinstance(found, Mapping) else found  # of another library's class
        return pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, found)

    def tensors(batch: Any) -> list[Tensor]:
        return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]

    try:
        # nor with one of a record's own, which is the first of each tensor in a list of records
        own = [leaf[None] for leaf in tensors(made_up(row, generator))]
        rows = odd_batch_size(model, tensors(batch_of(1)) + own)
        batch = batch_of(rows)
    except Exception:  # whatever the user's function raises on made-up records
        return None
    return batch, rows


def samples(
    model: nn.Module,
    train_set: Dataset[Any],
    collate: Callable[[list[Any]], Any] | None,
    loss: Callable[[nn.Module, Any], Any] | None = None,
) -> Iterator[Sample]:
    """Calls that a loop might make, likeliest first: what its loss calls the model with.

    Where the loop's collate function runs on made-up records, models are given what it makes: by
    another one, as lists are stacked, a model may run that treats them otherwise. Last under
    autocast, without which a model may not run whose layers differ in dtype.
    """
    found = None if collate is None else collated_batch(model, train_set, collate)
    found = found or made_up_batch(model, train_set)
    if found is None:
        return
    batch, rows = found
    likely = [
        Sample(args, kwargs, rows, axis)
        for args, kwargs in (*call_of_loss(loss, model, batch), *calls(model, batch))
        if (axis := axis_of_records(pytree.tree_leaves((args, kwargs)), rows)) is not None
    ]
    likely += [
        *(sample.from_one() for sample in likely),
        *(sample.in_whole_numbers() for sample in likely),
    ]
    yield from likely
    narrow = next((p.dtype for p in model.parameters() if p.dtype in NARROW), torch.bfloat16)
    yield from (replace(sample, autocast=narrow) for sample in likely)


def no_records(x: Tensor, rows: int) -> bool:
    """Whether a tensor is none of so many records: no axis is as long, or a multiple of it."""
    return all(size % rows for size in x.shape)


def axis_of_records(leaves: Sequence[Any], rows: int) -> int | None:
    """The axis that all tensors of records have these on, the only one if they have one.

    None: there is none.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    shapes = [tensor.shape for tensor in tensors if not no_records(tensor, rows)]
    sizes = [[shape[a if len(shape) > a else 0] for shape in shapes] for a in (0, 1)]
    return next((axis for axis in (0, 1) if set(sizes[axis]) == {rows}), None)


def odd_batch_size(model: nn.Module, leaves: list[Tensor], *, least: int = 3) -> int:
    """The least number of records from ``least`` on that no other axis can be confused with."""
    taken = {size for leaf in leaves for size in leaf.shape[1:]}
    taken |= {size for p in (*model.parameters(), *model.buffers()) for size in p.shape}
    return next(
        size
        for size in range(max(3, least), 10**6)
        if all(other == 0 or other % size for other in taken)
    )


def random_like(x: Tensor, rows: int) -> Tensor:
    """Random inputs of a record's shape and dtype; integers are 0 or 1, as in any vocabulary."""
    shape = (rows, *x.shape)
    if x.is_floating_point():
        return torch.randn(shape, dtype=x.dtype)
    if x.dtype == torch.bool:
        return torch.ones(shape, dtype=x.dtype)
    return torch.randint(0, 2, shape).to(x.dtype)
