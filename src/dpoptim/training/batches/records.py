"""Single records of any form (tensors, numbers, tuples, mappings, nests), and others like them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpoptim.errors import PrivacyError
from dpoptim.runtime.torch_internals import pytree

IGNORED_LABEL = -100  # that torch's losses and Hugging Face's models leave out
WHOLE = (torch.int64, torch.int32, np.dtype("int64"), np.dtype("int32"))
Path = tuple[str, ...]


def map_leaves(
    record: Any,
    change: Callable[[Path, Any], Any],
    path: Path = (),
    *,
    whole: Callable[[Any], bool] = lambda _: False,
) -> Any:
    """The record with ``change(path, leaf)`` for each leaf; a list of numbers is a leaf.

    Args:
        whole: whether something that holds others is a leaf, too.
    """

    def below(key: object, value: Any) -> Any:
        return map_leaves(value, change, (*path, str(key)), whole=whole)

    if whole(record):
        return change(path, record)
    if isinstance(record, Mapping):
        changed = {key: below(key, value) for key, value in record.items()}
        return changed if type(record) is dict else type(record)(changed)  # type: ignore[call-arg]
    if is_row_of_numbers(record):
        changed = change(path, np.asarray(record))
        return changed.tolist() if isinstance(changed, np.ndarray) else changed
    if isinstance(record, tuple | list):
        return map_items(record, below)
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        names = [field.name for field in dataclasses.fields(record) if field.init]
        return dataclasses.replace(
            record, **{name: below(name, getattr(record, name)) for name in names}
        )
    return change(path, record)


def map_items(record: Sequence[Any], below: Callable[[object, Any], Any]) -> Any:
    """A tuple or list with what is below each of its places, or names."""
    fields = getattr(record, "_fields", None)
    values = map(below, places_in(record) if fields is None else fields, record)
    # a class of such tuples may take other arguments, as PackedSequence does
    return type(record)(values) if fields is None else type(record)._make(values)  # type: ignore[call-arg,attr-defined]


def places_in(record: Sequence[Any]) -> list[object]:
    """The last one of several is what is to be predicted, as in (x, y)."""
    last = len(record) - 1
    return [*range(last), "label"] if last > 0 else [*range(len(record))]


def is_row_of_numbers(record: Any) -> bool:
    """Whether it is a list of more than two numbers of one type; one of two may be (x, y)."""
    kinds = set(map(type, record)) if type(record) is list and len(record) > 2 else set()
    return len(kinds) == 1 and kinds <= {bool, int, float}


def leaves_of(record: Any) -> list[tuple[Path, Any]]:
    found: list[tuple[Path, Any]] = []
    map_leaves(record, lambda path, leaf: found.append((path, leaf)))
    return found


def is_sparse(leaf: Any) -> bool:
    """Whether a tensor's records cannot be picked and changed one by one."""
    return isinstance(leaf, Tensor) and leaf.layout != torch.strided


def refuse_sparse(record: Any, where: str) -> None:
    """Refuse what has sparse tensors, of which no other records can be made up.

    Raises:
        PrivacyError: with where they are, and what to do.
    """
    if any(is_sparse(leaf) for _, leaf in leaves_of(record)):
        raise PrivacyError(
            f"{where} sparse tensors, whose records cannot be tried one by one. Fix: dense ones, "
            "x.to_dense(); or, where these are too large, a fixed number of indices and values of "
            "each record, padded, in two dense tensors, for nn.EmbeddingBag, say."
        )


def is_mask(path: Path) -> bool:
    return bool(path) and "mask" in path[-1].lower()


def is_flag(path: Path, leaf: Any) -> bool:
    """Whether a leaf says whether what is beside it counts: a mask, or true and false."""
    kinds = torch.bool, np.dtype(bool)
    return is_mask(path) or type(leaf) is bool or getattr(leaf, "dtype", None) in kinds


def is_label(path: Path) -> bool:
    return bool(path) and any(word in path[-1].lower() for word in ("label", "target"))


def map_tensors(record: Any, change: Callable[[Path, Tensor], Tensor]) -> Any:
    """`map_leaves`, of numbers and arrays as tensors; each leaf comes back as what it was.

    Raises:
        TypeError: a leaf that is neither a tensor nor an array nor a number.
    """

    def changed(path: Path, leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return change(path, torch.from_numpy(leaf)).numpy()
        if isinstance(leaf, np.generic):
            return type(leaf)(changed(path, leaf.item()))
        if isinstance(leaf, bool | int | float):
            return type(leaf)(change(path, torch.tensor(leaf)).item())
        if not isinstance(leaf, Tensor):
            raise TypeError(type(leaf).__name__)
        return change(path, leaf)

    return map_leaves(record, changed)


def made_up(record: Any, generator: torch.Generator) -> Any:
    """A random record of this form: whole numbers are 0 or 1, valid anywhere; flags are 1.

    The first number of a row is 1: a sequence of zeros alone might be padding, and no record.

    Raises:
        TypeError: a leaf that is neither a tensor nor an array nor a number, which nobody can make
            up.

    **Guarantee.** Of the record, only structure, names, shapes and dtypes are used.
    """

    def fresh(path: Path, leaf: Tensor) -> Tensor:
        if is_flag(path, leaf):
            return torch.ones_like(leaf)
        if leaf.is_floating_point():
            return torch.randn(leaf.shape, generator=generator).to(leaf)
        whole = torch.randint(0, 2, leaf.shape, generator=generator)
        if leaf.dim() and leaf.shape[-1] > 1:
            whole[..., 0] = 1
        return whole.to(leaf)

    return map_tensors(record, fresh)


def with_finite_numbers(record: Any) -> Any:
    """The record with 1 for numbers that are not finite; itself, if all are.

    **Guarantee.** Private, as the record is.
    """
    changed = False

    def finite(path: Path, leaf: Any) -> Any:
        nonlocal changed
        if isinstance(leaf, float | np.floating):
            changed |= not np.isfinite(leaf)
            return leaf if np.isfinite(leaf) else type(leaf)(1)
        floats = isinstance(leaf, Tensor) and leaf.is_floating_point()
        if not floats and not (isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f"):
            return leaf
        there = torch.isfinite(leaf) if floats else np.isfinite(leaf)
        if bool(there.all()):
            return leaf
        changed = True
        return (
            torch.where(there, leaf, 1.0) if floats else np.where(there, leaf, 1).astype(leaf.dtype)
        )

    found = map_leaves(record, finite)
    return found if changed else record


def length_of(record: Any) -> int:
    """The first axis of the record's first tensor that has one; 0 where none has."""
    shapes = [
        leaf.shape
        for _, leaf in leaves_of(record)
        if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim
    ]
    return int(shapes[0][0]) if shapes else 0


def cut(record: Any, length: int) -> Any:
    """The record with all axes as long as the first cut to ``length``: a shorter sequence."""
    whole = length_of(record)

    def shorter(path: Path, leaf: Any) -> Any:
        sequence = (
            isinstance(leaf, Tensor | np.ndarray) and leaf.ndim > 0 and leaf.shape[0] == whole
        )
        return leaf[:length] if sequence else leaf

    return map_leaves(record, shorter)


def masked_after(record: Any, length: int) -> Any:
    """The record padded from position ``length`` on: masks 0, labels to be ignored."""

    return map_leaves(record, lambda path, leaf: masked(path, leaf, length))


def masked(path: Path, leaf: Any, length: int) -> Any:
    """The leaf itself where `masked_after` leaves it alone."""
    if not isinstance(leaf, Tensor | np.ndarray) or leaf.ndim == 0:
        return leaf
    ignored = is_label(path) and leaf.dtype in WHOLE
    filler = 0 if is_mask(path) else IGNORED_LABEL if ignored else None
    if filler is None:
        return leaf
    changed = leaf.clone() if isinstance(leaf, Tensor) else leaf.copy()
    changed[length:] = filler
    return changed


def has_masks(record: Any) -> bool:
    """Whether `masked_after` changes anything."""
    return any(masked(path, leaf, 0) is not leaf for path, leaf in leaves_of(record))


def blank(record: Any) -> Any:
    """The record with nothing but padding: masks and whole numbers 0, its label kept.

    The record itself, if it has neither on an axis.
    """
    changed = False

    def padded(path: Path, leaf: Any) -> Any:
        nonlocal changed
        tokens = isinstance(leaf, Tensor | np.ndarray) and leaf.ndim > 0 and not is_label(path)
        if not tokens or not (is_mask(path) or leaf.dtype in WHOLE):
            return leaf
        changed = True
        return leaf * 0

    found = map_leaves(record, padded)
    return found if changed else record


def single_records(batch: Any) -> list[Any]:
    """The records of a batch of tensors."""
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in leaves}
    if len(sizes) != 1 or min(sizes) < 2:
        raise ValueError(
            "batch must hold tensors, in tuples, lists and dicts, with one common first axis of "
            "at least 2 records; got a "
            f"{type(batch).__name__} with first axes {sorted(sizes)}. A mapping of another type: "
            "dict(batch)."
        )

    def take(i: int) -> Any:
        return pytree.tree_map(lambda leaf: leaf[i] if isinstance(leaf, Tensor) else leaf, batch)

    return [take(i) for i in range(sizes.pop())]


def stacked(records: list[Any]) -> Any:
    """The batch that `single_records` took apart."""

    def stack(*leaves: Any) -> Any:
        return torch.stack(leaves) if isinstance(leaves[0], Tensor) else leaves[0]

    return pytree.tree_map(stack, *records)
