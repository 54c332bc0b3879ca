"""Batches of made-up records of the data set's form, as many as no other axis has."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from dpoptim.runtime.torch_internals import pytree
from dpoptim.training.batches.records import made_up


def made_up_batch(
    model: nn.Module, train_set: Dataset[Any], taken: Collection[int] = ()
) -> tuple[Any, int] | None:
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
    rows = odd_batch_size(model, leaves, taken=taken)
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
    model: nn.Module,
    train_set: Dataset[Any],
    collate: Callable[[list[Any]], Any],
    taken: Collection[int] = (),
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
        rows = odd_batch_size(model, tensors(batch_of(1)) + own, taken=taken)
        batch = batch_of(rows)
    except Exception:  # whatever the user's function raises on made-up records
        return None
    return batch, rows


def odd_batch_size(
    model: nn.Module, leaves: list[Tensor], *, least: int = 3, taken: Collection[int] = ()
) -> int:
    """The least number of records from ``least`` on that no other axis can be confused with.

    Args:
        taken: sizes of others than these leaves' and the model's.
    """
    taken = {*taken, *(size for leaf in leaves for size in leaf.shape[1:])}
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
