"""Lightning's Trainer, made private by a callback and a loader."""

import functools
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import Dataset

from dpoptim.errors import PrivacyError, RankError
from dpoptim.integrations.attach_options import take_options
from dpoptim.integrations.lightning_checkpoints import KEY, PrivateFiles
from dpoptim.integrations.lightning_options import (
    leave_out_scaler,
    refuse_finders,
    refuse_loaders,
    refuse_monitors,
    refuse_options,
    refuse_unfreezing,
    warn_of_fewer_steps,
)
from dpoptim.integrations.loaders import PlanLoader
from dpoptim.integrations.loggers import is_public, names_of_figures
from dpoptim.opacus_words import KnowsOpacus, refuse_unknown
from dpoptim.plan import Plan, require_plan
from dpoptim.training.attach import attach
from dpoptim.training.batches.logical_steps import NO_BATCH, LogicalStep
from dpoptim.training.private_training import PrivateTraining

OWN_NAMES = {"resume": "trainer.fit(..., ckpt_path=...)"}  # of what `attach` takes


def nothing() -> None:
    pass


class PrivateCallback(KnowsOpacus, pl.Callback):
    """Trains a LightningModule privately.

    Each batch of the loop is one step of the plan, so ``global_step``, schedulers, ``max_steps``
    and the progress bar count steps of the plan. In automatic optimization ``training_step``
    returns one loss a record, shape (rows,) (or ``{"loss": losses}``), and is called for each
    microbatch. In manual optimization it is given the whole step: iterate over its microbatches,
    call ``self.private.backward(losses)`` for each, and ``step()`` each optimizer once.

    Args:
        plan: from ``dpoptim.DPSGD(...).plan(...)``.
        train_set: the records; a map-style data set.
        physical_batch_size: rows that memory holds; None: a whole step at once.
        num_workers: as for ``torch.utils.data.DataLoader``.
        label: public text for the ledger's entry.
        public_figures: names that ``self.log`` may be given in training: you vouch that no private
            record takes part in them. Scores on public records, logged in validation, need not be
            named.
        options: all else that `dpoptim.attach` takes, as there: ``loss``, ``collate_fn``,
            ``ledger``, ``persons``, ``rows_per_record``, ``isolation``, ``noise_seed``,
            ``projection``, ``random_iterate``, ... With a ``loss``, ``loss(module, batch)``, it
            checks that records are not mixed.

    Example::

        private = PrivateCallback(plan, train_set)
        trainer = lightning.Trainer(max_epochs=10, callbacks=[private])
        trainer.fit(module, private.loader)

    **Guarantee.** That of `dpoptim.attach` for the plan. ``self.log`` is refused in training, also
    at the end of an epoch, unless ``public_figures`` names the figure: what it would show is
    private, and would name checkpoints. Checkpoints of the Trainer hold what is released; the
    private state lies beside them, in files named ``private-step=N.checkpoint``, which are secret,
    and go with the last checkpoint that they belong to.
    """

    def __init__(
        self,
        plan: Plan,
        train_set: Dataset[Any],
        *,
        physical_batch_size: int | None = None,
        num_workers: int = 0,
        label: str = "lightning trainer",
        public_figures: Collection[str] = (),
        **options: Any,
    ) -> None:
        self._options = take_options(type(self), OWN_NAMES, options)
        refuse_unknown(attach, options)
        require_plan(plan)
        self.plan, self._public = plan, names_of_figures(public_figures)
        self.loader = PlanLoader(plan)
        self.private: PrivateTraining | None = None
        self._train_set, self._physical = train_set, physical_batch_size
        self._workers, self._label = num_workers, label
        self._resume: Path | None = None
        self._files, self._unfollow = PrivateFiles(), nothing
        self._left = False  # whether the run has ended, or failed
        self._undo: list[Callable[[], Any]] = []
        self._validated: set[str] | None = None  # names of figures, as far as they are known

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Serve ``trainer.fit(module)`` too, where the module has no loader of its own."""
        if stage == "fit":
            refuse_finders(trainer)
            self._undo.append(leave_out_scaler(trainer))
        if stage == "fit" and not is_overridden("train_dataloader", pl_module):
            own = vars(pl_module)
            own["train_dataloader"] = lambda: self.loader
            self._undo.append(lambda: own.pop("train_dataloader", None))

    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated = set(trainer.callback_metrics)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.private is not None and self._resume is None:
            raise PrivacyError(
                "this PrivateCallback has trained already, and fit would be another run on another "
                "charge. Fix: a new PrivateCallback; trainer.fit(..., ckpt_path=...) goes on."
            )
        refuse_options(trainer, pl_module)
        refuse_unfreezing(trainer, pl_module)
        refuse_loaders(trainer, self.loader, self._train_set)
        validated = self._validated if trainer.enable_validation else set()
        refuse_monitors(trainer, None if validated is None else validated | self._public)
        warn_of_fewer_steps(trainer, self.plan)
        self.private = attach(
            self.plan,
            pl_module if trainer.model is None else trainer.model,  # wrapped in several processes
            list(trainer.optimizers),
            self._train_set,
            label=self._label,
            resume=self._resume,
            **self._options,
        )
        self._left = False
        self._unfollow()
        self._unfollow = self._files.follow(trainer.strategy)
        self.loader.steps = self.private.steps(
            physical_batch_size=self._physical, num_workers=self._workers
        )
        if trainer.world_size > 1:
            self._call_directly(trainer, pl_module)
        own = vars(pl_module)
        own["private"] = self.private
        self._undo.append(lambda: own.pop("private", None))
        # which log_dict calls, too
        own["log"] = functools.partial(self._log, trainer, pl_module.log)
        self._undo.append(lambda: own.pop("log", None))
        automatic = pl_module.automatic_optimization
        own["training_step"] = (
            functools.partial(self._training_step, trainer, pl_module, pl_module.training_step)
            if automatic
            else functools.partial(self._manual_step, pl_module.training_step)
        )
        self._undo.append(lambda: own.pop("training_step", None))

    def _call_directly(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Let the strategy call the module's own steps, not the wrapper's forward pass."""
        for name in ("training_step", "validation_step"):

            def step(*rest: Any, name: str = name) -> Any:
                plugin = trainer.precision_plugin
                context = plugin.train_step_context if name[0] == "t" else plugin.val_step_context
                with context():
                    return getattr(module, name)(*rest)

            vars(trainer.strategy)[name] = step
            self._undo.append(functools.partial(vars(trainer.strategy).pop, name, None))

    def _training_step(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        user: Callable[..., Any],
        step: LogicalStep,
        *rest: int,
    ) -> Tensor:
        """Take a step's microbatches through the module's ``training_step``; return 0."""
        assert self.private is not None
        for microbatch in step:
            batch = trainer.precision_plugin.convert_input(microbatch)
            found = user(trainer.strategy.batch_to_device(batch), *rest)
            if isinstance(found, Mapping) and "loss" not in found:
                raise ValueError(
                    "training_step returned a mapping without 'loss'. Fix: {'loss': losses, ...}, "
                    "one for each record."
                )
            self.private.backward(found["loss"] if isinstance(found, Mapping) else found)
        # the Trainer differentiates it
        return torch.zeros((), device=module.device, requires_grad=True)

    def _manual_step(self, user: Callable[..., Any], step: LogicalStep, *rest: int) -> Any:
        """The module's own ``training_step``, and a word if it takes the step for one batch."""
        assert self.private is not None
        done = self.private.steps_done
        try:
            return user(step, *rest)
        except PrivacyError:
            raise
        except Exception as error:
            if self.private.steps_done == done:
                error.add_note(f"dpoptim: {NO_BATCH}")
            raise

    def _log(
        self,
        trainer: pl.Trainer,
        log: Callable[..., None],
        name: str,
        value: Any,
        *rest: Any,
        **options: Any,
    ) -> None:
        if trainer.training and not is_public(name, self._public):
            raise PrivacyError(
                f"{name!r} was logged in training, where figures are of private records. Fix: log "
                "scores on public records in validation_step; "
                f"PrivateCallback(public_figures=[{name!r}]) if no private record takes part in "
                "it, as in private.spent().epsilon or private.noise_std."
            )
        log(name, value, *rest, **options)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *rest: Any
    ) -> None:
        assert self.private is not None
        if self.private.steps_done == self.plan.steps:
            trainer.should_stop = True

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write the private state beside checkpoints, which hold released numbers only.

        Ranks that have left a run cannot save it: their checkpoint then holds the weights alone.
        """
        if self.private is None or (self._left and trainer.world_size > 1):
            return
        folder = Path(
            getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
        )
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"private-step={self.private.steps_done}.checkpoint"
        self.private.save(path)
        checkpoint[KEY] = str(path)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        path = checkpoint.get(KEY)
        if path is None:
            raise PrivacyError(
                "this checkpoint does not say what was released: it was written without dpoptim's "
                "PrivateCallback, or after a run of several processes had ended. Fix: a checkpoint "
                "of the run itself; or load the weights, and start a new run."
            )
        # a folder of checkpoints may have been moved, and is then named by fit alone
        beside = Path(trainer.ckpt_path or path).parent / Path(path).name
        self._resume = beside if beside.exists() else Path(path)
        if trainer.ckpt_path is not None:
            self._files.note(trainer.ckpt_path, self._resume)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._leave()
        if self.private is not None:
            self.private.__exit__(None, None, None)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._leave()
        if self.private is not None:
            with suppress(RankError):  # the Trainer raises what it was told of
                self.private.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """The last checkpoints are written and removed after training has ended."""
        self._unfollow()
        self._unfollow = nothing

    def _leave(self) -> None:
        self._left = True
        while self._undo:
            self._undo.pop()()
