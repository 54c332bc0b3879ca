"""From the gate to the optimizers: each uses its share of a release in ``.grad`` once."""

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dpoptim.errors import PrivacyError
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.watch.values import Values
from dpoptim.runtime.torch_internals import version_of
from dpoptim.training.refusals import (
    refuse_bare_losses,
    refuse_changed_parameters,
    refuse_foreign_parameters,
)


class ReleasedGradients:
    """Watches what the optimizers find.

    Args:
        engine: whose parameters they move.
        optimizers: that share these out.
        over: called when all have used their shares of a step, or will not.

    **Guarantee.** No optimizer steps while a ``.grad`` is there that the gate did not write for it,
    or while the model or an optimizer holds other trainable parameters than when it was attached.
    What was used stays in ``.grad`` until ``zero_grad()`` or the next batch, as in a plain loop: it
    is released. While a batch's sums are being taken, there is nothing in ``.grad``. An update that
    failed is done again from the tensors that the gate wrote; what was written into these in place
    meanwhile, as some optimizers do, is not seen.
    """

    def __init__(
        self,
        engine: Engine,
        optimizers: Sequence[torch.optim.Optimizer],
        over: Callable[[], None],
    ) -> None:
        self._engine, self._optimizers, self._over = engine, tuple(optimizers), over
        # that have not used their share of the last release
        self._waiting: set[torch.optim.Optimizer] = set()
        # gradients that were not used, by the parameter's id, and the values that these were given
        # where others wait for them: what one optimizer does to its own while it steps is its own
        self._released: dict[int, tuple[Tensor, Values | None]] = {}
        # those that were used, by the parameter's id: weakly, zero_grad() frees their memory
        self._used: dict[int, weakref.ref[Tensor]] = {}
        # what made the gate release, until it has used its share
        self._moving: Moving | None = None

    def begin(self, first: torch.optim.Optimizer, *, moves: bool = True) -> None:
        """``first`` made the gate release, and is about to step; the others may do so later.

        What is frozen finds no gradient: its noise would move it.

        Args:
            moves: whether there are gradients; a step may have been for the clip norm alone.
        """
        for p in self._engine.parameters:
            if not p.requires_grad:
                p.grad = None
        self._others_wait(first)
        self._moving = Moving(first) if moves else None

    def _others_wait(self, first: torch.optim.Optimizer) -> None:
        self._waiting = {other for other in self._optimizers if other is not first}
        waits = {id(p) for other in self._waiting for p in parameters_of(other)}
        self._released = {
            id(p): (g, Values(("", part) for part in parts_of(g)) if id(p) in waits else None)
            for p in self._engine.parameters
            if (g := p.grad) is not None
        }

    def take(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a share waits for this optimizer, which is about to step; it waits no longer."""
        if self._moving is not None and self._moving.optimizer is optimizer:
            self._moving.clean_up()
            for p in parameters_of(optimizer):
                share = self._released.get(id(p)) if p.requires_grad else None
                p.grad = None if share is None else share[0]
            return True  # its update failed, and is done again from the same noisy gradient
        if optimizer not in self._waiting:
            return False
        self.refuse_changes()
        self._waiting.remove(optimizer)
        return True

    def used(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has used its share, which may still be looked at."""
        if self._moving is not None and self._moving.optimizer is optimizer:
            self._moving = None
        for p in parameters_of(optimizer):
            self._released.pop(id(p), None)
            if p.grad is not None:
                self._used[id(p)] = weakref.ref(p.grad)
        if not self._waiting:
            self._over()

    def _was_used(self, p: Tensor) -> bool:
        used = self._used.get(id(p))
        return used is not None and p.grad is not None and used() is p.grad

    def forget_used(self) -> None:
        """Take used gradients out of ``.grad``, whether or not zero_grad() was called."""
        for p in self._engine.parameters if self._used else ():
            if self._was_used(p):
                p.grad = None
        self._used = {}

    def drop(self) -> None:
        """A new batch is coming: what some have not used of the last release stays unused."""
        self.refuse_unfinished()
        self.forget_used()
        if self._waiting:
            self._refuse_other_gradients()
            self._waiting, self._released = set(), {}
            for p in self._engine.parameters:
                p.grad = None
            self._over()

    def refuse_unfinished(self) -> None:
        """Refuse to go on after an update that failed: its noisy sum is released and counted."""
        if self._moving is None:
            return
        state = "may have moved in part" if self._moving.clean_up() else "are where they were"
        raise PrivacyError(
            "the optimizer failed after the step's noisy sum was released: the step is counted, "
            f"and the weights {state}. Fix: free memory and call optimizer.step() again, which "
            "redoes the update from the noisy gradient in .grad; or private.save(path), and "
            "attach(..., resume=path) redoes it."
        )

    def unfinished(self) -> dict[str, Any] | None:
        """The noisy gradients that a failed update would need again, for a checkpoint; public."""
        if self._moving is None:
            return None
        left = {self._moving.optimizer, *self._waiting}
        return {
            "gradients": {
                name: self._released[id(p)][0]
                for name, p in zip(self._engine.names, self._engine.parameters, strict=True)
                if id(p) in self._released
            },
            "optimizers": [number for number, one in enumerate(self._optimizers) if one in left],
            "touched": self._moving.clean_up(),
        }

    def redo(self, unfinished: dict[str, Any] | None) -> None:
        """Do the update that failed before the checkpoint was written."""
        if unfinished is None:
            return
        if unfinished["touched"]:
            warnings.warn(
                "the update that is done again had begun before: some weights or averages of the "
                "optimizer may move twice. The guarantee is unaffected.",
                RuntimeWarning,
                stacklevel=4,
            )
        for name, p in zip(self._engine.names, self._engine.parameters, strict=True):
            gradient = unfinished["gradients"].get(name)
            p.grad = None if gradient is None else gradient.to(p.device)
        left = [self._optimizers[number] for number in unfinished["optimizers"]]
        self.begin(left[0])
        self._waiting &= set(left)
        for optimizer in left:
            optimizer.step()
        self.forget_used()

    def refuse_changes(self) -> None:
        """Refuse foreign gradients, and parameters or buffers other than those attached."""
        self._refuse_other_gradients()
        refuse_bare_losses(self._engine)
        refuse_changed_parameters(self._engine)
        refuse_foreign_parameters(self._engine, self._optimizers)

    def _refuse_other_gradients(self) -> None:
        for name, p in zip(self._engine.names, self._engine.parameters, strict=True):
            released, values = self._released.get(id(p), (None, None))
            if p.grad is None or self._was_used(p):
                continue
            # by value, since writes through ``.data`` leave no other trace
            if p.grad is not released or (values is not None and values.changed() is not None):
                raise PrivacyError(
                    f"parameter {name!r} has a .grad that did not come through the gate. Fix: let "
                    "only private.backward(losses) make gradients, inside the loop, and do not "
                    "write to .grad."
                )


class Moving:
    """An optimizer from the release until its update is over.

    Attributes:
        optimizer: whose ``step()`` has begun.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._remembered = {p: tuple(state) for p, state in optimizer.state.items()}
        self._before = versions(optimizer)

    def clean_up(self) -> bool:
        """Delete state that a failed step left half made; return whether anything changed."""
        for p in list(self.optimizer.state):
            if p not in self._remembered:
                del self.optimizer.state[p]
            else:
                state = self.optimizer.state[p]
                for name in [name for name in state if name not in self._remembered[p]]:
                    del state[name]
        return versions(self.optimizer) != self._before


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def parts_of(gradient: Tensor) -> list[Tensor]:
    """The dense tensors that hold a gradient, which may be one of selected rows."""
    return [gradient.values(), gradient.indices()] if gradient.is_sparse else [gradient]


def versions(optimizer: torch.optim.Optimizer) -> list[int]:
    """How often each tensor of an optimizer was written, parameters and state."""
    parameters = parameters_of(optimizer)
    states = [value for p in parameters for value in optimizer.state.get(p, {}).values()]
    return [version_of(tensor) for tensor in (*parameters, *states) if isinstance(tensor, Tensor)]
