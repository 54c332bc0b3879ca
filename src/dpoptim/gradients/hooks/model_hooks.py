"""Hooks on modules, which hold what they tell weakly, so that no copy of a model has an engine."""

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpoptim.gradients.backward_pass import BackwardRecorder, narrow_dtype
from dpoptim.gradients.hooks.refusals import batch_statistics
from dpoptim.gradients.layers.normalisation import Normalisation, sees_batch
from dpoptim.gradients.layers.vmapped import AS_THEY_ARE
from dpoptim.runtime.torch_internals import never_compiled


class Sees(Protocol):
    """Told what a model is given, and returns."""

    def see_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...

    def see_output(self, output: Any) -> None: ...


class InputHook:
    """Tells what the model is given."""

    def __init__(self, hooks: Sees | None) -> None:
        self._hooks = None if hooks is None else weakref.ref(hooks)

    @never_compiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hooks = None if self._hooks is None else self._hooks()
        if hooks is not None:
            hooks.see_input(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "InputHook":
        return InputHook(None)

    def __reduce__(self) -> tuple[type["InputHook"], tuple[None]]:
        return InputHook, (None,)


class OutputHook(InputHook):
    """Tells what the model returns, when its forward pass is over."""

    @never_compiled
    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        hooks = None if self._hooks is None else self._hooks()
        if hooks is not None:
            hooks.see_output(output)

    def __deepcopy__(self, memo: dict[int, Any]) -> "OutputHook":
        return OutputHook(None)

    def __reduce__(self) -> tuple[type["OutputHook"], tuple[None]]:
        return OutputHook, (None,)


class FrozenHook:
    """Notes torch.autocast around a frozen module."""

    def __init__(self, recorder: BackwardRecorder | None, label: str) -> None:
        self._recorder = None if recorder is None else weakref.ref(recorder)
        self._label = label

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder = None if self._recorder is None else self._recorder()
        if recorder is None or not torch.is_grad_enabled() or AS_THEY_ARE.get():
            return
        for value in (*args, *kwargs.values()):
            # nothing else has gradients that come through here
            if isinstance(value, Tensor) and value.requires_grad:
                narrow_dtype(recorder, self._label, value.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FrozenHook":
        return FrozenHook(None, self._label)

    def __reduce__(self) -> tuple[type["FrozenHook"], tuple[None, str]]:
        return FrozenHook, (None, self._label)


class ModeHook:
    """Refuses each forward pass of a layer that would mix records in its mode as it is then.

    **Guarantee.** While a model is attached, no batch normalisation of it that was called as a
    module, by the model or by the loop, has run where it would see the batch, whatever was switched
    after attaching. (Called by its ``forward``, one with trained weights goes by the statistics it
    holds, and one that writes statistics is found by its buffers.)
    """

    def __init__(self, label: str | None) -> None:
        self._label = label

    def __call__(self, module: Normalisation, args: tuple[Any, ...]) -> None:
        if self._label is not None and sees_batch(module):
            raise batch_statistics(self._label, module)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModeHook":
        return ModeHook(None)

    def __reduce__(self) -> tuple[type["ModeHook"], tuple[None]]:
        return ModeHook, (None,)
