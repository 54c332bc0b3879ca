"""Forward passes of instances: where they are, and what takes their place while attached.

Accelerate's ``device_map`` puts a hook around those of layers.
"""

import copy
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from dpoptim.errors import PrivacyError
from dpoptim.runtime.torch_internals import never_compiled

# Whether layers inside a module that is vectorised run without hooks.
AS_THEY_ARE = ContextVar("layers run as they are", default=False)
PLACES = ("forward", "_old_forward")


@contextmanager
def as_they_are() -> Iterator[None]:
    """Run modules without their hooks."""
    before = AS_THEY_ARE.set(True)
    try:
        yield
    finally:
        AS_THEY_ARE.reset(before)


class OwnForward:
    """A forward pass of an instance's own; a deep copy of the module gets its class's back."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module, self._forward = module, forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return types.MethodType(type(self._module).forward, memo[id(self._module)])


class WithGradients(OwnForward):
    """A forward pass that differs from the instance's own while gradients are enabled.

    **Guarantee.** With gradients no compiler sees any of it. Without, there is nothing to record,
    and the instance's own may be compiled in one graph with what lies around it; compilers look at
    whether gradients are enabled at each call.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__(module, forward)
        self._original = forward_of(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        original: object = self._original
        if isinstance(original, OwnForward):  # a layer's that computes its weights
            return copy.deepcopy(original, memo)
        return super().__deepcopy__(memo)

    @partial(never_compiled, alone=True)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self._with_gradients if torch.is_grad_enabled() else self._original
        return run(*args, **kwargs)

    @never_compiled
    def _with_gradients(self, *args: Any, **kwargs: Any) -> Any:
        run = self._original if AS_THEY_ARE.get() else self._forward
        return run(*args, **kwargs)


class PerSampleForward(WithGradients):
    """The forward pass of an instance while it is under hooks.

    Args:
        see: told what it is given, and returns.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        see: Callable[[Any, Any], None],
    ) -> None:
        super().__init__(module, forward)
        self._see = see

    @never_compiled
    def _with_gradients(self, *args: Any, **kwargs: Any) -> Any:
        if AS_THEY_ARE.get():
            return self._original(*args, **kwargs)
        output = self._forward(*args, **kwargs)
        self._see((args, kwargs), output)
        return output

    def __reduce__(self) -> NoReturn:
        raise PrivacyError(
            "an attached model cannot be pickled. Fix: save model.state_dict(), or leave the "
            "`with` first."
        )


class StillForward(OwnForward):
    """The forward pass of a module that writes buffers in training: it runs as in evaluation."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        training, self._module.training = self._module.training, False
        try:
            return self._forward(*args, **kwargs)
        finally:
            self._module.training = training

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "forward")


class FrozenForward(WithGradients):
    """That of an instance without hooks: it may be saved."""

    def __reduce__(self) -> tuple[Any, ...]:
        # of the module that is read back, which has none of its own yet
        return getattr, (self._module, "forward")


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
