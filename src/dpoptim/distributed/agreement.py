"""Agreement of all ranks of a run, by short public texts that can be compared."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from dpoptim.distributed.ranks import Ranks
from dpoptim.errors import RankError
from dpoptim.gradients.engine import Engine
from dpoptim.plan import Plan
from dpoptim.runtime.torch_internals import local_part, parts_held, pytree
from dpoptim.version import __version__

SAMPLED = 256  # stored records that are compared
LEAST_RECORDS = 4  # by which shards are told apart; as many are read of other data sets


def facts_of(
    plan: Plan,
    engine: Engine,
    optimizers: Sequence[torch.optim.Optimizer],
    train_set: Dataset[Any],
    *,
    sharded: bool,
    **options: object,
) -> dict[str, str]:
    """Describe what this rank is about to do; equal texts mean the same run.

    Args:
        sharded: whether each rank has records of its own, which are then not compared.
        options: further arguments of `attach` that must be the same.

    Data sets that are stored (`stored_samples`) are compared by a digest, which stays among
    the ranks.
    """
    names = {id(p): name for name, p in zip(engine.names, engine.parameters, strict=True)}
    facts = {
        "plan": digest(plan.to_json()),
        "version": f"dpoptim {__version__}, torch {torch.__version__}",
        "model": digest(
            repr([(name, tuple(t.shape), str(t.dtype)) for name, t in tensors_of(engine.model)])
        ),
        "trainable parameters": digest(repr(engine.names)),
        "values of the parameters": values_of(engine),
        "optimizer": repr([type(optimizer).__name__ for optimizer in optimizers]),
        "optimizer settings": digest(
            repr([settings_of(optimizer, names) for optimizer in optimizers])
        ),
        "sharded": str(sharded),
        **{key: str(value) for key, value in options.items()},
    }
    if not sharded:
        facts["data set"] = sample_of(train_set)
    return facts


def digest(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


def values_of(engine: Engine) -> str:
    """A digest of everything that the model holds, but for parts that no other rank has."""
    whole = hashlib.sha256()
    for tensor in engine.model.state_dict().values():
        if isinstance(tensor, Tensor) and local_part(tensor) is tensor:
            for part in parts_held(tensor):
                whole.update(bytes_of(part))
    return whole.hexdigest()[:16]


def bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def settings_of(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[dict[str, str]]:
    return [
        {
            key: repr([names.get(id(p)) for p in value] if key == "params" else value)
            for key, value in sorted(group.items())
        }
        for group in optimizer.param_groups
    ]


def sample_of(train_set: Dataset[Any]) -> str:
    """The number of records, and where they are stored, a digest of which are where."""
    whole = hashlib.sha256()
    for part in stored_samples(train_set):
        whole.update(part)
    return f"{len(train_set)} records, {whole.hexdigest()[:16]}"  # type: ignore[arg-type]


def stored_samples(train_set: Any) -> Iterator[bytes | memoryview]:
    """Some of what a data set holds, from its first record to its last; of a `Subset` its indices.

    Only what reads the same however often: nothing of a data set with code of its own. Private.
    """
    if isinstance(train_set, Subset):
        yield np.asarray(train_set.indices, dtype=np.int64).tobytes()
        yield from stored_samples(train_set.dataset)
    elif isinstance(train_set, ConcatDataset):
        for part in train_set.datasets:
            yield from stored_samples(part)
    elif type(train_set) is TensorDataset:
        rows = some_of(len(train_set), SAMPLED)
        for tensor in train_set.tensors:
            yield bytes_of(tensor[rows.to(tensor.device)])
    elif type(train_set) in (list, tuple):
        for index in some_of(len(train_set), SAMPLED).tolist():
            yield from leaves_of(train_set[index])
    elif is_arrow_table(train_set):
        rows = some_of(len(train_set), SAMPLED)
        yield repr(train_set.with_format("arrow")[rows.tolist()].to_pydict()).encode()


def is_arrow_table(train_set: object) -> bool:
    """Whether it is a data set of Hugging Face's, and not one of its columns."""
    return type(train_set).__module__.startswith("datasets.") and hasattr(train_set, "data")


def some_of(records: int, most: int) -> Tensor:
    """Places spread over all of them, the first and the last included."""
    return torch.linspace(0, records - 1, min(records, most)).long()


def leaves_of(item: Any) -> Iterator[bytes | memoryview]:
    """The numbers and texts in an item, other objects left out."""
    for leaf in pytree.tree_leaves(item):
        if isinstance(leaf, Tensor):
            yield bytes_of(leaf)
        elif isinstance(leaf, np.ndarray | np.generic) and leaf.dtype != object:
            yield leaf.tobytes()
        elif isinstance(leaf, bool | int | float | str | bytes):
            yield repr(leaf).encode()


def some_records_of(train_set: Dataset[Any]) -> str:
    """A digest of some records, however they are stored; "" where there are too few to tell."""
    records = len(train_set)  # type: ignore[arg-type]
    if records < LEAST_RECORDS:
        return ""
    if type(train_set) is TensorDataset:
        return sample_of(train_set)
    whole = hashlib.sha256()
    for index in some_of(records, LEAST_RECORDS).tolist():
        for leaf in pytree.tree_leaves(train_set[index]):
            whole.update(bytes_of(leaf) if isinstance(leaf, Tensor) else repr(leaf).encode())
    return f"{records} records, {whole.hexdigest()[:16]}"


def refuse_equal_shards(ranks: Ranks, sample: str) -> None:
    """Refuse ``sharded=True`` where two ranks were given the same records.

    They would count on both.

    Args:
        sample: digest of some records of this rank, which stays among the ranks; "" where there
            are too few to tell. Shards that overlap in part are not found, nor are data sets that
            read a record differently each time.

    Raises:
        RankError: on all ranks.
    """
    shards = ranks.all_gather(sample)
    for rank, shard in enumerate(shards):
        first = shards.index(shard)
        if shard and first < rank:
            raise RankError(
                f"sharded=True, but ranks {first} and {rank} have the same records: each would be "
                "taken on both. Fix: leave sharded out where every rank has the whole data set, "
                "or give each rank records of its own."
            )


def tensors_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The tensors of a state dict, which may hold other things too."""
    return [(name, t) for name, t in model.state_dict().items() if isinstance(t, Tensor)]
