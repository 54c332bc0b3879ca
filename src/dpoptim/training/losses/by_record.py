"""Nests of tensors with the records on their first axis, taken apart by record."""

from collections.abc import Callable, Iterator, Mapping
from numbers import Number
from typing import Any

from torch import Tensor

from dpoptim.training.batches.records import map_leaves

Change = Callable[[Any], Any]
FORM = (
    "{} must hold tensors with the records on their first axis, in tuples, lists and mappings, or "
    "lists with one mapping, text or number for each record; got {}."
)


def rows_of(batch: Any) -> int:
    """How many records a batch has, by the first of its tensors, or of its lists of mappings."""
    found = [len(x) for x in tensors_in(batch) if x.dim()] or lengths_of_lists(batch)
    if not found or not found[0]:
        raise ValueError(FORM.format("the batch", "none"))
    return found[0]


def lengths_of_lists(value: Any) -> list[int]:
    """Lengths of the lists with one mapping, text or number for each record."""
    found = list[int]()
    within(value, lambda each: found.append(len(each)) if is_list_of_each(each) else None)
    return found


def is_list_of_each(value: Any) -> bool:
    """Whether it may hold one mapping, text or number for each record."""
    return (
        type(value) is list
        and len(value) > 0
        and any(all(isinstance(each, kind) for each in value) for kind in (Mapping, str, Number))
    )


def is_known(value: Any) -> bool:
    """Whether it has the records' rows, or is nothing that was computed from several of them."""
    return isinstance(value, Tensor | str | bool | None) or is_list_of_each(value)


def by_record(value: Any, rows: int, what: str, *, parts: bool = True) -> list[Tensor]:
    """Its tensors in turn, each of shape (rows, parts, ...).

    Args:
        parts: whether several parts of a batch may stand one after the other.

    Raises:
        ValueError: one of them has no records, or something is not a tensor.
    """
    found, others = tensors_in(value), list[str]()
    within(value, lambda each: None if is_known(each) else others.append(type(each).__name__))
    if others:
        raise ValueError(FORM.format(what, f"{others[0]}, which has no rows"))
    if any(length != rows for length in lengths_of_lists(value)):
        raise ValueError(FORM.format(what, "a list of another length"))
    for x in found:
        if not x.dim() or len(x) % rows or len(x) == 0 or (len(x) > rows and not parts):
            raise ValueError(FORM.format(what, "a tensor without that axis"))
    return [in_parts(x, rows) for x in found]


def in_parts(x: Tensor, rows: int) -> Tensor:
    """A tensor of parts of a batch, one after the other, as (rows, parts, ...)."""
    return x.unflatten(0, (-1, rows)).transpose(0, 1)


def tensors_in(value: Any) -> list[Tensor]:
    """Tensors that a nest holds, but for those of lists with one mapping for each record."""
    found = list[Tensor]()

    def note(each: Any) -> None:
        if isinstance(each, Tensor):
            found.append(each)

    within(value, note)
    return found


def within(value: Any, note: Callable[[Any], object]) -> None:
    mapped(value, lambda each: (note(each), each)[1])


def rebuilt(value: Any, tensors: Iterator[Tensor], place: int | None) -> Any:
    """A nest with a record's own rows: tensors in turn, and its own place of lists.

    Raises:
        LookupError: a list has one thing for each record, and there is no place.
    """

    def own(each: Any) -> Any:
        if isinstance(each, Tensor):
            return next(tensors)
        if is_list_of_each(each):
            if place is None:
                raise LookupError("vectorised")
            return each[place : place + 1]
        return each

    return mapped(value, own)


def mapped(value: Any, change: Change) -> Any:
    """A nest with what it holds changed: tensors, lists of one each, and other things."""
    return map_leaves(value, lambda _, leaf: change(leaf), whole=is_list_of_each)
