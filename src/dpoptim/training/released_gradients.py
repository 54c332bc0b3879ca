"""From the gate to the optimizers: each finds its share of a release in ``.grad``, as it was written, and uses it once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dpoptim.errors import PrivacyError
from dpoptim.gradients.engine import Engine
from dpoptim.training.refusals import refuse_changed_parameters, refuse_foreign_parameters


class ReleasedGradients:
    """Watches what the optimizers find.

    Args:
        engine: whose parameters they move.
        optimizers: that share these out.

    **Guarantee.** No optimizer steps while a ``.grad`` is there that the gate did not write for it, or while the model or an
    optimizer holds other trainable parameters than when it was attached.
    """

    def __init__(self, engine: Engine, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._engine, self._optimizers = engine, tuple(optimizers)
        self._waiting: set[torch.optim.Optimizer] = set()  # that have not used their share of the last release
        self._released: dict[int, tuple[Tensor, int]] = {}  # their gradients and these's versions, by the parameter's id

    def others_wait(self, first: torch.optim.Optimizer) -> None:
        """``first`` made the gate release, and is about to step; the others may do so later."""
        self._waiting = {other for other in self._optimizers if other is not first}
        if self._waiting:
            gradients = [(id(p), p.grad) for p in self._engine.parameters]
            self._released = {key: (g, g._version) for key, g in gradients if g is not None}

    def take(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a share waits for this optimizer, which is about to step; it waits no longer."""
        if optimizer not in self._waiting:
            return False
        self.refuse_changes()
        self._waiting.remove(optimizer)
        return True

    def used(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped: the next step must not find its gradients, whether or not zero_grad() is called."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = None
                self._released.pop(id(p), None)

    def drop(self) -> None:
        """A new batch is coming: what some have not used of the last release stays unused."""
        if self._waiting:
            self._refuse_other_gradients()
            self._waiting, self._released = set(), {}
            for p in self._engine.parameters:
                p.grad = None

    def refuse_changes(self) -> None:
        """Refuse foreign gradients, and parameters or buffers that are not those that were attached."""
        self._refuse_other_gradients()
        refuse_changed_parameters(self._engine)
        refuse_foreign_parameters(self._engine, self._optimizers)

    def _refuse_other_gradients(self) -> None:
        for name, p in zip(self._engine.names, self._engine.parameters, strict=True):
            released, version = self._released.get(id(p), (None, None))
            if p.grad is not None and (p.grad is not released or p.grad._version != version):
                raise PrivacyError(
                    f"parameter {name!r} has a .grad that did not come through the gate. Fix: let only "
                    "private.backward(losses) make gradients, inside the loop, and do not write to .grad."
                )
