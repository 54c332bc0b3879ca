"""Hooks of value clipping on the layers of a feed-forward network."""

from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.gradients.hooks.model_hooks import WeakHook


class EngineHook(WeakHook[Any]):
    """Tells the engine layers' inputs and the model's output.

    Of the linear layer at a place, or of the ``"start"`` or ``"end"`` of the model.
    """

    def __call__(
        self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor | None = None
    ) -> Any:
        engine, (place,) = self.told, self._about
        if engine is None or not torch.is_grad_enabled():
            return None
        if isinstance(place, int) and output is not None:
            return engine.see_output_of(output)
        if isinstance(place, int):
            return (engine.see_input(place, args[0]),)
        if place == "start":
            return engine.see_start()
        assert output is not None
        return engine.see_output(output)
