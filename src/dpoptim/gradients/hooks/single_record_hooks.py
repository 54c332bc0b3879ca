"""Hooks for passes of single records: what autograd gives the parameters is the gradient."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from dpoptim.gradients.backward_pass import BackwardRecorder, LayerUse
from dpoptim.gradients.hooks.hook_manager import HookManager
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.layers.runner import holder
from dpoptim.gradients.per_sample.per_sample_grads import Dense


class SingleRecordHooks(HookManager):
    """Takes each parameter's gradient where autograd has added it up; ``.grad`` stays None.

    The model's layers run as they are, and so may any function of it: there is no other record.
    """

    def _hook(self, module: nn.Module, name: str) -> None:
        pass

    def _hook_parameter(self, name: str, place: int, p: nn.Parameter) -> Callable[[], None]:
        held = holder({"gradient": p})
        return p.register_post_accumulate_grad_hook(partial(self._take, name, place, held)).remove

    def _take(self, name: str, place: int, held: nn.Module, p: Tensor) -> None:
        gradient, p.grad = p.grad, None
        if gradient is None:  # frozen since its forward pass: autograd adds nothing up
            return
        row = gradient.detach().to_dense().reshape(1, -1)
        self.recorder.reached(place)
        self.recorder.enter(LayerUse(name, held, 1, lambda: {"gradient": Dense(row)}))


def hooks_for(model: nn.Module, recorder: BackwardRecorder, isolation: Isolation) -> HookManager:
    """The hooks that keep records apart in this way."""
    kind = SingleRecordHooks if isolation.alone else HookManager
    return kind(model, recorder, isolation)
