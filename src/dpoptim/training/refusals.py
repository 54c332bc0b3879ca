"""Refusals of trainings that cannot be private, by name before it does harm."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset

from dpoptim.accounting.ledger import Ledger
from dpoptim.errors import PrivacyError
from dpoptim.gate import SelectedRows
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.hooks.refusals import refuse_wrapped
from dpoptim.gradients.layers.embedding import refuse_options
from dpoptim.gradients.watch.contents import Contents
from dpoptim.gradients.watch.model_watch import refuse_frozen_or_unfrozen
from dpoptim.noise.gaussian import LEAST_ON_DEVICE
from dpoptim.noise.on_device import draws_on
from dpoptim.origins import of_this_library
from dpoptim.plan import Plan, require_plan
from dpoptim.privacy_unit import RECORD
from dpoptim.runtime.torch_internals import global_step_hooks, gradient_hooks
from dpoptim.training.batches.collation import refuse_missing
from dpoptim.training.batches.privacy_units import Units
from dpoptim.training.other_libraries import (
    refuse_nothing_to_train,
    refuse_opacus_model,
    refuse_opacus_optimizers,
)


def refuse_unsupported(
    plan: Plan,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    train_set: Dataset[Any],
    loss_reduction: str | None,
    ledger: Ledger | None,
) -> None:
    """Errors that need no look at the model's layers."""
    require_plan(plan)
    if loss_reduction not in (None, "mean", "sum"):
        raise ValueError(f"loss_reduction must be 'mean', 'sum' or None, got {loss_reduction!r}.")
    if ledger is not None and not isinstance(ledger, Ledger):
        raise TypeError(
            f"ledger must be a dpoptim.Ledger, got {type(ledger).__name__}; write "
            "dpoptim.Ledger(path)."
        )
    if plan.noise_multiplier == 0 and ledger is not None:
        raise ValueError(
            "ledger was given, but the plan has no noise: nothing finite can be charged."
        )
    refuse_model(model)
    refuse_optimizers(optimizers)
    if not isinstance(plan.query, SelectedRows):
        refuse_sparse_steps(optimizers)
    refuse_data(train_set)


def refuse_model(model: nn.Module) -> None:
    """Wrappers that would send gradients around the gate, and models that are attached already."""
    given: object = model  # what a caller without a type checker may have passed
    if not isinstance(given, nn.Module):
        swapped = isinstance(given, torch.optim.Optimizer)
        fix = " Fix: attach(plan, model, optimizer, train_set), the model first." if swapped else ""
        raise TypeError(f"model must be a torch.nn.Module, got {type(given).__name__}.{fix}")
    if isinstance(model, nn.DataParallel):
        raise PrivacyError(
            "model is wrapped in DataParallel, whose copies of the model no hook reaches. Fix: "
            "attach the bare module (model.module), and start one process for each device: see "
            "docs/guides/many-processes.md."
        )
    refuse_opacus_model(model)
    refuse_lazy(model)
    refuse_nothing_to_train(model)
    refuse_complex(model)
    for name, module in model.named_modules():
        refuse_wrapped(module, name or type(module).__name__, serve_containers=True)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            refuse_options(module, name or type(module).__name__)


def refuse_lazy(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if is_lazy(p):
            raise PrivacyError(
                f"parameter {name!r} has no shape yet (a lazy module). Fix: run model(x) once on "
                "made-up records of the right shape, before the optimizer is made and before "
                "dpoptim.attach."
            )


def refuse_complex(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        if p.requires_grad and p.is_complex():
            raise PrivacyError(
                f"parameter {name!r} is complex: norms and noise are for real numbers. Fix: keep "
                "nn.Parameter(torch.view_as_real(values)), and take torch.view_as_complex of it "
                "in the forward pass."
            )


def refuse_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    if not optimizers:
        raise TypeError("optimizer must be a torch.optim.Optimizer, or a list; got none.")
    refuse_opacus_optimizers(optimizers)
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                "optimizer must be a torch.optim.Optimizer, or a list of several, got "
                f"{type(optimizer).__module__}.{type(optimizer).__qualname__}. Fix: one "
                "of torch.optim, or what wraps one, such as fastai's opt_func=partial("
                "OptimWrapper, opt=torch.optim.AdamW)."
            )
        if any(kind.__name__ == "PostLocalSGDOptimizer" for kind in type(optimizer).__mro__):
            raise PrivacyError(
                "PostLocalSGDOptimizer averages models that processes have moved apart, each by "
                "gradients of its own; here all take the same noisy step. Fix: give attach the "
                "optimizer inside, optimizer.optim, and step that."
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise PrivacyError(
                "LBFGS evaluates its closure several times a step, and every evaluation would need "
                "noise of its own. Fix: use a first-order optimizer such as SGD or Adam."
            )


def refuse_sparse_steps(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse what takes sparse gradients alone, where noise makes all of them dense."""
    if any(isinstance(optimizer, torch.optim.SparseAdam) for optimizer in optimizers):
        raise PrivacyError(
            "SparseAdam takes sparse gradients, and the plan's method adds noise to every row of a "
            "table. Fix: torch.optim.Adam; or dpoptim.SparseSGD, which selects rows in private."
        )


def refuse_data(train_set: Dataset[Any]) -> None:
    """Data that the plan's sampler cannot draw from."""
    if isinstance(train_set, DataLoader):
        raise TypeError(
            "train_set must be the data set itself, got a DataLoader: batches are drawn by the "
            "plan's sampler. Fix: pass loader.dataset, and iterate over private.batches()."
        )
    given: object = train_set
    if type(given) is tuple and all(isinstance(t, Tensor | np.ndarray) for t in given):
        raise TypeError(
            "train_set is a tuple of tensors, each of which would be one record. Fix: "
            "torch.utils.data.TensorDataset(*tensors)."
        )
    # of pandas and others; a data set may hand on a table's attributes
    if hasattr(given, "iloc") and not isinstance(given, Dataset):
        raise TypeError(
            f"train_set is a {type(given).__name__}, of which an index names a column or a label, "
            "and no place. Fix: torch.utils.data.TensorDataset(torch.tensor(table[features]."
            'to_numpy(dtype="float32")), torch.tensor(table[target].to_numpy())); of one column, '
            "table[name].tolist()."
        )
    if isinstance(given, Mapping) and 0 not in given:
        raise TypeError(
            f"train_set is a {type(given).__name__}, whose keys are no places of records. Fix: one "
            'of its data sets, such as train_set["train"]; of columns, a torch.utils.data.'
            "TensorDataset(*columns.values()), or a list with one dictionary for each record."
        )
    if not hasattr(train_set, "__len__") or not hasattr(train_set, "__getitem__"):
        raise TypeError(
            f"train_set must be a data set or a stream of records, got {type(train_set).__name__}."
        )
    if len(train_set) == 0:
        raise ValueError("train_set is empty; there is nothing to train on.")
    if isinstance(given, list):
        refuse_missing(given)


def refuse_other_unit(plan: Plan, units: Units) -> None:
    """A plan that promises persons something, without a word of who they are."""
    if plan.unit != RECORD and (
        units.name != plan.unit.name or units.rows.per_record > plan.unit.most_rows
    ):
        raise ValueError(
            f"the plan protects {plan.unit.name}s with at most {plan.unit.most_rows} rows each. "
            f"Fix: attach(..., persons=..., rows_per_record={plan.unit.most_rows})."
        )


def refuse_places_of_persons(plan: Plan, units: Units, *, sharded: bool) -> None:
    """Refuse persons, who may be replaced, in batches that go by who comes before whom.

    A person stands where the first of their rows does. Whoever takes another's place in a table
    has rows of their own elsewhere, and everybody between would move to another batch.
    """
    moves = plan.neighboring == "replace-one" and plan.sampler.by_places(sharded=sharded)
    if units.persons is None or not moves:
        return
    if not of_this_library(kind := type(plan.sampler)) and "goes_by_places" not in vars(kind):
        raise ValueError(
            f"neighboring='replace-one' is not offered for persons in batches by {kind.__name__}, "
            "which does not say whether they go by places: who replaces a person has rows at other "
            "places. Fix: neighboring='zero-out'; or, where each unit joins by coins of its own "
            f"wherever it stands, {kind.__name__}.goes_by_places, which says False."
        )
    raise ValueError(
        "neighboring='replace-one' is not offered for persons in batches that go by their order "
        "(order='given', or sharded=True on fixed batches): who replaces a person has rows at "
        "other places, which would move others into other batches. Fix: neighboring='zero-out'; or "
        "a method that samples by coins, such as dpoptim.DPSGD; or order='shuffled', without "
        "sharded."
    )


def refuse_other_size(plan: Plan, count: int, name: str) -> None:
    """Refuse data of another size than planned, in all processes, where n is public.

    Args:
        count: records or persons; ``name`` says which.
    """
    if plan.neighboring != "add-or-remove-one" and count != plan.n:
        counts = f", and n counts {name}s" if name == "person" else ""
        raise ValueError(
            f"train_set has {count} {name}s but the plan was made for n={plan.n}{counts}; under "
            f"{plan.neighboring} they must agree. Fix: plan(n={count}, ...)."
        )


def refuse_engine(plan: Plan, engine: Engine, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse what only shows when it is known how the model's gradients are taken."""
    refuse_partial_passes(engine)
    refuse_blind_hooks(engine)
    refuse_foreign_parameters(engine, optimizers)
    refuse_devices(plan, engine)


def refuse_partial_passes(engine: Engine) -> None:
    """Refuse ranks with unequal numbers of passes, where they go through these together."""
    if engine.partial_backward and engine.totals.travels:
        raise PrivacyError(
            "partial_backward=True is not supported for models under fully_shard, whose processes "
            "go through every backward pass together. Fix: "
            "private.batches(physical_batch_size=...), and one backward pass on each."
        )


def refuse_blind_hooks(engine: Engine) -> None:
    """Refuse hooks that would find no gradient, and so do nothing of what they are there for."""
    if global_step_hooks:
        raise PrivacyError(
            "a hook is registered for all optimizers (register_optimizer_step_pre_hook): it runs "
            "before the noisy mean is written into .grad, and would find nothing. Fix: "
            "optimizer.register_step_pre_hook(hook)."
        )
    for name, p in zip(engine.names, engine.parameters, strict=True):
        if gradient_hooks(p):
            raise PrivacyError(
                f"parameter {name!r} has a hook on its gradient, which never exists: clipped sums "
                "go to the engine. Fix: optimizer.register_step_pre_hook(hook), which finds the "
                "noisy mean in .grad."
            )


def refuse_devices(plan: Plan, engine: Engine) -> None:
    """Ask a device before the charge whether it can draw noise, as much is drawn there.

    For sums in the parameters' dtype, and for those of several terms or few rows, in float64.
    """
    entries: Counter[torch.device] = Counter()
    for p in engine.parameters:
        entries[p.device] += p.numel()
    for device, dtype in {(p.device, p.dtype): None for p in engine.parameters}:
        large = device.type != "cpu" and entries[device] >= LEAST_ON_DEVICE
        if plan.noise_multiplier > 0 and large:
            draws_on(device, dtype)
            draws_on(device, torch.float64)


def parameters_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[nn.Parameter]:
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return [p for group in groups for p in group["params"]]


def refuse_foreign_parameters(engine: Engine, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse optimizers that do not hold exactly the trainable parameters: others would leak."""
    held = parameters_of(optimizers)
    if len(held) == len(engine.parameters) and {*map(id, held)} == {*map(id, engine.parameters)}:
        return
    times = Counter(map(id, held))
    named = list(zip(engine.names, engine.parameters, strict=True))
    if missing := [name for name, p in named if not times[id(p)]]:
        raise PrivacyError(
            f"parameter {missing[0]!r} (and {len(missing) - 1} more) requires a gradient but is "
            "not in the optimizer. Fix: add it to the optimizer, give attach a list of the "
            "optimizers that hold all trainable parameters, or freeze it with "
            "requires_grad_(False)."
        )
    if twice := [name for name, p in named if times[id(p)] > 1]:
        raise PrivacyError(
            f"parameter {twice[0]!r} is in two optimizers, of which only the first to step would "
            "find its gradient. Fix: put each parameter in one."
        )
    known = {id(p) for p in engine.parameters}
    if any(p.requires_grad for p in held if id(p) not in known):
        raise PrivacyError(
            "the optimizer holds trainable parameters that are not the model's: they would be "
            "trained without privacy. Fix: give it model.parameters() only; a loss with weights of "
            "its own trains where one module holds both and is attached, "
            "torch.nn.ModuleList([model, criterion])."
        )


def refuse_changed_parameters(engine: Engine, *, everything: bool = False) -> None:
    """Refuse parameters and buffers that are not those attached, or moved untrained."""
    if engine.state is None:  # not attached: what trains is about to be hooked
        refuse_frozen_or_unfrozen(Contents.of(engine.model), engine.places)
    engine.refuse_changes(everything=everything)


def refuse_bare_losses(engine: Engine) -> None:
    """Refuse what a loop differentiated by itself of a loss for which that does not do."""
    if not engine.takes_bare and any(how == "bare" for how, _ in engine.handed_over):
        raise PrivacyError(
            "loss.backward() was called on a mean by class weights (or over labels that are not "
            "ignored), in which how much a record weighs depends on the others. Fix: "
            'private.backward(loss), which undoes what it was divided by; or reduction="none", '
            "and one loss for each record."
        )
