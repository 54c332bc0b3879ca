"""Agreement of all ranks of a run, by short public texts that can be compared."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from dpoptim.distributed.ranks import Ranks
from dpoptim.errors import RankError
from dpoptim.gradients.engine import Engine
from dpoptim.plan import Plan
from dpoptim.torch_internals import local_part, pytree
from dpoptim.version import __version__

SAMPLED = 256  # records of a TensorDataset that are compared
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

    Data sets of tensors are compared by a digest of some of their records, which stays among the
    ranks.
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
            whole.update(bytes_of(tensor))
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
    """The number of records, and where they are stored tensors, a digest of some."""
    records = len(train_set)  # type: ignore[arg-type]
    if type(train_set) is not TensorDataset:
        return f"{records} records"
    rows = torch.linspace(0, records - 1, min(records, SAMPLED)).long()
    whole = hashlib.sha256()
    for tensor in train_set.tensors:
        whole.update(bytes_of(tensor[rows.to(tensor.device)]))
    return f"{records} records, {whole.hexdigest()[:16]}"


def some_records_of(train_set: Dataset[Any]) -> str:
    """A digest of some records, however they are stored; "" where there are too few to tell."""
    records = len(train_set)  # type: ignore[arg-type]
    if records < LEAST_RECORDS:
        return ""
    if type(train_set) is TensorDataset:
        return sample_of(train_set)
    whole = hashlib.sha256()
    for index in torch.linspace(0, records - 1, LEAST_RECORDS).long().tolist():
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
    shards = ranks.gathered(sample)
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
