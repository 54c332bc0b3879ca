"""Refusals and hints for other libraries, and for habits of plain training, in a private loop."""

import traceback
from collections.abc import Iterable
from types import TracebackType

import torch
from torch import nn

from dpoptim.errors import PrivacyError

# No record's loss is divided by how many there are, which is what makes gradients too small for
# float16.
NO_SCALER = (
    "a GradScaler's scale would change what is clipped. Fix: torch.amp.GradScaler(enabled=False), "
    "or none: losses that are handed over as a vector need no scale, in float16 neither, and "
    "bfloat16 never does."
)

# Notes on what other modules raise on the way through the `with` of a private training.
HINTS = {
    "torch.amp.grad_scaler": NO_SCALER,
    "torch.nn.utils.clip_grad": "between private.backward and optimizer.step there is no .grad to "
    "clip: clipped sums stay inside until noise is on them. Fix: leave it out, the plan clips each "
    "record's gradient; optimizer.register_step_pre_hook(...) for what is to happen to the noisy "
    "mean.",
}

HINTS |= dict.fromkeys(
    ("torch.jit._trace", "torch.jit._script", "torch.export", "torch.onnx"),
    "an attached model's layers form gradients in functions of their own, which torch.jit and "
    "torch.export do not read. Fix: export the model after the `with`, where it is as it was; or "
    "a copy of it meanwhile, copy.deepcopy(model).eval(); for torch.jit.script, a new model with "
    "its state_dict().",
)

NO_GRADIENT = (
    "between a batch and optimizer.step() an attached model's .grad is None: clipped sums stay "
    "inside until noise is on them. Fix: look at the noisy mean after optimizer.step(), before "
    "zero_grad(), where private.finished_step is true."
)

# And on what PyTorch says of layers that records pass one by one in a private loop.
IN_A_HOOK = (
    "a hook got None for a gradient: those of an attached model's parameters do not exist outside "
    "of optimizer.step(). Fix: leave p.register_hook(...) out; "
    "optimizer.register_step_pre_hook(hook) finds the noisy mean in .grad."
)
HINTS_BY_TEXT = {
    "@once_differentiable": "the loss differentiates the model's gradients again (a gradient "
    "penalty, autograd.grad(..., create_graph=True)); rules for layers cannot, vectorised models "
    'and records alone can. Fix: dpoptim.attach(..., isolation="vmap"), which attach chooses by '
    "itself where it is given the loss, loss=.",
    "override the setup_context": "torch.func ran the attached model, whose layers form each "
    "record's gradient in autograd's own backward pass. Fix: keep to private.backward(losses); "
    "inner gradient steps on parameters (MAML) have no rule.",
    **dict.fromkeys(
        (
            *(
                f"'NoneType' object has no attribute '{name}'"
                for name in ("norm", "data", "detach")
            ),
            "'Parameter' and 'NoneType'",  # p * p.grad, as AdaLoRA weighs its parameters
            "'float' and 'NoneType'",  # rate * p.grad, in a step by hand
        ),
        NO_GRADIENT,
    ),
    "stack expects a non-empty TensorList": "a norm of an attached model's gradients was to be "
    "taken before optimizer.step(), where .grad is None: clipped sums stay inside until noise is "
    "on them. A first step up the batch's own gradient (SAM) is not private. Fix: train with the "
    "optimizer that SAM wraps, given to dpoptim.attach by itself; the noisy mean can be looked at "
    "after its step(), before zero_grad(), where private.finished_step is true.",
    "grad can be implicitly created only for scalar outputs": "a vector of losses, one for each "
    "record, goes to private.backward(losses) as it is, and needs no .backward() of its own. What "
    "calls loss.backward() for you (Accelerate, Lightning) takes losses.sum().",
    "has no attribute 'virtual_step'": "the optimizer stays your own. Fix: for batch in "
    "private.batches(physical_batch_size=...), and private.backward(losses), optimizer.step() for "
    "each: it moves after the last microbatch of a step.",
    "not have been used in the graph": "gradients of an attached model's parameters do not exist "
    "outside of optimizer.step(), so nothing can be computed from them (inner steps, as in MAML; "
    "SAM, gradient norms, influence). Fix: for those by parameters use the noisy mean, "
    "optimizer.register_step_pre_hook(...); derivatives by inputs that are differentiated again "
    "(gradient penalties, physics-informed losses) may stay, where the model is vectorised, or "
    'dpoptim.attach(..., isolation="vmap"), or loss=, which finds that out.',
}

# Attributes of wrappers around optimizers: Accelerate's and Lightning's, fastai's, Lookahead's.
WRAPPED_AS = ("optimizer", "opt", "base_optimizer")


def is_of(thing: object, package: str) -> bool:
    """Whether the class of a thing, or one that it is derived from, is that package's."""
    return any(f"{kind.__module__}.".startswith(f"{package}.") for kind in type(thing).__mro__)


def refuse_opacus_model(model: nn.Module) -> None:
    """Refuse Opacus' wrapper around a model, and what it leaves on the parameters inside.

    Its layers (``DPLSTM``, ``SequenceBias``) are modules as any other.
    """
    if is_of(model, "opacus.grad_sample"):
        raise PrivacyError(
            f"model is wrapped in Opacus' {type(model).__name__}, which keeps every record's "
            "gradient. Fix: attach the bare model, model.to_standard_module(); dpoptim.attach "
            "needs no wrapper."
        )
    for name, p in model.named_parameters():
        if hasattr(p, "grad_sample"):
            raise PrivacyError(
                f"parameter {name!r} has Opacus' grad_sample: its GradSampleModule is still around "
                "the model. Fix: wrapper.to_standard_module() before dpoptim.attach."
            )


def refuse_opacus_optimizers(optimizers: Iterable[object]) -> None:
    """Refuse Opacus' optimizers, which would add noise of their own."""
    for optimizer in optimizers:
        if is_of(optimizer, "opacus.optimizers"):
            raise PrivacyError(
                f"optimizer is Opacus' {type(optimizer).__name__}, which clips and adds noise "
                "itself. Fix: give dpoptim.attach your own, optimizer.original_optimizer."
            )


def refuse_nothing_to_train(model: nn.Module) -> None:
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            "model has no parameter that requires a gradient: all are frozen, or there is none. "
            "Fix: requires_grad_(True) on what is to train, before the optimizer is made and "
            "dpoptim.attach is called."
        )


def hint_of(error: BaseException, trace: TracebackType | None) -> str | None:
    """Meaning of another library's error here, where that is known; it quotes nothing."""
    hint = next((hint for text, hint in HINTS_BY_TEXT.items() if text in str(error)), None)
    if hint is None and "NoneType" in str(error):
        if ".grad" in failing_line(trace):
            return NO_GRADIENT
        if in_backward_hook(trace):
            return IN_A_HOOK
    while trace is not None and hint is None:
        hint = HINTS.get(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    return hint


def in_backward_hook(trace: TracebackType | None) -> bool:
    """Whether an error was raised by what autograd has called, and not by autograd."""
    names = []
    while trace is not None:
        names.append(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    return "torch.autograd.graph" in names[:-1]


def failing_line(trace: TracebackType | None) -> str:
    """The line of source in which an error was raised; "" where it cannot be read."""
    last = traceback.extract_tb(trace)[-1:]
    return (last[0].line or "") if last else ""


def explain(error: BaseException, trace: TracebackType | None) -> None:
    """Add `hint_of` an error to it."""
    if isinstance(error, PrivacyError):
        return
    hint = hint_of(error, trace)
    if hint is not None:
        error.add_note(f"dpoptim: {hint}")


def refuse_accumulation(optimizer: object) -> None:
    """Refuse Accelerate's optimizer where it would not step for whole steps of the plan."""
    state = getattr(optimizer, "gradient_state", None)
    every = getattr(state, "num_steps", 1)
    if every != 1:
        raise PrivacyError(
            f"Accelerator(gradient_accumulation_steps={every}) would leave out whole steps of the "
            "plan. Fix: gradient_accumulation_steps=1; private.batches(physical_batch_size=...) "
            "lets the optimizer wait for a step's last microbatch."
        )


def switch_scaler_off(optimizer: object) -> None:
    """Let Accelerate's optimizer step without a GradScaler, see `NO_SCALER`."""
    if is_of(optimizer, "accelerate"):
        vars(optimizer)["scaler"] = None


def say_skipped(optimizers: Iterable[object], skipped: bool) -> None:
    """Let Accelerate's optimizers say whether their last ``step()`` did nothing.

    Schedulers that Accelerate has prepared then wait for a step's last microbatch, too.
    """
    for optimizer in optimizers:
        if is_of(optimizer, "accelerate") and hasattr(optimizer, "_is_overflow"):
            vars(optimizer)["_is_overflow"] = skipped


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that hooks run on, inside what Accelerate, Lightning or fastai wrap it in."""
    found = (getattr(optimizer, name, None) for name in WRAPPED_AS)
    inner = next((each for each in found if isinstance(each, torch.optim.Optimizer)), None)
    return optimizer if inner is None else innermost(inner)


def uncompiled(model: nn.Module) -> nn.Module:
    """The model inside ``torch.compile(model)``, which hooks are for; called, both run them."""
    inner = getattr(model, "_orig_mod", None) if isinstance(model, nn.Module) else None
    return model if inner is None else inner
