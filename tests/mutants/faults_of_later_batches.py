"""Seeded bugs that show after a run's first batch: what is asked of every batch, and within steps,
is asked of the first alone.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import torch
from torch import nn

from dpoptim.training import optimizer_hooks
from dpoptim.training.losses import handed_over
from dpoptim.training.optimizer_hooks import OptimizerHooks
from dpoptim.training.released_gradients import ReleasedGradients, parameters_of
from dpoptim.training.trials import first_passes, isolation
from dpoptim.training.trials.deterministic_runs import Quieted

Fault = AbstractContextManager[Any]


def first_losses_asked_alone() -> Fault:
    """What losses depend on is looked at in a run's first batch."""
    honest, asked = handed_over.refuse_other_parameters, WeakSet[nn.Module]()

    def refuse(losses: Any, model: nn.Module, placement: Any) -> None:
        if model not in asked:
            asked.add(model)
            honest(losses, model, placement)

    return patch.object(handed_over, "refuse_other_parameters", refuse)


def memories_unseen() -> Fault:
    """Nobody runs a record again after another one."""
    return patch.object(isolation, "refuse_memory", lambda model, sample: None)


def memories_of_evaluation_looked_for() -> Fault:
    """What a model keeps is looked for in evaluation mode."""
    honest, again = first_passes.quiet, first_passes.quiet_as_before

    def quiet(model: nn.Module, run: Any, *, as_trained: bool) -> Any:
        return honest(model, run)

    def quiet_as_before(model: nn.Module, before: Quieted, uniform: float) -> Any:
        return again(model, replace(before, evaluates=True), uniform)

    return patch.multiple(first_passes, quiet=quiet, quiet_as_before=quiet_as_before)


def parameters_of_groups_not_compared() -> Fault:
    """Settings are compared, and not whose they are."""
    honest = optimizer_hooks.settings_of

    def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, list[Any]]:
        return {name: each for name, each in honest(optimizer).items() if name != "params"}

    return patch.object(optimizer_hooks, "settings_of", settings_of)


def settings_of_microbatches() -> Fault:
    """Nobody compares what a step ends with to what it began with."""
    return patch.object(OptimizerHooks, "_refuse_other_settings", lambda hooks, optimizer: None)


def rates_compared_alone() -> Fault:
    """Schedules of other settings than the rate may count microbatches."""
    return patch.object(
        optimizer_hooks,
        "settings_of",
        lambda optimizer: {"lr": [group["lr"] for group in optimizer.param_groups]},
    )


def redone_from_what_lies_there() -> Fault:
    """An update that failed is done again from ``.grad``."""
    honest = ReleasedGradients.take

    def take(gradients: ReleasedGradients, optimizer: torch.optim.Optimizer) -> bool:
        lie = [(p, p.grad) for p in parameters_of(optimizer)]
        taken = honest(gradients, optimizer)
        for p, gradient in lie:
            p.grad = gradient
        return taken

    return patch.object(ReleasedGradients, "take", take)
