"""Hooks of value clipping on the layers of a feed-forward network."""

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from dpoptim.gradients.value_clipping.value_engine import ValueEngine


class EngineHook:
    """Tells the engine layers' inputs and the model's output; weakly, so that no copy has its sums.

    Args:
        place: of the linear layer; or the ``"start"`` or ``"end"`` of the model.
    """

    def __init__(self, engine: "ValueEngine | None", place: int | str) -> None:
        self._engine = None if engine is None else weakref.ref(engine)
        self._place = place

    def __call__(
        self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor | None = None
    ) -> Any:
        engine = None if self._engine is None else self._engine()
        if engine is None or not torch.is_grad_enabled():
            return None
        if isinstance(self._place, int) and output is not None:
            return engine.see_output_of(output)
        if isinstance(self._place, int):
            return (engine.see_input(self._place, args[0]),)
        if self._place == "start":
            return engine.see_start()
        assert output is not None
        return engine.see_output(output)

    def __deepcopy__(self, memo: dict[int, Any]) -> "EngineHook":
        return EngineHook(None, self._place)

    def __reduce__(self) -> tuple[type["EngineHook"], tuple[None, int | str]]:
        return EngineHook, (None, self._place)
