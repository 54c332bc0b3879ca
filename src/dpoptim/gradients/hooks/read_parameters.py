"""Parameters of a hooked model that a loss reads, with a row for each record."""

import torch
from torch import Tensor, nn

from dpoptim.errors import PrivacyError
from dpoptim.gradients.hooks.hook_manager import HookManager
from dpoptim.gradients.hooks.model_hooks import InputHook
from dpoptim.gradients.layers.expanded import ExpandParameter, Owner, Parameter
from dpoptim.runtime.torch_internals import pre_forward_hooks


def rows_of_parameter(model: nn.Module, p: nn.Parameter, rows: int) -> Tensor:
    """A parameter once for each record, shape (rows, *p.shape).

    Each record's gradient is its own then, and clipped with the rest of it; of a model without
    hooks, autograd adds them up.

    Raises:
        PrivacyError: the parameter is not the model's.
    """
    if not p.requires_grad or not torch.is_grad_enabled():
        return p.expand(rows, *p.shape)
    place = next(
        (
            (name, m)
            for name, m in model.named_modules()
            if any(p is q for q in m._parameters.values())
        ),
        None,
    )
    if place is None:
        raise PrivacyError("the loss reads a parameter that is not of the model it is given.")
    hooks = hooks_of(model)
    if hooks is None:
        return p.expand(rows, *p.shape)
    name, module = place
    owner = Owner(hooks.recorder, name or type(module).__name__, module)
    shape = torch.Size((rows, *p.shape))
    expanded: Tensor = ExpandParameter.apply(owner, Parameter(id(p)), (p,), p, rows, shape, p)
    return expanded


def hooks_of(model: nn.Module) -> HookManager | None:
    """The hooks of a model, or of the one in a wrapper; None: there are none on batches."""
    told = (
        hook.told
        for module in model.modules()
        for hook in pre_forward_hooks(module).values()
        if isinstance(hook, InputHook)
    )
    found = next((hooks for hooks in told if isinstance(hooks, HookManager)), None)
    return None if found is None or found.isolation.alone else found
