"""Hugging Face's Trainer, made private: a subclass, and a mixin for other subclasses (TRL's)."""

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from dpoptim.errors import PrivacyError
from dpoptim.integrations.attach_options import refuse_rows_twice, take_options
from dpoptim.integrations.language import losses_from_labels
from dpoptim.integrations.loaders import EpochLoader, SealedStep
from dpoptim.integrations.loggers import is_public, names_of_figures
from dpoptim.integrations.transformers_checkpoints import SECRET, PrivateCheckpoints
from dpoptim.integrations.transformers_epochs import PlanEpochs
from dpoptim.integrations.transformers_options import (
    fit_accelerator,
    fit_to_plan,
    with_steps_of,
)
from dpoptim.opacus_words import KnowsOpacus
from dpoptim.plan import Plan, require_plan
from dpoptim.training.attach import attach
from dpoptim.training.batches.repeated_records import have_records_in_common

USUAL = (
    "loss",
    "grad_norm",
    "train_loss",
    "total_flos",
    "num_tokens",
    "entropy",
    "mean_token_accuracy",
)  # and private

OWN_NAMES = {  # what `attach` takes, and a Trainer says in its own way
    "loss": "losses=fn(model, inputs), one loss a record",
    "collate_fn": "data_collator=",
    "label": "ledger_label=",
    "resume": "train(resume_from_checkpoint=...)",
    "loss_reduction": "losses=fn(model, inputs), one loss a record",
    "partial_backward": "leave it out: each microbatch takes one pass",
}

Losses = Callable[[nn.Module, Any], Tensor]


class PrivateTrainerMixin(KnowsOpacus, PrivateCheckpoints, PlanEpochs):
    """Private training in a Trainer: put it before the Trainer's class.

    ``per_device_train_batch_size`` is the physical batch, what memory holds; the logical batch,
    the number of steps and the noise come from the plan. ``global_step``, schedulers,
    ``logging_steps`` and ``save_steps`` count steps of the plan; its epochs are as many as it goes
    through the records, to the nearest, and ``"epoch"`` as a strategy means the end of each.

    Args:
        plan: from ``dpoptim.DPSGD(...).plan(...)``; it sets ``args.max_steps`` and
            ``args.num_train_epochs``.
        losses: ``losses(model, inputs)`` returns one loss a record, shape (rows,). None: from the
            batch's labels, as the model's own loss but averaged over each record's own tokens (see
            `losses_from_labels`).
        ledger_label: public text for the ledger's entry.
        fixed_shape: as for `PrivateTraining.batches`; for collators that always pad to one length.
        debug_private: also log the training loss and all else that is private: never for release.
        public_figures: names of further figures that may be logged: you vouch that no private
            record takes part in them.
        trainer: the Trainer's own arguments; and those of `dpoptim.attach`, as there: ``ledger``,
            ``persons``, ``rows_per_record``, ``isolation``, ``checkpoint_key``, ``noise_seed``,
            ``projection``, ``random_iterate``, ... ``per_device_train_batch_size`` counts records,
            or persons, of ``rows_per_record`` rows each.

    Raises:
        ValueError: options that cannot be kept, named with the fix.
        TypeError: an argument of `attach` that has another name here.

    **Guarantee.** That of `dpoptim.attach` for the plan. What is logged is public: steps, learning
    rate, the epsilon that is reserved, and the Trainer's scores on ``eval_dataset``, which must be
    public records (the training data is refused). Whatever else reaches ``log`` is left out, with
    a warning. Checkpoint folders hold a file ``private.checkpoint``, which is secret unless sealed
    with ``checkpoint_key``; everything else in them is released (with a ``noise_seed``, for tests,
    also the state of random generators).
    """

    rows_per_record = 1  # of a batch; clipped as one

    def __init__(
        self,
        *args: Any,
        plan: Plan,
        losses: Losses | None = None,
        ledger_label: str = "transformers trainer",
        fixed_shape: bool | None = None,
        debug_private: bool = False,
        public_figures: Collection[str] = (),
        **trainer: Any,
    ) -> None:
        require_plan(plan)
        self.plan, self.debug_private = plan, debug_private
        self._public, self._left_out = names_of_figures(public_figures), set(USUAL)
        self.private = None
        self._losses, self._label, self._fixed_shape = losses, ledger_label, fixed_shape
        self._options = take_options(type(self), OWN_NAMES, trainer)
        refuse_rows_twice(self._options, self.rows_per_record)
        if self.rows_per_record > 1:
            self._options |= {"rows_per_record": self.rows_per_record, "rows_reduction": "sum"}
        self._rows = self._options.get("rows_per_record", 1)
        self._noise_seed = self._options.get("noise_seed")
        self._key = self._options.get("checkpoint_key")
        super().__init__(
            *(with_steps_of(plan, each) for each in args),
            **{name: with_steps_of(plan, each) for name, each in trainer.items()},
        )
        self._fit_to_plan(self.args)  # type: ignore[attr-defined]
        fit_accelerator(self.accelerator, fixed_shape)  # type: ignore[attr-defined]

    def _fit_to_plan(self, args: transformers.TrainingArguments) -> None:
        fit_to_plan(self.plan, args, own_loss_of(self), sealed=self._key is not None)
        refuse_own_batches(self)

    # ---- the loop -------------------------------------------------------------------------------

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: EpochLoader, resume_from_checkpoint: Any
    ) -> Any:
        prepared = super()._prepare_for_training(  # type: ignore[misc]
            max_steps, train_dataloader, resume_from_checkpoint
        )
        self._attach(resume_from_checkpoint)
        return prepared

    def _attach(self, resume: str | Path | None) -> None:
        if self.private is not None and resume is None:
            raise PrivacyError(
                "this trainer has trained already, and train() would be another run on another "
                "charge. Fix: train(resume_from_checkpoint=True) goes on; a new PrivateTrainer "
                "starts anew."
            )
        self._refuse_own_scores()
        dataset, collate = self._records()
        self.model.train()  # type: ignore[attr-defined]  # as it will be checked, and then trained
        optimizer = self.optimizer  # type: ignore[attr-defined]
        self.private = attach(
            self.plan,
            self._attached(),
            getattr(optimizer, "optimizer", optimizer),
            dataset,
            loss=self.per_sample_losses,
            collate_fn=collate,
            label=self._label,
            resume=None if resume is None else Path(resume) / SECRET,
            **self._options,
        )
        args = self.args  # type: ignore[attr-defined]
        self._loader.steps = self.private.steps(
            physical_batch_size=args.per_device_train_batch_size * self._rows,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=getattr(args, "dataloader_multiprocessing_context", None),
            fixed_shape=self._fixed_shape,
        )

    def _attached(self) -> nn.Module:
        """The model; in several processes its wrapper, whose sending `attach` switches off."""
        wrapped: nn.Module = self.model_wrapped  # type: ignore[attr-defined]
        several = isinstance(wrapped, nn.parallel.DistributedDataParallel)
        return wrapped if several else self.model  # type: ignore[attr-defined]

    def _records(self) -> tuple[Any, Callable[[list[Any]], Any]]:
        """Training records without the columns that the model does not take, and the collator."""
        dataset, collate = self.train_dataset, self.data_collator  # type: ignore[attr-defined]
        if type(dataset).__module__.startswith("datasets."):
            return self._remove_unused_columns(dataset, description="training"), collate  # type: ignore[attr-defined]
        return dataset, self._get_collator_with_removed_columns(collate, description="training")  # type: ignore[attr-defined]

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Run a `SealedStep`'s forward and backward passes; return 0, as the loss is private.

        Overriding it to do something before or after is fine; the passes are made here.
        """
        assert self.private is not None
        model.train()
        shown = torch.zeros((), device=self.args.device)  # type: ignore[attr-defined]
        for microbatch in inputs.step:
            batch = self._prepare_inputs(microbatch)  # type: ignore[attr-defined]
            with self.compute_loss_context_manager():  # type: ignore[attr-defined]
                losses = self.per_sample_losses(model, batch)
            self.private.backward(losses)
            if self.debug_private:
                shown += losses.detach().sum() / self.plan.batch_size
        return shown

    def per_sample_losses(self, model: nn.Module, inputs: Any) -> Tensor:
        """One loss a record, shape (rows,); override it for a loss of your own.

        **Guarantee.** None: private.
        """
        if self._losses is not None:
            return self._losses(model, inputs)
        return losses_from_labels(model, inputs, label_smoothing=self.args.label_smoothing_factor)  # type: ignore[attr-defined]

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            output = super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            if self.private is not None:
                self.private.detach()
            raise
        if self.private is not None:
            self.private.__exit__(None, None, None)
        metrics = {
            key: value for key, value in output.metrics.items() if is_public(key, self._public)
        }
        return output._replace(training_loss=math.nan, metrics=metrics)

    # ---- what may be said -----------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> tuple[list[Any], None]:
        """The next step; how many tokens it has is private, and counted nowhere."""
        step = next(epoch_iterator, None)
        return ([] if step is None else [SealedStep(step)]), None

    def num_examples(self, dataloader: Any) -> int:
        """The plan's n: how many records there are may be private."""
        if isinstance(dataloader, EpochLoader):
            return self.plan.n
        return int(super().num_examples(dataloader))  # type: ignore[misc]

    def get_total_train_batch_size(self, args: transformers.TrainingArguments) -> int:
        """The plan's expected batch."""
        return self.plan.batch_size

    def floating_point_ops(self, inputs: Any) -> int:
        """Zero: the operations of a step depend on how many records it has."""
        return 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log what is public, and the guarantee that is reserved."""
        if self.private is not None:
            if not self.debug_private:
                logs = self._shown(logs)
            logs["epsilon_reserved"] = self.private.spent().epsilon
        super().log(logs, start_time)  # type: ignore[misc]

    def _shown(self, logs: Mapping[str, float]) -> dict[str, float]:
        """The public ones of some figures.

        Others are left out, with a warning once if they are not the usual ones.
        """
        private = [key for key in logs if not is_public(key, self._public)]
        if unheard := [key for key in private if key not in self._left_out]:
            self._left_out |= set(unheard)
            warnings.warn(
                f"{', '.join(map(repr, unheard))} will not be logged: figures of training batches "
                "are private. Fix: public_figures=[...] for those that no private record takes "
                "part in.",
                UserWarning,
                stacklevel=4,
            )
        return {key: value for key, value in logs.items() if key not in private}

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Public records only: scores on them are logged as they are."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset  # type: ignore[attr-defined]
        if isinstance(chosen, str):
            chosen = self.eval_dataset[chosen]  # type: ignore[attr-defined]
        self._refuse_score_on(chosen)
        return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]

    def _refuse_own_scores(self) -> None:
        """Before anything is charged, where scores are wanted on the way."""
        given = self.eval_dataset  # type: ignore[attr-defined]
        if self.args.eval_strategy != "no":  # type: ignore[attr-defined]
            for each in given.values() if isinstance(given, dict) else [given]:
                self._refuse_score_on(each)

    def _refuse_score_on(self, dataset: object) -> None:
        if self.debug_private or dataset is None:
            return
        if have_records_in_common(dataset, self.train_dataset):  # type: ignore[attr-defined]
            raise ValueError(
                "eval_dataset is the training data, or some of it, and its scores would be logged "
                "without noise. Fix: public records; dpoptim.evaluation for private ones."
            )


def refuse_own_batches(trainer: PrivateTrainerMixin) -> None:
    """Refuse a subclass that would draw batches itself."""
    for name, kept in (
        ("get_train_dataloader", PlanEpochs),
        ("_get_train_sampler", transformers.Trainer),
    ):
        if getattr(type(trainer), name, None) is not getattr(kept, name, None):
            raise ValueError(
                f"{type(trainer).__name__}.{name} would draw other batches than the plan does. "
                "Fix: leave it out; train_dataset and data_collator are what is read."
            )


def own_loss_of(trainer: PrivateTrainerMixin) -> str:
    """The name of a loss for a whole batch that a user gave the trainer; "" if there is none."""
    kinds = type(trainer).__mro__
    for kind in kinds[: kinds.index(PrivateTrainerMixin)]:
        if "compute_loss" in vars(kind) and not kind.__module__.startswith("dpoptim."):
            return f"{kind.__name__}.compute_loss"
    return "" if getattr(trainer, "compute_loss_func", None) is None else "compute_loss_func"


class PrivateTrainer(PrivateTrainerMixin, transformers.Trainer):
    """`transformers.Trainer` with differential privacy: the same arguments, and a ``plan``.

    See `PrivateTrainerMixin`.

    Example::

        trainer = PrivateTrainer(model, args, train_dataset=data, data_collator=collate, plan=plan)
        trainer.train()
        print(trainer.private.spent())
    """
