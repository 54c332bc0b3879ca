"""Embedding tables whose rows are selected: which they are, and who may move them."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from dpoptim.clipping import Directions
from dpoptim.distributed.ranks import Ranks
from dpoptim.distributed.table_totals import TableTotals
from dpoptim.distributed.wrapping import is_sharded
from dpoptim.errors import PrivacyError
from dpoptim.gradients.accumulation.totals import MakeTotals
from dpoptim.gradients.isolation import Isolation

Tables = dict[nn.Parameter, tuple[str, set[int]]]
DENSE = "Fix: dpoptim.DPSGD, whose noise reaches every row."


def totals_of_tables(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    isolation: Isolation,
    ranks: Ranks,
) -> MakeTotals:
    """Return totals that count which rows of the model's tables records look up.

    Raises:
        PrivacyError: what rows cannot be selected for, by name: parameters cut over processes,
            models without a table, tables that something else uses or whose lookups are not told
            apart, and optimizers that count on noise, or on lookups, in every parameter.
    """
    if is_sharded(model):
        raise PrivacyError(
            "method sparse-sgd selects rows of whole tables, and fully_shard has cut the model's "
            "parameters. Fix: the bare model, or DistributedDataParallel's, on every rank; or "
            "dpoptim.DPSGD."
        )
    tables = tables_of(model, isolation)
    refuse_unsuited(optimizers, tables, {p: name for name, p in model.named_parameters()})
    owner = {p: one for one in optimizers for group in one.param_groups for p in group["params"]}

    def totals(parameters: Sequence[nn.Parameter], directions: Directions) -> TableTotals:
        return TableTotals(
            parameters,
            ranks.totals([p for p in parameters if p not in tables], directions),
            tables=tables,
            takes_sparse=lambda p: p in owner and takes_sparse(owner[p], p),
            ranks=ranks,
        )

    return totals


def tables_of(model: nn.Module, isolation: Isolation) -> Tables:
    """Return the trained tables: a name of each, and the rows that never train."""
    uses: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for key, p in module.named_parameters(recurse=False):
            if p.requires_grad:
                uses.setdefault(p, []).append((f"{name}.{key}" if name else key, module))
    tables = {
        p: used
        for p, used in uses.items()
        if any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for _, module in used)
    }
    if not tables:
        raise PrivacyError(
            "method sparse-sgd selects rows of embedding tables, and the model trains no "
            "nn.Embedding or nn.EmbeddingBag. Fix: dpoptim.DPSGD."
        )
    for used in tables.values():
        for name, module in used:
            refuse_other_use(used[0][0], module)
            refuse_lookups(name, isolation)
    return {
        p: (used[0][0], padding_of([module for _, module in used])) for p, used in tables.items()
    }


def padding_of(layers: Sequence[nn.Module]) -> set[int]:
    """Return the rows that are padding in all layers that look a table up."""
    indices = [layer.padding_idx for layer in layers]
    return {each for each in indices if isinstance(each, int) and len({*indices}) == 1}


def refuse_other_use(name: str, module: nn.Module) -> None:
    """Refuse a table that a layer does something else with than add up the rows looked up."""
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        raise PrivacyError(
            f"parameter {name!r} is an embedding table that {type(module).__name__} uses too (tied "
            f"weights), so its gradient reaches every row. {DENSE}"
        )
    if getattr(module, "mode", "") == "max":
        raise PrivacyError(
            f"parameter {name!r} belongs to an EmbeddingBag of mode 'max', which picks rows by "
            "what they hold. Fix: mode='mean' or 'sum', or dpoptim.DPSGD."
        )


def refuse_lookups(name: str, isolation: Isolation) -> None:
    """Refuse tables whose lookups are not told apart record by record."""
    layer = name.rpartition(".")[0]
    unseen = {*isolation.apart, *isolation.shared, *isolation.both, *isolation.outside}
    if isolation.alone or any(
        layer == each or layer.startswith(f"{each}." if each else "") for each in unseen
    ):
        raise PrivacyError(
            f"parameter {name!r}: which rows a record looks up is not told by isolation "
            f"{isolation.tier!r}: a layer looks up the same for all records, or the table is used "
            "outside its layer (F.linear(x, table.weight)), or without rules for layers. Fix: "
            'isolation="rules", the table called as a layer and one value a record for '
            "private.backward; or dpoptim.DPSGD."
        )


def refuse_unsuited(
    optimizers: Sequence[torch.optim.Optimizer], tables: Tables, names: Mapping[nn.Parameter, str]
) -> None:
    """Refuse optimizers that count on noise, or on lookups, in every entry of what they move."""
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if "noise_std" in optimizer.defaults:
            raise PrivacyError(
                f"{kind} corrects for noise in every entry, and rows that are not selected have "
                "none. Fix: torch.optim.SGD, Adam or SparseAdam."
            )
        held = (p for group in optimizer.param_groups for p in group["params"])
        others = [names[p] for p in held if p in names and p not in tables]
        if isinstance(optimizer, torch.optim.SparseAdam) and others:
            raise PrivacyError(
                f"SparseAdam holds parameter {others[0]!r}, which is no table, so its gradient is "
                "dense. Fix: give SparseAdam the tables, and another optimizer the other "
                "parameters."
            )


def takes_sparse(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> bool:
    """Whether an optimizer, with the options that it has now, moves a parameter's rows alone."""
    group = next(each for each in optimizer.param_groups if any(p is one for one in each["params"]))
    if type(optimizer) is torch.optim.SparseAdam:
        return True
    if type(optimizer) not in (torch.optim.SGD, torch.optim.Adagrad):
        return False
    # with these all entries move, or only dense gradients are taken
    return not any(group.get(option) for option in ("weight_decay", "momentum", "fused"))
