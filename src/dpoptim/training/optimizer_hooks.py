"""Calls of ``optimizer.step()``: after the last microbatch the gate releases, before none run."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dpoptim.errors import PrivacyError
from dpoptim.gradients.engine import Engine
from dpoptim.optim.adam_bc import pass_on
from dpoptim.runtime.torch_internals import put_first
from dpoptim.training.iterates import Iterates
from dpoptim.training.optimizer_settings import settings_of
from dpoptim.training.other_libraries import NO_SCALER, say_skipped
from dpoptim.training.released_gradients import ReleasedGradients
from dpoptim.training.same_on_ranks import SameOnRanks
from dpoptim.training.step_calls import StepCalls
from dpoptim.training.steps import Steps

STEP_TAKES_NO_LOSS = (
    "optimizer.step(loss=...): losses are private, and reach no optimizer. Fix: "
    "private.backward(losses), then optimizer.step()."
)
PASSED_BY = (
    "optimizer.step was taken before dpoptim.attach, or is called by its class, and would run "
    "between two microbatches of a step, whose number is private. Fix: optimizer.step()."
)
Turn = Literal["share", "release", "none"]  # "none": before a step's last microbatch
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class OptimizerHooks:
    """Hooks on the run's optimizers, ahead of all others: theirs find the noisy mean in ``.grad``.

    Args:
        optimizers: that share the parameters out; the first of them to step lets the gate release.
        steps, gradients, engine: what a step needs.
        iterates: told of steps before them.
        wrappers: of the optimizers, told which calls of ``step()`` did nothing.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        steps: Steps,
        gradients: ReleasedGradients,
        engine: Engine,
        iterates: Iterates,
        wrappers: Sequence[object] = (),
    ) -> None:
        self._steps, self._gradients, self._engine = steps, gradients, engine
        self._optimizers, self._iterates = tuple(optimizers), iterates
        self._wrappers = tuple(wrappers)
        self._same = SameOnRanks(engine, optimizers)
        # refuses those that would not be told, before anything is spent
        self._pass_on()
        # of each optimizer, at the first microbatch of a step
        self._settings: dict[int, dict[str, list[Any]]] = {}
        self._decided: tuple[torch.optim.Optimizer, Turn] | None = None
        self._handles: list[RemovableHandle] = []
        self._calls: list[StepCalls] = []
        for optimizer in optimizers:
            before = optimizer.register_step_pre_hook(self._before_step)
            put_first(optimizer, before)
            self._handles += [before, optimizer.register_step_post_hook(self._after_step)]
            self._calls.append(StepCalls(optimizer, self._called))

    def _pass_on(self) -> None:
        shares = self._steps.noise_shares
        of_each = {} if shares is None else dict(zip(self._engine.parameters, shares, strict=True))
        pass_on(self._optimizers, self._steps.noise_std, of_each)

    @property
    def attached(self) -> bool:
        return bool(self._handles)

    def redo(self, unfinished: dict[str, Any] | None) -> None:
        """Do the update again that had failed when a checkpoint was written."""
        self._steps.moved = unfinished is not None
        self._gradients.redo(unfinished)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for calls in self._calls:
            calls.restore()
        say_skipped(self._wrappers, False)
        self._handles = []

    def _called(
        self, optimizer: torch.optim.Optimizer, step: Callable[..., Any], *given: Any, **named: Any
    ) -> Any:
        """``optimizer.step(...)``, of which nothing runs before a step's last microbatch.

        How many microbatches a step has is private, and whatever ran might count them: the
        optimizer in its state or attributes, and hooks of its user's.
        """
        turn, changed = self._turn(optimizer, (optimizer, *given), named)
        if turn == "none":
            say_skipped(self._wrappers, True)
            return None if changed is None else PrivateLoss(())
        if changed is not None:
            (_, *given), named = changed  # type: ignore[assignment]
        self._decided = optimizer, turn
        try:
            return step(*given, **named)
        finally:
            self._decided = None

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        changed = None
        if self._decided is not None and self._decided[0] is optimizer:
            (_, turn), self._decided = self._decided, None
        else:
            turn, changed = self._turn(optimizer, args, kwargs)
        if turn == "none":
            raise PrivacyError(PASSED_BY)
        if turn == "release":
            self._settings.clear()
            self._steps.release(self._same)
            self._pass_on()
            if self._steps.moved:
                self._iterates.leave()
            self._gradients.begin(optimizer, moves=self._steps.moved)
            self._steps.settle()
        return changed

    def _turn(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Turn, Arguments | None]:
        """An optimizer's turn, and the arguments to go on with where its closure has run."""
        if "loss" in kwargs:
            raise PrivacyError(STEP_TAKES_NO_LOSS)
        self._iterates.refuse_swapped()
        # another one let the gate release; this one's share is in .grad
        if self._gradients.take(optimizer):
            return "share", None
        self._steps.refuse_interrupted()
        changed = run_closure(args, kwargs)
        self._steps.moved = False
        if self._steps.state == "idle":
            raise PrivacyError(
                "optimizer.step() was called without a batch from private.batches(). Fix: draw the "
                "batches there, and step once for each."
            )
        if getattr(optimizer, "grad_scale", None) is not None:
            raise PrivacyError(NO_SCALER)
        self._gradients.refuse_changes()
        self._engine.require_all_closed()
        if self._steps.microbatches == 1:  # of a step that may have been interrupted before
            self._settings.pop(id(optimizer), None)
        self._refuse_other_settings(optimizer)
        return ("release" if self._steps.state == "complete" else "none"), changed

    def _refuse_other_settings(self, optimizer: torch.optim.Optimizer) -> None:
        """A schedule that counts microbatches would tell how many there were."""
        now = settings_of(optimizer)
        now["requires_grad"] = [p.requires_grad for p in self._engine.parameters]
        begun = self._settings.setdefault(id(optimizer), now)
        if changed := [name for name in {**begun, **now} if begun.get(name) != now.get(name)]:
            raise PrivacyError(
                f"{changed[0]} was changed between two microbatches of one step: how many a step "
                "has is private, and schedules must not count them. Fix: scheduler.step(), or "
                "requires_grad_(...), where private.finished_step is true, or once for each item "
                "of private.steps(physical_batch_size=...)."
            )

    def _after_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._steps.moved:
            self._gradients.used(optimizer)
        say_skipped(self._wrappers, False)


def run_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """Run a closure before the noisy mean is written; its loss, private, goes nowhere."""
    closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None
    with torch.enable_grad():
        closure()
    return (args[0], lambda: PrivateLoss(())), {}


class PrivateLoss(Tensor):
    """Takes the place of a closure's loss; it has no number, and says so when one is wanted."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise PrivacyError(
            "an optimizer, or what calls it, read the loss that a closure returned: it is private, "
            "and steps that depend on it are not covered by the guarantee. Fix: an optimizer that "
            "uses gradients alone; keep a reference to the loss in the closure for yourself, if "
            "you must see it."
        )
