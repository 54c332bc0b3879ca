"""Models that cannot be put under hooks, or whose records meet in their layers by definition."""

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from dpoptim.errors import PrivacyError
from dpoptim.gradients.forwards import OwnForward
from dpoptim.gradients.layers.registry import rule_for
from dpoptim.torch_internals import pre_forward_hooks

Coupling = nn.modules.batchnorm._BatchNorm | nn.modules.instancenorm._InstanceNorm


def refuse_wrapped(module: nn.Module, label: str, *, serve_containers: bool = False) -> None:
    """Refuse forward passes that are not the class's, and weights that hooks compute.

    Args:
        serve_containers: let pass what only calls layers, such as a model that another library
            gave a forward pass around its class's: no rule stands for it, and it is run where
            models are tried.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise PrivacyError(
            f"{label!r} was compiled by torch.jit, whose layers no hook reaches. Fix: attach the "
            "model as it was before torch.jit.script or torch.jit.trace, and compile it after "
            "training."
        )
    own = vars(module).get("forward")
    if "_original_forward" in vars(module):
        raise PrivacyError(
            f"Accelerate has wrapped the forward pass of {label!r} in mixed precision, in which "
            "records that are mixed would look like rounding. Fix: "
            'Accelerator(mixed_precision="no"), and torch.autocast(device, torch.bfloat16) around '
            "model and loss in the loop."
        )
    if "_hf_hook" in vars(module):
        raise PrivacyError(
            f"Accelerate's device_map has put a hook around {label!r}, out of the hooks' sight. "
            "Fix: accelerate.hooks.remove_hook_from_submodules(model), and a forward pass that "
            "moves activations from part to part; or a model that fits on one device."
        )
    attached = isinstance(own, OwnForward)
    compiled = "_orig_mod" in module._modules  # torch.compile's: hooks are for what is inside
    container = not module._parameters and bool(module._modules) and rule_for(module) is None
    if attached or (
        own is not None
        and getattr(own, "__func__", None) is not type(module).forward
        and not (serve_containers and container and not compiled)
    ):
        raise PrivacyError(
            f"module {label!r} already has a forward pass of its own on the instance: it is "
            "attached elsewhere, compiled, or wrapped by another library. Fix: leave the other "
            "`with dpoptim.attach(...)` first, or attach the module inside the wrapper."
        )
    for hook in pre_forward_hooks(module):
        if isinstance(hook, WeightNorm | SpectralNorm):
            raise PrivacyError(
                f"module {label!r} computes its weight in a hook ({type(hook).__name__}), out of "
                "the hooks' sight. Fix: use torch.nn.utils.parametrizations.weight_norm or "
                "spectral_norm."
            )


def watch_batch_statistics(model: nn.Module) -> list[tuple[str, Coupling]]:
    """Layers that may mix records or keep running statistics; refuse those that would.

    Frozen ones in evaluation mode use constants only, and are watched to see that it stays so.
    """
    watched = []
    for name, module in model.named_modules():
        if not isinstance(module, Coupling):
            continue
        instance = isinstance(module, nn.modules.instancenorm._InstanceNorm)
        if instance and not module.track_running_stats:
            continue  # normalises each record by itself
        frozen = all(not p.requires_grad for p in module.parameters())
        if module.training or not module.track_running_stats or not frozen:
            raise batch_statistics(name, module)
        watched.append((name, module))
    return watched


def batch_statistics(name: str, layer: nn.Module) -> PrivacyError:
    return PrivacyError(
        f"layer {name!r} ({type(layer).__name__}) normalises records by their batch, or keeps "
        "running statistics of them, which no clipping bounds. Fix: "
        "dpoptim.replace_batchnorm(model), which puts nn.GroupNorm in its place; or freeze it and "
        "keep it in eval() mode."
    )
