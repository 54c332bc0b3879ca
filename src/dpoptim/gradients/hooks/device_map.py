"""Forward passes under Accelerate's ``device_map``, which puts a hook around those of layers."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

PLACES = ("forward", "_old_forward")


def place_of_forward(module: nn.Module) -> str:
    """The attribute of an instance in which its own forward pass is, or would be.

    Accelerate's ``device_map`` puts another one around it, which moves what goes in to the layer's
    device: that stays around what takes its place.
    """
    return "_old_forward" if "_hf_hook" in vars(module) else "forward"


def has_own_forward(module: nn.Module) -> bool:
    """Whether an instance runs something else than its class's forward pass, which a rule is of."""
    own = vars(module).get(place_of_forward(module))
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """The forward pass of an instance, without what ``device_map`` puts around it."""
    forward: Callable[..., Any] = getattr(module, place_of_forward(module))
    return forward


def replace_forward(module: nn.Module, forward: object) -> Callable[[], None]:
    """Put another forward pass in an instance's place for it. Returns what takes it off again.

    From where it is by then: hooks that come or go meanwhile move it.
    """
    own, place = vars(module), place_of_forward(module)
    before = own.get(place)
    own[place] = forward

    def restore() -> None:
        now = next((each for each in PLACES if own.get(each) is forward), place)
        own.pop(now, None)
        if before is not None:
            own[now] = before
        elif now == "_old_forward":  # which a hook that came calls
            own[now] = type(module).forward.__get__(module)

    return restore


def forwards_in(own: Mapping[str, Any]) -> tuple[Any, ...]:
    """An instance's own forward passes, see `place_of_forward`, and its hook; None: it has none."""
    return own.get("forward"), own.get("_old_forward"), own.get("_hf_hook")


def moves_inputs_alone(hook: Any) -> bool:
    """Whether a hook of Accelerate's moves inputs and results between devices, and no more."""
    parts = getattr(hook, "hooks", [hook])
    return all(
        type(part).__name__ == "AlignDevicesHook" and not (part.offload or part.no_grad)
        for part in parts
    )
