"""Models that cannot be put under hooks, or whose records meet in their layers by definition."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dpoptim.errors import PrivacyError
from dpoptim.gradients.hooks.computed_weights import computed_weights
from dpoptim.gradients.hooks.forwards import (
    OwnForward,
    has_own_forward,
    moves_inputs_alone,
    place_of_forward,
)
from dpoptim.gradients.layers.normalisation import Normalisation, sees_batch
from dpoptim.gradients.layers.registry import rule_for


def refuse_wrapped(module: nn.Module, label: str, *, serve_containers: bool = False) -> None:
    """Refuse forward passes that are not the class's.

    Args:
        serve_containers: let pass what `runs_as_it_is`.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise PrivacyError(
            f"{label!r} was compiled by torch.jit, whose layers no hook reaches. Fix: attach the "
            "model as it was before torch.jit.script or torch.jit.trace, and compile it after "
            "training."
        )
    hook = vars(module).get("_hf_hook")
    if hook is not None and not moves_inputs_alone(hook):
        raise PrivacyError(
            f"Accelerate has put a hook around {label!r} that does more than to move inputs to its "
            "device, such as to fetch parameters from the disk or the CPU. Fix: a device_map that "
            "keeps all parts on devices; accelerate.hooks.remove_hook_from_submodules(model) takes "
            "hooks off."
        )
    own = has_own_forward(module) and computed_weights(module) is None
    if own and not (serve_containers and runs_as_it_is(module)):
        if "_orig_mod" in module._modules:
            raise PrivacyError(
                f"module {label!r} is a compiled one inside of the model, whose own layers no hook "
                "would reach. Fix: compile it in place, m[0].compile() instead of m[0] = "
                "torch.compile(m[0]); or compile the whole model, torch.compile(model)."
            )
        raise PrivacyError(
            f"module {label!r} already has a forward pass of its own on the instance: it is "
            "attached elsewhere, compiled, or wrapped by another library. Fix: leave the other "
            "`with dpoptim.attach(...)` first, or, attached without `with` (a notebook's cell that "
            "ran before), call private.detach() of the other training; or attach the module "
            "inside the wrapper."
        )


def runs_as_it_is(module: nn.Module) -> bool:
    """Whether a module may have a forward pass of its own: it is run then where models are tried.

    So it is with what has no parameters of its own, for which no rule stands: a model that another
    library gave a forward pass around its class's, a function in the place of an activation, the
    guards of an exported program; and with Accelerate's mixed precision, which leaves the class's
    forward pass to what takes its place here.
    """
    attached = isinstance(vars(module).get(place_of_forward(module)), OwnForward)
    compiled = "_orig_mod" in module._modules  # torch.compile's: hooks are for what is inside
    bare = not module._parameters and rule_for(module) is None
    mixed_precision = "_original_forward" in vars(module)
    return not attached and not compiled and (bare or mixed_precision)


def watch_batch_statistics(model: nn.Module) -> list[tuple[str, Normalisation]]:
    """Layers whose mode decides whether records meet in them; refuse those in which they would.

    Those that normalise by statistics they hold are watched to see that it stays so.
    """
    watched = []
    for name, module in model.named_modules():
        if isinstance(module, Normalisation):
            if sees_batch(module):
                raise batch_statistics(name, module)
            watched.append((name, module))
    return watched


def mixed_by_outliers(model: nn.Module) -> str:
    """Say which layer of bitsandbytes (8 bits) mixes records, and how not to; "" if none does.

    In a column in which any record has an entry beyond the threshold, all records' are multiplied
    in 16 bits, and in 8 elsewhere. Made-up records have no such outliers, so no trial shows it.
    """
    for name, module in model.named_modules():
        threshold = getattr(getattr(module, "state", None), "threshold", 0.0)
        if type(module).__name__ == "Linear8bitLt" and threshold > 0:
            return (
                f"layer {name!r} (Linear8bitLt) rounds each record's columns by whether any other "
                "has an outlier there. Fix, for a faster way: "
                "BitsAndBytesConfig(llm_int8_threshold=0.0), or 4 bits"
            )
    return ""


def refuse_nested(leaves: Iterable[object]) -> None:
    """Refuse nested tensors, in which layers find no axis of records."""
    if any(isinstance(leaf, Tensor) and leaf.is_nested for leaf in leaves):
        raise PrivacyError(
            "the model is given a nested tensor, of which no layer knows single records' gradients."
            " Fix: pad it, torch.nested.to_padded_tensor(x, 0.0), and mask the padding; or hand "
            "over a list of the records' tensors."
        )


def batch_statistics(name: str, layer: nn.Module) -> PrivacyError:
    return PrivacyError(
        f"layer {name!r} ({type(layer).__name__}) normalises records by their batch, or keeps "
        "running statistics of them, which no clipping bounds. Fix: "
        "dpoptim.replace_batchnorm(model), which puts nn.GroupNorm in its place; or, to go by the "
        "running statistics that it has, eval() for this layer after every model.train() (its "
        "weight and bias may train)."
    )
