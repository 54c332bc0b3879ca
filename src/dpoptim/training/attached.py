"""Everything that a run hangs on a model and its optimizers, put on and taken off together."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from dpoptim.distributed.ranks import Ranks
from dpoptim.distributed.user_collectives import inside_of, user_collectives_refused
from dpoptim.distributed.wrapping import Wrapping
from dpoptim.errors import PrivacyError
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.watch.plain_values import PlainValues
from dpoptim.runtime.torch_internals import checkpointing_served
from dpoptim.runtime.watched_calls import backward_watched, plateaus_watched, scaling_watched
from dpoptim.training.held_gradients import gradients_put_back
from dpoptim.training.iterates import Iterates
from dpoptim.training.losses.bare_losses import BareLosses
from dpoptim.training.model_as_left import ModelAsLeft, same_entries, without_wrappers
from dpoptim.training.optimizer_hooks import OptimizerHooks
from dpoptim.training.private_schedules import PrivateSchedules
from dpoptim.training.released_gradients import ReleasedGradients
from dpoptim.training.spread_weights import Part, are_whole, parts_of
from dpoptim.training.steps import Steps
from dpoptim.training.trials.isolation import Chosen
from dpoptim.training.trials.probe import show_the_batch_axis


class Attached:
    """A model and optimizers with the hooks of a run; made without them.

    Args:
        wrapping: of the model.
        optimizers: that share its parameters out.
        engine, steps, gradients: what the hooks talk to.
        chosen: how records are kept apart, and a sample to show the batch axis by.
        iterates: told of steps before and after them.
        losses: that the loop differentiates by itself.
        wrappers: of the optimizers, or these themselves.
    """

    def __init__(
        self,
        wrapping: Wrapping,
        optimizers: Sequence[torch.optim.Optimizer],
        engine: Engine,
        steps: Steps,
        gradients: ReleasedGradients,
        chosen: Chosen,
        iterates: Iterates,
        losses: BareLosses,
        wrappers: Sequence[object] = (),
    ) -> None:
        self._losses, self._wrappers = losses, tuple(wrappers)
        self._wrapping, self._optimizers = wrapping, tuple(optimizers)
        self._engine, self._chosen = engine, chosen
        self._steps, self._gradients, self._iterates = steps, gradients, iterates
        self._schedules = PrivateSchedules(self._optimizers)
        self._hooks: OptimizerHooks | None = None
        self._left_as: ModelAsLeft | None = None
        self._parts: list[Part] = []  # of a model that no process holds whole, as it was left
        self._meanwhile = ExitStack()

    @property
    def on(self) -> bool:
        """Whether the hooks are there."""
        return self._hooks is not None

    def put_on(self) -> None:
        """Add the hooks to the model, then to the optimizers."""
        self._parts = []
        self._wrapping.switch_off()  # first: the engine tells hooks that come later from others
        self._meanwhile.enter_context(checkpointing_served())
        self._meanwhile.enter_context(backward_watched(self._losses.around))
        self._meanwhile.enter_context(scaling_watched(self._losses.refuse_scale))
        self._meanwhile.enter_context(plateaus_watched(self._schedules.see))
        inside = inside_of(self._engine.model)
        self._meanwhile.enter_context(user_collectives_refused("the model", inside))
        try:
            self._engine.attach()
        except BaseException:
            self.take_off()
            raise
        show_the_batch_axis(self._engine.model, self._chosen.sample if self._engine.hooks else None)
        self._wrapping.settle()
        self._hooks = OptimizerHooks(
            self._optimizers,
            self._steps,
            self._gradients,
            self._engine,
            self._iterates,
            self._wrappers,
        )

    def take_off(self) -> None:
        """Leave model and optimizers as they were; harmless when repeated."""
        self._gradients.forget_used()
        self._engine.detach()
        self._wrapping.restore()
        self._meanwhile.close()
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
            self._left_as = ModelAsLeft(self._engine.model)

    def share_parts(self, ranks: Ranks) -> None:
        """Tell all ranks by digests what each has left of a model that none holds whole."""
        if self._wrapping.spread:
            own = without_wrappers(self._engine.model.state_dict())
            mine = parts_of(self._wrapping.in_boxes(own))
            self._parts = [part for each in ranks.all_gather(mine) for part in each]

    def left(self, weights: Mapping[str, Any]) -> bool:
        """Whether a whole state dict is known to hold what the run left."""
        own, found = map(without_wrappers, (self._engine.model.state_dict(), weights))
        if self._wrapping.spread:
            return are_whole(self._parts, own, found)
        return self.is_as_left and same_entries(found, own)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Around a trial of the model between two batches, without the engine's hooks.

        Gradients that the loop left are there again afterwards.
        """
        engine = self._engine
        engine.require_all_closed()
        engine.refuse_changes(everything=True)
        assert engine.state is not None
        begins = engine.state.step_begins
        with gradients_put_back(engine.model):
            engine.detach()
            values = PlainValues(engine.model)  # without the hooks, which hold values of their own
            try:
                kinds = {p.device.type for p in engine.parameters}
                with ExitStack() as digits:  # a loop may ask for its batches under autocast
                    for kind in kinds:
                        digits.enter_context(torch.autocast(kind, enabled=False))
                    yield
            finally:
                values.put(values.before)
                try:
                    engine.attach()
                except BaseException:  # nothing may go on with a model that nobody watches
                    self.take_off()
                    raise
                engine.state.step_begins = begins  # a trial begins no step
                show_the_batch_axis(engine.model, self._chosen.sample if engine.hooks else None)
                self._wrapping.settle()

    @property
    def is_as_left(self) -> bool:
        """Whether the model holds what it held when the run was left, or the run is not left."""
        return self.on or self._left_as is None or self._left_as.is_in(self._engine.model)

    def refuse_other_weights(self) -> None:
        """Refuse what a checkpoint may not hold: the random iterate, or weights that others made.

        Raises:
            PrivacyError: the model has it, or was changed after the run was left.
        """
        self._iterates.refuse_swapped()
        if not self.is_as_left:
            raise PrivacyError(
                "the model is not as the run left it, and private.save writes what the run's "
                "guarantee covers. Fix: save before anything else changes the model; or "
                "model.load_state_dict(...) of what the run had left."
            )

    def swap_iterate(self) -> None:
        """Exchange the model's parameters with the iterate that is kept: both are the run's."""
        own, self._parts = self.is_as_left, []
        self._iterates.swap()
        if own and not self.on:
            self._left_as = ModelAsLeft(self._engine.model)

    def state(self) -> dict[str, Any]:
        """Model, optimizers, iterates, unused releases, for a checkpoint.

        In boxes: see `Wrapping.in_boxes`.
        """
        return {
            key: self._wrapping.in_boxes(value)
            for key, value in {
                "model": self._engine.model.state_dict(),
                "optimizers": [each.state_dict() for each in self._optimizers],
                "unfinished": self._gradients.unfinished(),
                "iterates": self._iterates.state(),
            }.items()
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Load what `state` returned, the unfinished release apart; before `put_on`."""
        self._engine.model.load_state_dict(self._wrapping.model_state(state["model"]))
        for optimizer, held_before in zip(self._optimizers, state["optimizers"], strict=True):
            held = [p for group in optimizer.param_groups for p in group["params"]]
            optimizer.load_state_dict(self._wrapping.optimizer_state(held, held_before))
        points = state["iterates"]
        own = {part: self._wrapping.model_state(points[part]) for part in ("start", "kept")}
        self._iterates.restore(points | own)

    def redo(self, unfinished: dict[str, Any] | None) -> None:
        """Do the update again that had failed when a checkpoint was written; after `put_on`."""
        assert self._hooks is not None
        if unfinished is not None:
            own = self._wrapping.model_state(unfinished["gradients"])
            unfinished = unfinished | {"gradients": own}
        self._hooks.redo(unfinished)
