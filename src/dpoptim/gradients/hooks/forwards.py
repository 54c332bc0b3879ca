"""Forward passes that take the place of an instance's own while its model is attached."""

import copy
import types
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from dpoptim.errors import PrivacyError
from dpoptim.gradients.hooks.device_map import forward_of
from dpoptim.gradients.layers.vmapped import AS_THEY_ARE
from dpoptim.runtime.torch_internals import never_compiled


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
