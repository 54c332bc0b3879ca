"""Options of a Trainer of Transformers: fitted to a plan, or refused before it is charged."""

import copy
import inspect
import math
import os
import re
import warnings
from typing import Any

import torch
import transformers
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from dpoptim.plan import Plan
from dpoptim.training.batches.epochs import EpochEnds

OFF = ("", "0", "end", "false", "no", "none", "off")  # "end": the finished model alone
SWITCH = re.compile(r'getenv\(\s*"(\w+_LOG_(?:MODEL|ARTIFACTS|ASSETS))"\s*,?\s*"?(\w*)')


def with_steps_of(plan: Plan, argument: Any) -> Any:
    """A trainer's argument; its options as a copy that knows the number of steps.

    A stream has no other way to tell. The user's own stay as they are, for another plan.
    """
    if not isinstance(argument, transformers.TrainingArguments):
        return argument
    own = copy.copy(argument)
    if own.max_steps <= 0:
        warn_of_other_epochs(plan, own.num_train_epochs)
        own.max_steps = plan.steps
    return own


def warn_of_other_epochs(plan: Plan, epochs: float) -> None:
    """Warn of a number of epochs that was chosen and is not the plan's, which counts."""
    passes = plan.epochs
    chosen = epochs != transformers.TrainingArguments.num_train_epochs
    if chosen and abs(epochs - passes) > plan.batch_size / plan.n + 0.01 * passes:
        warnings.warn(
            f"args.num_train_epochs={epochs:g} is not followed: the plan's {plan.steps} steps "
            f"count, {passes:.3g} times through the records. Fix: plan(..., epochs={epochs:g}); or "
            "leave it out.",
            stacklevel=4,
        )


def uploads_checkpoints(args: transformers.TrainingArguments) -> str:
    """The setting by which whole checkpoint folders leave this machine; "" if there is none."""
    if args.push_to_hub and args.hub_strategy in ("checkpoint", "all_checkpoints"):
        return f"args.hub_strategy={str(getattr(args.hub_strategy, 'value', args.hub_strategy))!r}"
    for tracker in args.report_to or ():
        callback = INTEGRATION_TO_CALLBACK.get(tracker)
        why = "" if callback is None else takes_checkpoints(callback)
        if why:
            return f"args.report_to={tracker!r}{why}"
    return ""


def takes_checkpoints(callback: type[transformers.TrainerCallback]) -> str:
    """Say how a tracker comes to take checkpoint folders; "" if it does not.

    Read off its source, so that those of other versions are known, too: whether it reaches for
    ``args.output_dir`` when a checkpoint is saved or training ends, and which variable of the
    environment, or else which default, switches that on.
    """
    try:
        ends = inspect.getsource(callback.on_save) + inspect.getsource(callback.on_train_end)
        whole = "".join(
            inspect.getsource(base)
            for base in callback.__mro__
            if issubclass(base, transformers.TrainerCallback)
        )
    except (OSError, TypeError):
        return ", whose source cannot be read,"
    if "output_dir" not in ends:
        return ""
    switches = SWITCH.findall(whole)
    for name, default in switches:
        if os.environ.get(name, default).lower() not in OFF:
            return f", by the environment's {name},"
    given = inspect.signature(callback).parameters.values()
    if switches or any("checkpoint" in one.name and not one.default for one in given):
        return ""
    return ", which has no switch,"


def fit_to_plan(
    plan: Plan, args: transformers.TrainingArguments, own_loss: str, *, sealed: bool
) -> None:
    """Set the options that a plan decides, in place.

    Args:
        own_loss: the name of a loss for a whole batch that the user gave; "" if there is none.
        sealed: whether private checkpoints are, with a key.

    Raises:
        ValueError: options that cannot be kept, named with the fix.
    """
    if args.auto_find_batch_size:
        raise ValueError(
            "args.auto_find_batch_size would start the run again, on another charge. Fix: "
            "per_device_train_batch_size=..., such as dpoptim.physical_batch_size(...) finds."
        )
    if getattr(args, "train_sampling_strategy", "random") != "random" or getattr(
        args, "group_by_length", False
    ):
        raise ValueError(
            "args.train_sampling_strategy (group_by_length) would choose who is in a batch, and "
            "the plan's method does. Fix: leave it out."
        )
    if args.neftune_noise_alpha is not None:
        raise ValueError(
            "args.neftune_noise_alpha scales its noise by the length of the longest record of a "
            "batch. Fix: leave it out."
        )
    if args.n_gpu > 1:
        raise ValueError(
            "one process would spread batches over several GPUs. Fix: start it with torchrun."
        )
    if own_loss:
        raise ValueError(
            f"{own_loss} would not be used in training: it returns one loss for a whole batch. "
            "Fix: losses=fn(model, inputs), or per_sample_losses, with one loss a record."
        )
    if not sealed and (upload := uploads_checkpoints(args)):
        raise ValueError(
            f"{upload} would upload checkpoint folders, and private.checkpoint in them is a "
            "secret. Fix: switch that off; or PrivateTrainer(checkpoint_key=...), 32 secret bytes "
            "kept elsewhere, which seal that file."
        )
    microbatches = math.ceil(plan.batch_size / args.per_device_train_batch_size)
    if args.gradient_accumulation_steps not in (1, microbatches):
        raise ValueError(
            f"args.gradient_accumulation_steps={args.gradient_accumulation_steps} is not what "
            f"the plan's batches of {plan.batch_size} make of "
            f"per_device_train_batch_size={args.per_device_train_batch_size}. Fix: leave it at "
            "1: a step takes as many microbatches as it needs."
        )
    if args.max_steps > plan.steps:
        raise ValueError(
            f"args.max_steps={args.max_steps} is more than the plan's {plan.steps} steps."
        )
    args.gradient_accumulation_steps = 1
    args.max_steps = plan.steps if args.max_steps <= 0 else args.max_steps
    args.num_train_epochs = float(len(EpochEnds.of(plan).ends))
    # gradients are clipped record by record; what is released needs no clipping
    args.max_grad_norm = 0.0
    args.ignore_data_skip = True  # who takes part in coming steps is in the private checkpoint
    args.include_num_input_tokens_seen = "no"  # how many there were is private


def fit_accelerator(accelerator: Any, fixed_shape: bool | None) -> None:
    """Let ``args.torch_compile`` make graphs for all sizes of batches at once, unless one is fixed.

    A sampled batch has another size in each step: without this, each graph is compiled for the
    first batch's, and again for all sizes. And switch the GradScaler of ``args.fp16`` off, see
    `other_libraries.NO_SCALER`.
    """
    if accelerator.scaler is not None:
        accelerator.scaler = torch.amp.GradScaler(accelerator.device.type, enabled=False)
    plugin = getattr(accelerator.state, "dynamo_plugin", None)
    if not fixed_shape and plugin is not None and plugin.dynamic is None:
        plugin.dynamic = True
