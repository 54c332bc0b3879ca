"""Nests of tensors with the records on their first axis, taken apart by record."""

from collections.abc import Callable, Iterator, Mapping
from numbers import Number
from typing import Any, NoReturn

from torch import Tensor

from dpoptim.errors import PrivacyError
from dpoptim.training.batches.records import map_leaves

Change = Callable[[Any], Any]
PLAIN = bool | int | float | str | None
FORM = (
    "per_sample takes a batch of tensors with the records on their first axis, in tuples, lists "
    "and mappings, or lists with one mapping, text or number for each record; got {}. Fix: leave "
    "out what is no record's own; constants, such as class weights, belong into the loss itself."
)
NO_ROWS = (
    "the loss reads something that the model returned and that has no row for each record of what "
    "it was given: {}. Fix: let the model return tensors with the records on their first axis, and "
    "no loss or number of the whole batch (use_cache=False leaves out caches)."
)


class Unavailable:
    """Something that a model returned beside tensors of the records: nobody may read it."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def _refuse(self, *_: Any) -> NoReturn:
        raise PrivacyError(NO_ROWS.format(vars(self)["_kind"]))

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __float__ = __add__ = _refuse
    __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __eq__ = _refuse
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise PrivacyError(NO_ROWS.format("a tensor or number of the whole batch"))


def rows_of(batch: Any) -> int:
    """How many records a batch has, by the first of its tensors, or of its lists of one each.

    Raises:
        PrivacyError: a leaf of the batch has not one row for each.
    """
    lists = lengths_of_lists(batch)
    found = [len(x) for x in tensors_in(batch) if x.dim()] or lists
    rows = found[0] if found else 0
    others = [leaf for leaf in leaves_in(batch) if not is_own(leaf, rows)]
    if others:
        what = "a tensor" if isinstance(others[0], Tensor) else type(others[0]).__name__
        raise PrivacyError(FORM.format(f"{what} without that axis"))
    if not rows or {*lists} - {rows}:
        raise PrivacyError(FORM.format("no records, or a list of another length"))
    return rows


def is_own(leaf: Any, rows: int) -> bool:
    """Whether a leaf of a batch has the records' rows, or is nothing computed from several."""
    return leaf is None or isinstance(leaf, str) or is_list_of_each(leaf) or has_rows(leaf, rows)


def lengths_of_lists(value: Any) -> list[int]:
    """Lengths of the lists with one mapping, text or number for each record."""
    return [len(leaf) for leaf in leaves_in(value) if is_list_of_each(leaf)]


def is_list_of_each(value: Any) -> bool:
    """Whether it may hold one mapping, text or number for each record."""
    return (
        type(value) is list
        and len(value) > 0
        and any(all(isinstance(each, kind) for each in value) for kind in (Mapping, str, Number))
    )


def has_rows(value: Any, length: int) -> bool:
    """Whether it is a tensor with a first axis of this length."""
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == length


def in_parts(x: Tensor, rows: int) -> Tensor:
    """A tensor of parts of a batch, one after the other, as (rows, parts, ...)."""
    return x.unflatten(0, (-1, rows)).transpose(0, 1)


def leaves_in(value: Any) -> list[Any]:
    """Tensors, lists of one each, and other things that a nest holds."""
    found = list[Any]()

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    mapped(value, note)
    return found


def tensors_in(value: Any) -> list[Tensor]:
    """Tensors that a nest holds, but for those of lists with one mapping for each record."""
    return [leaf for leaf in leaves_in(value) if isinstance(leaf, Tensor)]


def rebuilt(value: Any, tensors: Iterator[Tensor], place: int | None) -> Any:
    """A batch with a record's own rows: tensors in turn, and its own place of lists.

    Raises:
        LookupError: a list has one thing for each record, and there is no place.
    """

    def own(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return next(tensors)
        if is_list_of_each(leaf):
            if place is None:
                raise LookupError("vectorised")
            return copied(leaf[place : place + 1])
        return leaf

    return mapped(value, own)


def returned_to_one(value: Any, tensors: Iterator[Tensor], length: int) -> Any:
    """A return value with a record's own rows: tensors in turn; the rest is unavailable.

    Args:
        length: of the first axis of what has rows.
    """

    def own(leaf: Any) -> Any:
        if has_rows(leaf, length):
            return next(tensors)
        return None if leaf is None else Unavailable(type(leaf).__name__)

    return mapped(value, own)


def copied(value: Any) -> Any:
    """A nest of the same, none of whose tensors, lists and mappings is what it was."""
    return map_leaves(value, lambda _, leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)


def mapped(value: Any, change: Change) -> Any:
    """A nest with what it holds changed: tensors, lists of one each, and other things."""
    return map_leaves(value, lambda _, leaf: change(leaf), whole=is_list_of_each)
