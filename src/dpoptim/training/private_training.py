"""A model in private training: batches go out, clipped sums come in, and only the gate's answers
reach the optimizers.
"""

import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpoptim.accounting.ledger import Ledger
from dpoptim.distributed.checkpoints import cut, joined
from dpoptim.distributed.ranks import Ranks
from dpoptim.distributed.wrapping import wrapping_of
from dpoptim.errors import PrivacyError
from dpoptim.gate import Gate
from dpoptim.gradients.engine import Reduction
from dpoptim.gradients.isolation import Choice, require_choice
from dpoptim.gradients.oracle import Loss
from dpoptim.opacus_words import knows_opacus
from dpoptim.plan import Plan
from dpoptim.training.agreed import agree_on_run
from dpoptim.training.checkpoint import (
    checkpoint_to_resume,
    identity_of,
    refuse_other_training,
    write_checkpoint,
)
from dpoptim.training.delivery import Delivery, queue_of
from dpoptim.training.engines import engine_for
from dpoptim.training.foreign import explain
from dpoptim.training.isolation import Chosen, IsolationWarning, choose_isolation
from dpoptim.training.loading import Batches, Collate, LoaderOptions
from dpoptim.training.logical_steps import LogicalSteps
from dpoptim.training.loss_check import LossCheck, check_loss
from dpoptim.training.optimizer_hooks import OptimizerHooks
from dpoptim.training.probe import positions_per_layer, show_the_batch_axis
from dpoptim.training.public_figures import PublicFigures
from dpoptim.training.reduction import differentiate
from dpoptim.training.reentry import refuse_another_program, refuse_several_processes
from dpoptim.training.refusals import (
    refuse_changed_parameters,
    refuse_engine,
    refuse_other_unit,
    refuse_unsupported,
)
from dpoptim.training.released_gradients import ReleasedGradients
from dpoptim.training.steps import Steps
from dpoptim.training.units import units_of

if TYPE_CHECKING:
    from dpoptim.evaluation import ClassifierScores, RegressorScores


class PrivateTraining(PublicFigures):
    """A model in private training; made by `attach`.

    Attributes:
        plan: the promise being kept.

    Examples:
        >>> import dpoptim
        >>> [name for name in ("batches", "steps", "backward", "save", "spent") if not
        ...  hasattr(dpoptim.PrivateTraining, name)]
        []
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        train_set: Dataset[Any],
        *,
        loss: Loss | None,
        collate_fn: Collate | None,
        loss_reduction: Reduction | None,
        ledger: Ledger | None,
        label: str,
        noise_seed: int | None,
        partial_backward: bool,
        resume: str | Path | None,
        checkpoint_key: bytes | None,
        rows_per_record: int,
        rows_reduction: Reduction,
        persons: Sequence[Any] | None,
        isolation: Choice,
        batch_axis: int | None,
        ranks: Ranks,
        sharded: bool,
    ) -> None:
        require_choice(isolation, batch_axis)
        self._ranks, self._sharded, self._asked = ranks, sharded, (isolation, batch_axis)
        checkpoint, digest = ranks.from_first(partial(checkpoint_to_resume, resume, checkpoint_key))
        refuse_unsupported(plan, model, optimizers, train_set, loss_reduction, ledger)
        self._wrapping = wrapping_of(model)
        model = self._wrapping.module
        self._units = units_of(train_set, rows_per_record, rows_reduction, persons)
        refuse_other_unit(plan, self._units)
        row = self._units.a_row(train_set)
        self.plan, self.model, self.optimizers = plan, model, tuple(optimizers)
        self._train_set = train_set
        self._seeded, self._checkpoint_key = noise_seed is not None, checkpoint_key
        # Where a seeded run goes on, it must not repeat the noise that it began with.
        later = (
            f" after step {checkpoint['steps_done']}"
            if checkpoint and noise_seed is not None
            else ""
        )
        queue = queue_of(plan, self._units, ranks, noise_seed, later, sharded=sharded)
        with self._wrapping.gathered():
            self._chosen = choose_isolation(model, [row], isolation, batch_axis)  # type: ignore[arg-type]
            self._loss = self._checked(loss, collate_fn, loss_reduction)
            positions = positions_per_layer(model, self._chosen.sample)
        self._wrapping.refuse(self._chosen.isolation)
        self._reduction = loss_reduction or (
            None if self._loss is None else self._loss.scalar_reduction
        )
        self._engine = engine_for(
            plan,
            model,
            self._chosen,
            self._reduction or "mean",
            partial_backward=partial_backward,
            rows=self._units.rows,
            totals=self._wrapping.totals(ranks),
            positions=positions,
            placement=self._wrapping,
        )
        refuse_engine(plan, self._engine, self.optimizers)
        self._released_gradients = ReleasedGradients(self._engine, self.optimizers)
        ranks.arrive("dpoptim.attach")
        options = {
            "loss_reduction": self._reduction,
            "partial_backward": partial_backward,
            "noise_seed": noise_seed,
        }
        count = agree_on_run(
            ranks,
            plan,
            self._engine,
            self.optimizers,
            train_set,
            self._units,
            options,
            sharded=sharded,
        )
        self._ledger, self._owns_ledger = (
            ranks.ledger(ledger or Ledger(neighboring=plan.neighboring)),
            ledger is None,
        )
        weakref.finalize(self, self._ledger.close if self._owns_ledger else lambda: None)
        self._identity = identity_of(plan, self._engine, self.optimizers, self._units, count)
        if checkpoint is not None:
            refuse_other_training(checkpoint, self._identity, self._ledger)
            own = ranks.dealer(noise_seed, "ranks of waiting" + later)
            checkpoint = cut(checkpoint, ranks, self._engine.totals, own, self._own_records)
        gate = Gate(
            event=plan.event,
            neighboring=plan.neighboring,
            query=plan.query,
            releases=plan.steps,
            ledger=None if plan.noise_multiplier == 0 else self._ledger,
            noise=ranks.own_stream(noise_seed, "gaussian noise" + later),
            label=label,
            resume=None if checkpoint is None else checkpoint["gate"],
            checkpoint=digest,
            part_of=plan.event_of_part,
        )
        self._steps = Steps(plan, self._engine, queue, gate, ranks)
        self._delivery = Delivery(
            plan,
            train_set,
            collate_fn,
            self._units,
            queue,
            self._engine,
            self._steps,
            self._released_gradients,
            ranks,
            checked=None if self._loss is None else self._loss.collate_fn,
            loss_checked=self._loss is not None,
            group_seed=noise_seed,
            group_purpose="summation groups" + later,
        )
        # of the parts before
        self._caveats: dict[str, bool] = {} if checkpoint is None else checkpoint["caveats"]
        self._saved_at, self._left = checkpoint["steps_done"] if checkpoint else None, False
        if checkpoint is not None:
            self._restore(checkpoint)
        self._engine.attach()
        self._wrapping.switch_off()
        with self._wrapping.gathered():
            show_the_batch_axis(model, self._chosen.sample if self._engine.hooks else None)
        if self._chosen.message:
            warnings.warn(self._chosen.message, IsolationWarning, stacklevel=3)
        self._hooks = OptimizerHooks(
            self.optimizers, self._steps, self._released_gradients, self._engine
        )
        if checkpoint is not None:
            self._hooks.redo(checkpoint["unfinished"])
        ranks.arrive("dpoptim.attach")

    @property
    def _own_records(self) -> int | None:
        """How many are in this process alone; None where all have the same."""
        return self._units.count if self._sharded else None

    def _checked(
        self, loss: Loss | None, collate_fn: Collate | None, reduction: Reduction | None
    ) -> LossCheck | None:
        """What is found about a loss, if there is one."""
        if loss is None:
            return None
        way, units = self._chosen.isolation, self._units
        return check_loss(self.model, loss, self._train_set, collate_fn, reduction, units, way)

    # ---- data -----------------------------------------------------------------------------------

    @knows_opacus
    def batches(
        self,
        *,
        physical_batch_size: int | None = None,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        multiprocessing_context: Any = None,
        worker_init_fn: Callable[[int], None] | None = None,
        timeout: float = 0,
        fixed_shape: bool | None = None,
    ) -> Batches:
        """All batches of the steps that remain, drawn by the plan's sampler, collated as
        DataLoader would.

        Args:
            physical_batch_size: rows that memory holds; a larger logical batch arrives in
                microbatches, and only the step after the last one moves the model. None: one. It
                changes speed and memory, not the update.
            num_workers: as what follows up to ``timeout``, of ``torch.utils.data.DataLoader``.
            collate_fn: give it to `attach` instead, with a loss, to have it checked; another one
                here is listed among what is taken on trust.
            fixed_shape: give every physical batch the same public number of rows: records take
                random slots, and what stays empty holds made-up records, which count as zero
                whatever the loss makes of them. Then nobody's rounding can depend on who else is
                there, and a mean needs no trust; shapes are static. It costs the empty slots'
                arithmetic: up to half as much time again up to an expected batch of 1,024, up to a
                    quarter at 4,096, nothing at 16,384. None: where it costs under 5 % and all
                    records
                have one shape for certain (a ``TensorDataset``, collated as usual).

        Returns:
            an iterator; ``len`` is the number of steps that remain, where each is one batch. One
            runs through the whole plan, all epochs; a second one goes on where the first stopped.
            An empty batch arrives as record 0 with weight zero: its step adds noise only. How many
                rows a batch has is private: do not log it.

        **Guarantee.** None for what is yielded: records are as private as the data set. Who takes
        part in a step is drawn once, and kept until that step's noisy sum is out, however often
        the loop is left and entered again.
        """
        options = LoaderOptions(
            num_workers,
            self._delivery.collate(collate_fn),
            pin_memory,
            prefetch_factor,
            persistent_workers,
            multiprocessing_context,
            worker_init_fn,
            timeout,
        )
        self._require_attached()
        return self._delivery.batches(physical_batch_size, options, fixed_shape)

    @knows_opacus
    def steps(
        self,
        *,
        physical_batch_size: int | None = None,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool = False,
        fixed_shape: bool | None = None,
    ) -> LogicalSteps:
        """The steps that remain, one item each, whatever memory holds: ``len`` is public.

        For loops that count: iterate over each item for its microbatches, hand their losses to
        `backward`, then call ``optimizer.step()`` once; schedulers and progress bars count steps
        of the plan. Items may be fetched ahead. Arguments and guarantee: as for `batches`.
        """
        batches = self.batches(
            physical_batch_size=physical_batch_size,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            fixed_shape=fixed_shape,
        )
        return LogicalSteps(self, batches, self.plan.steps)

    @property
    def step_is_complete(self) -> bool:
        """Whether all of a step's microbatches have been delivered, and the step is still to come.
        Private.
        """
        return self._steps.state == "complete"

    def backward(self, losses: Tensor) -> None:
        """Differentiate the batch's losses: each record's gradient is clipped, and added to the
        step's sum.

        Args:
            losses: one for each delivered record, shape (rows,): compute them with
                ``reduction="none"``. The sum over the records is taken here, so that there is no
                reduction to declare. A scalar is taken where its graph shows whether it is a mean
                or a sum of the records' losses, or where ``attach(..., loss_reduction=)`` says so.

        Raises:
            PrivacyError: these are not the losses of the rows that were delivered, or a scalar
                that is not what was declared.

        **Guarantee.** Each record adds a gradient of at most the clip norm, for every loss in
        which its term depends on that record alone. A vector's terms may still have been made of
        each other (``attach(..., loss=)`` checks that).
        """
        self._require_attached()
        differentiate(self._engine, losses, self._reduction)

    # ---- scores ---------------------------------------------------------------------------------

    def evaluate(
        self,
        hold_out: Dataset[Any],
        *,
        epsilon: float,
        delta: float | None = None,
        n: int | None = None,
        target_bound: float | None = None,
        persons: Sequence[Any] | None = None,
        confidence: float = 0.95,
        noise_seed: int | None = None,
    ) -> "ClassifierScores | RegressorScores":
        """Score the model as it is now on *private* hold-out records, with noise, charged to this
        run's ledger.

        Args:
            hold_out: records with the target last, none of them in the training data; which is
                which must have been decided for each record (or person) by itself.
            epsilon: what these scores may cost, on top of the training.
            delta: default the plan's.
            n: public number of records in it (of persons); needed under add-or-remove-one.
            target_bound: public bound on absolute targets, for a model with one output; a model
                with several is scored as a classifier, its outputs as logits.
            persons: the owner of each record; needed where the plan's unit is a person. Only the
                first record of each counts.
            confidence: of the intervals, in (0, 1); they include the noise.
            noise_seed: repeatable noise, for tests; the guarantee then says that it is not for
                release.

        Returns:
            accuracy, confusion matrix, log-loss, AUC and calibration, or R2 and squared error; all
            may be published.

        Raises:
            PrivacyError: in the middle of a step, after the `with`, or in one of several
                processes.
            ValueError: a setting out of range; before anything is spent.
            BudgetExceeded: the ledger does not admit it; nothing is drawn.

        **Guarantee.** The scores' ``guarantee``, under the plan's relation and unit, charged before
        the noise is drawn. Scores may decide what happens next, such as `finish`, as outputs may.
        """
        from dpoptim.evaluation.hold_out import evaluate_hold_out

        self._require_attached()
        if self._steps.state not in ("idle", "released") or self._ranks.size > 1:
            raise PrivacyError(
                "private.evaluate is for one process, between two steps. Fix: call it after "
                "optimizer.step(), or score the saved model with dpoptim.evaluation."
            )
        if (persons is None) != (self._units.persons is None):
            raise ValueError(
                f"persons: this training protects each {self._units.name}, and its scores must, "
                "too. Fix: persons= as attach has it."
            )
        return evaluate_hold_out(
            self.model,
            hold_out,
            epsilon=epsilon,
            delta=self.plan.delta if delta is None else delta,
            neighboring=self.plan.neighboring,
            n=n,
            target_bound=target_bound,
            persons=persons,
            confidence=confidence,
            ledger=self._ledger,
            noise_seed=noise_seed,
        )

    # ---- checkpoints ----------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write a checkpoint that ``attach(..., resume=path)`` goes on from: model, optimizers and
        all privacy state.

        **The file is a secret, like the data**: it holds who takes part in coming steps, what
        error feedback remembers, and the noise that correlated mechanisms will take back. To
        publish a model, save ``model.state_dict()``.

        A run that was left can still be saved: the checkpoint is of where it stopped.

        What some of several optimizers have not used yet of the last release is not saved. The run
        may go on from the file if the `with` is left in this state, or not at all (the process
        died); left later, the run counts as completed.

        Args:
            path: an older checkpoint there is replaced, anything else refused; readable by its
                owner alone.

        Raises:
            PrivacyError: in the middle of a step, or something was changed that may not be.
            LedgerError: the ledger, which is told of the file first, cannot be written.
            ValueError: a state dict holds what could not be read back. OSError: the file cannot be
                written. What was there is unchanged.
        """
        self._steps.refuse_interrupted()
        if self._steps.gate.ended:
            raise PrivacyError(
                "private.save was called after private.finish: an ended run cannot go on. Fix: "
                "save model.state_dict()."
            )
        if not self._hooks.attached:  # left: a step that was begun is done again
            refuse_several_processes(self._ranks)
            self._steps.restart()
            if self.steps_done < self.plan.steps:
                self._steps.gate.reenter()
        elif self._steps.state != "idle":
            raise PrivacyError(
                "private.save was called in the middle of a step. Fix: save after optimizer.step() "
                "for the last piece of a batch, such as where private.finished_step is true."
            )
        refuse_changed_parameters(self._engine, everything=True)
        contents = {
            "identity": self._identity,
            "durable": self._ledger.durable,
            "caveats": self._all_caveats(),
            "model": self._wrapping.whole(self.model.state_dict()),
            "optimizers": [
                self._wrapping.whole(optimizer.state_dict()) for optimizer in self.optimizers
            ],
            "unfinished": self._wrapping.whole(self._released_gradients.unfinished()),
            **joined(
                self._steps.secret_state(), self._ranks, self._engine.totals, self._own_records
            ),
        }
        write_checkpoint(
            Path(path),
            contents,
            key=self._checkpoint_key,
            announce=self._steps.gate.note_checkpoint,
            on_first=self._ranks.from_first,
        )
        self._saved_at = self.steps_done

    def _restore(self, checkpoint: dict[str, Any]) -> None:
        """Go on where `save` was called."""
        self.model.load_state_dict(self._wrapping.model_state(checkpoint["model"]))
        for optimizer, state in zip(self.optimizers, checkpoint["optimizers"], strict=True):
            held = [p for group in optimizer.param_groups for p in group["params"]]
            optimizer.load_state_dict(self._wrapping.optimizer_state(held, state))
        self._steps.restore(checkpoint)

    # ---- ending ---------------------------------------------------------------------------------

    def finish(self, *, refund: bool = False) -> None:
        """End the run here, for good: no further step, no checkpoint to go on from.

        Call it between two steps, or in a loop over `batches`, which then ends. The run's own
        guarantee (`spent`, a certificate) stays that of the whole plan.

        Args:
            refund: leave the steps that were not made to the budget of the ledger, for other runs.

        Raises:
            PrivacyError: there is nothing to give back to, or no way to (`why_no_refund`); the run
                goes on.
            LedgerError: the ledger cannot be written; the run is over, and charged in full.

        **Guarantee.** With ``refund``, the budget's (epsilon, delta) still holds for everything
        that was released on the ledger and will be, also if whether to end here was read off the
        released models: "Giving back" in `dpoptim.accounting.budget`. A step whose noise was drawn
        is never given back.
        """
        self._require_attached()
        if refund and self.why_no_refund:
            raise PrivacyError(
                f"private.finish(refund=True): nothing can be given back: {self.why_no_refund}. "
                "Fix: private.finish(), which leaves the whole run charged."
            )
        self._steps.end(refund=refund)

    @property
    def why_no_refund(self) -> str:
        """Why ``finish(refund=True)`` could give nothing back; "" if it can. Public."""
        return self._steps.gate.why_nothing_is_returned

    def detach(self) -> None:
        """Take everything off model and optimizer. Called by leaving the ``with``; harmless when
        repeated.
        """
        self._delivery.restore_randomness()
        self._engine.detach()
        self._wrapping.restore()
        self._hooks.remove()

    def _attach_again(self) -> None:
        """Go on in the process that left the run: the same batches, noise, counts and charge.

        Raises:
            PrivacyError: all steps are done, this is a forked process, or the model is attached
                elsewhere or has become another one.
            LedgerError: the ledger cannot be written.
        """
        self._steps.refuse_interrupted()
        count = self._units.count  # in one process
        identity = identity_of(self.plan, self._engine, self.optimizers, self._units, count)
        row = self._units.a_row(self._train_set)

        def choose() -> Chosen:
            with self._wrapping.gathered():
                return choose_isolation(self.model, [row], *self._asked)  # type: ignore[arg-type]

        refuse_several_processes(self._ranks)
        refuse_another_program(
            self.plan,
            self._engine,
            self.optimizers,
            same=identity == self._identity,
            choose=choose,
        )
        self._steps.gate.reenter()
        self._steps.restart()
        self._engine.attach()
        self._wrapping.switch_off()
        with self._wrapping.gathered():
            show_the_batch_axis(self.model, self._chosen.sample if self._engine.hooks else None)
        self._hooks = OptimizerHooks(
            self.optimizers, self._steps, self._released_gradients, self._engine
        )
        self._left = True

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a private training cannot be pickled or copied: it holds sums and noise that must not "
            "be stored. Save model.state_dict() and optimizer.state_dict(), which hold released "
            "numbers only; private.save(path) writes a secret file to go on from."
        )

    def _require_attached(self) -> None:
        if not self._hooks.attached:
            raise PrivacyError(
                "this training has been detached. Fix: draw batches inside the `with` block; `with "
                "private:` enters it again where it stopped, on the same charge."
            )

    def __enter__(self) -> Self:
        """Inside, the training is attached. One that was left is entered again where it stopped,
        in the same process and on the same charge.
        """
        if not self._hooks.attached:
            self._attach_again()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            explain(error, traceback)
        try:
            if error is None:
                refuse_changed_parameters(self._engine, everything=True)
            if (lost := self._ranks.lost(error)) is not None:
                raise lost from error
            self._ranks.leave(self.steps_done, failed=error is not None)
            if error is None and (
                self._saved_at != self.steps_done or self.steps_done == self.plan.steps
            ):
                self._steps.gate.finish()  # else it may go on from the checkpoint
        finally:
            self.detach()
