"""Options of a Lightning Trainer that cannot be kept, refused before anything is charged."""

import functools
import warnings
from collections.abc import Callable, Collection
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
)
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from dpoptim.integrations.loaders import PlanLoader
from dpoptim.plan import Plan
from dpoptim.training.batches.repeated_records import have_records_in_common


def refuse_loaders(trainer: pl.Trainer, loader: PlanLoader, train_set: object) -> None:
    """Refuse batches that the plan did not draw, and scores on the training data."""
    if trainer.train_dataloader is not loader:
        raise ValueError(
            "the Trainer iterates over a loader of its own, whose batches the plan did not draw. "
            "Fix: trainer.fit(module, private.loader), where private is the PrivateCallback; or "
            "return private.loader from train_dataloader, the datamodule's or the module's."
        )
    given = trainer.val_dataloaders
    several = list(given.values()) if isinstance(given, dict) else given
    for one in several if isinstance(several, list | tuple) else [several]:
        if have_records_in_common(getattr(one, "dataset", None), train_set):
            raise ValueError(
                "val_dataloaders reads the training data, or some of it, and its scores would be "
                "logged without noise. Fix: public records; dpoptim.evaluation for private ones."
            )


def refuse_finders(trainer: pl.Trainer) -> None:
    """Refuse callbacks that train on the records before anything private is attached."""
    fixes = {
        LearningRateFinder: "choose a rate on public records",
        BatchSizeFinder: "dpoptim.physical_batch_size(...) finds what memory holds",
    }
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, fix in fixes.items():
            if isinstance(callback, kind):
                raise ValueError(
                    f"{kind.__name__} trains on the records without noise, before the plan does. "
                    f"Fix: leave it out (Tuner's methods, too); {fix}."
                )


def leave_out_scaler(trainer: pl.Trainer) -> Callable[[], None]:
    """Let ``precision="16-mixed"`` go without its GradScaler, see `other_libraries.NO_SCALER`.

    Returns what puts it back.
    """
    plugin = trainer.precision_plugin
    scaler = getattr(plugin, "scaler", None)
    if scaler is None:
        return lambda: None
    plugin.scaler = None  # type: ignore[attr-defined]
    return functools.partial(setattr, plugin, "scaler", scaler)


def refuse_options(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuse options and strategies that change noised gradients, or split the module."""
    if trainer.world_size > 1 and type(trainer.strategy) is not DDPStrategy:
        raise ValueError(
            f"{type(trainer.strategy).__name__} is not supported by PrivateCallback. Fix: "
            "strategy='ddp'; or dpoptim.attach in a loop under torchrun, as "
            "docs/guides/many-processes.md has it."
        )
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    scheduled = any(isinstance(one, GradientAccumulationScheduler) for one in callbacks)
    if trainer.accumulate_grad_batches != 1 or scheduled:
        named = "GradientAccumulationScheduler" if scheduled else "accumulate_grad_batches"
        raise ValueError(
            f"{named} would skip steps of the plan, each of which arrives whole. Fix: leave it "
            "out; PrivateCallback(physical_batch_size=...) cuts steps to fit memory."
        )
    own = is_overridden("configure_gradient_clipping", module)
    if trainer.gradient_clip_val or own:
        named = "configure_gradient_clipping" if own else "gradient_clip_val"
        raise ValueError(
            f"{named} would find no gradients. Fix: leave it out; the plan clips each record's."
        )


def refuse_unfreezing(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuse callbacks that freeze before `attach` what they unfreeze later: they end a paid run.

    One that finds all parameters trainable may freeze them for a time.
    """
    frozen = next((name for name, p in module.named_parameters() if not p.requires_grad), None)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if frozen is not None and isinstance(callback, BaseFinetuning):
            raise ValueError(
                f"{type(callback).__name__} would unfreeze what is frozen where the training "
                f"begins, as {frozen!r} is, and nobody has prepared for its gradients. Fix: leave "
                "the callback out, give configure_optimizers all parameters, in groups where rates "
                "differ, and freeze for a time: a callback whose on_train_batch_start calls "
                "module.backbone.requires_grad_(trainer.current_epoch >= 1). What is frozen in a "
                "step does not move in it."
            )


def refuse_monitors(trainer: pl.Trainer, logged: Collection[str] | None) -> None:
    """Refuse callbacks that wait for what nobody logs: they end a paid run, or keep no checkpoint.

    Args:
        logged: names that validation has shown and that may be shown in training; None: not known.
    """
    if logged is None:
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        name = getattr(callback, "monitor", None)
        if isinstance(callback, pl.callbacks.ModelCheckpoint) and name in ("epoch", "step"):
            continue  # which it counts itself, to keep the latest
        if name is not None and name not in logged:
            raise ValueError(
                f"{type(callback).__name__}(monitor={name!r}) waits for a figure that is never "
                "logged: figures of training batches are private. Fix: monitor a score on public "
                "records that validation_step logs, and give fit its val_dataloaders."
            )


def warn_of_fewer_steps(trainer: pl.Trainer, plan: Plan) -> None:
    """Say that the Trainer will end before the plan does, all of which is reserved."""
    epochs, steps = trainer.max_epochs, trainer.max_steps
    ends = [steps] if steps >= 0 else []
    if epochs is not None and epochs >= 0:
        ends.append(epochs * int(trainer.num_training_batches))
    last = min(ends, default=plan.steps)
    if last < plan.steps:
        warnings.warn(
            f"this Trainer ends after {last} of the plan's {plan.steps} steps, and the whole "
            "plan is reserved. Fix: a larger max_epochs or max_steps, or a shorter plan.",
            UserWarning,
            stacklevel=2,
        )
