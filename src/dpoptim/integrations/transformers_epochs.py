"""Epochs of Hugging Face's Trainer: those of the plan, whose steps add up to all of it."""

from typing import Any

import transformers

from dpoptim.integrations.loaders import EpochLoader
from dpoptim.plan import Plan
from dpoptim.training.batches.epochs import EpochEnds


class PlanEpochs:
    """A Trainer whose epochs are the plan's, also where a run goes on in the middle of one."""

    plan: Plan

    def get_train_dataloader(self) -> Any:
        self._loader = EpochLoader(self.plan)
        handler = self.callback_handler  # type: ignore[attr-defined]
        if CountEpochs not in map(type, handler.callbacks):
            handler.callbacks.insert(0, CountEpochs(self._loader.ends))  # others read the count
        return self._loader

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """As the Trainer, which takes all epochs for equally long."""
        epochs, *rest = super().set_initial_training_values(args, dataloader)  # type: ignore[misc]
        if isinstance(dataloader, EpochLoader):
            epochs = dataloader.ends.number(args.max_steps - 1) + 1
        return (epochs, *rest)

    def _init_training_state(self, *numbers: Any) -> tuple[int, int]:
        super()._init_training_state(*numbers)  # type: ignore[misc]
        return self._loader.ends.number(self.state.global_step), 0  # type: ignore[attr-defined]


class CountEpochs(transformers.TrainerCallback):
    """Sets ``state.epoch`` to the plan's, before other callbacks read it."""

    def __init__(self, ends: EpochEnds) -> None:
        self._ends = ends

    def on_step_end(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **rest: Any,
    ) -> None:
        state.epoch = self._ends.passed(state.global_step)
