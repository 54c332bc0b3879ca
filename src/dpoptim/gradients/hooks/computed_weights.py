"""Weights that torch's older hooks compute before each forward pass, from parameters.

``torch.nn.utils.weight_norm`` and ``spectral_norm`` hang such hooks on a layer. While a model is
attached, weights are computed inside of the layer's forward pass, where what keeps records apart
sees them made.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from dpoptim.errors import PrivacyError
from dpoptim.gradients.hooks.forwards import OwnForward, forward_of, replace_forward
from dpoptim.runtime.torch_internals import (
    SpectralNormalised,
    never_compiled,
    pre_forward_hooks,
    pytree,
)

WeightHook = WeightNorm | SpectralNorm


def weight_hooks(module: nn.Module) -> dict[int, WeightHook]:
    """A module's hooks that compute weights, by their ids."""
    hooks = pre_forward_hooks(module)
    return {key: hook for key, hook in hooks.items() if isinstance(hook, WeightHook)}


def follows_weights(module: nn.Module) -> bool:
    """Whether a module's forward pass in training writes what follows weights into buffers."""
    hooks = weight_hooks(module).values()
    return isinstance(module, SpectralNormalised) or any(isinstance(h, SpectralNorm) for h in hooks)


class OutsideOfForward:
    """Stands for a computed weight while its layer's forward pass does not run.

    One of an earlier step would be taken for it unseen.
    """

    def __init__(self, name: str, weight: Tensor) -> None:
        self._name = name
        self.dtype, self.device, self.shape = weight.dtype, weight.device, weight.shape

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):  # which copies and the like ask for
            raise AttributeError(attribute)
        raise self._refusal()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = pytree.tree_leaves((args, kwargs))
        raise next(each for each in given if isinstance(each, cls))._refusal()

    def _refusal(self) -> PrivacyError:
        return PrivacyError(
            f"{self._name!r} was read outside of its layer's forward pass, within which a hook "
            "computes it. Fix: torch.nn.utils.parametrizations has weight_norm and spectral_norm "
            "for weights that are read anywhere."
        )


class ComputedWeights(OwnForward):
    """A forward pass that first computes weights, as the module's hooks would; see `put_on`."""

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        hooks: dict[int, WeightHook],
        outside: dict[str, OutsideOfForward],
    ) -> None:
        super().__init__(module, forward)
        self._hooks, self._outside = hooks, outside
        self._making: Callable[[], AbstractContextManager[None]] = nullcontext

    @classmethod
    def of(cls, module: nn.Module, label: str) -> "ComputedWeights | None":
        """That of a module whose hooks compute weights; None: it has no such hooks."""
        hooks = weight_hooks(module)
        outside = {
            hook.name: OutsideOfForward(f"{label}.{hook.name}", getattr(module, hook.name))
            for hook in hooks.values()
        }
        return cls(module, forward_of(module), hooks, outside) if hooks else None

    @never_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with self._making():
                self._compute()
            return self._forward(*args, **kwargs)
        finally:
            self._hide()  # what is computed for records may not stay

    @contextmanager
    def made_in(self, making: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Compute weights in this context meanwhile."""
        self._making = making
        try:
            yield
        finally:
            self._making = nullcontext

    def _hide(self) -> None:
        for name, outside in self._outside.items():
            setattr(self._module, name, outside)  # recurrent layers list their weights by it

    def _compute(self) -> None:
        for hook in self._hooks.values():
            still = {"do_power_iteration": False} if isinstance(hook, SpectralNorm) else {}
            setattr(self._module, hook.name, hook.compute_weight(self._module, **still))

    def put_on(self) -> Callable[[], None]:
        """Take the place of the hooks. Returns what puts them back where they were."""
        hooks = pre_forward_hooks(self._module)
        before = [*hooks.items()]
        for key in self._hooks:
            del hooks[key]
        restore = replace_forward(self._module, self)
        self._hide()

        def undo() -> None:
            restore()
            now = dict(hooks)
            hooks.clear()
            hooks.update({k: hook for k, hook in before if k in self._hooks or k in now} | now)
            with torch.no_grad():
                self._compute()

        return undo

    def iterate(self) -> None:
        """Let spectral norms follow the weights, as a forward pass in training would."""
        for hook in self._hooks.values():
            if isinstance(hook, SpectralNorm) and self._module.training:
                hook.compute_weight(self._module, do_power_iteration=True)

    def iterated(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers that `iterate` writes, by name."""
        for hook in self._hooks.values():
            if isinstance(hook, SpectralNorm):
                for name in (f"{hook.name}_u", f"{hook.name}_v"):
                    yield name, self._module.get_buffer(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ComputedWeights":
        copy = memo[id(self._module)]
        return ComputedWeights(copy, type(copy).forward.__get__(copy), self._hooks, self._outside)


def computed_weights(module: nn.Module) -> ComputedWeights | None:
    """The forward pass that computes a module's weights while it is attached, if one does."""
    found = forward_of(module)
    return found if isinstance(found, ComputedWeights) else None
