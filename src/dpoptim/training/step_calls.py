"""Calls of ``optimizer.step``, handed to somebody who decides whether the optimizer runs."""

import weakref
from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch

Called = Callable[..., Any]  # given the optimizer, its own step, and what that would be given


class StepCalls:
    """Stands in an optimizer's ``step``, as PyTorch's schedulers do, until it is taken away.

    Hooks before a step cannot keep an optimizer from running.

    Args:
        called: a method, held weakly.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, called: Called) -> None:
        self._optimizer, self._own = optimizer, vars(optimizer).get("step")
        listens: weakref.WeakMethod[Called] = weakref.WeakMethod(called)
        before = optimizer.step
        self._on = on = [True]

        # with the marks that schedulers look for
        @wraps(getattr(before, "__func__", before))
        def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            decides = listens() if on else None
            if decides is None:
                return before(*args, **kwargs)
            return decides(optimizer, before, *args, **kwargs)

        self._step = MethodType(step, optimizer)
        vars(optimizer)["step"] = self._step

    def restore(self) -> None:
        """Give the optimizer its own back; what was put around it meanwhile calls that."""
        self._on.clear()
        held = vars(self._optimizer)
        if held.get("step") is self._step:
            del held["step"]
            if self._own is not None:
                held["step"] = self._own
