"""A model in private training: batches go out, clipped sums come in, and only the gate's answers reach the optimizers."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpoptim.accounting.guarantee import SEEDED, Guarantee
from dpoptim.accounting.ledger import Ledger
from dpoptim.arguments import whole_number
from dpoptim.errors import PrivacyError
from dpoptim.gate import Gate
from dpoptim.gradients.engine import Reduction
from dpoptim.gradients.value_engine import ValueEngine
from dpoptim.noise.stream import KeyStream
from dpoptim.plan import Basis, Plan
from dpoptim.training.basis import ESCAPES, basis_of_caveats, basis_of_ledger, basis_of_loss
from dpoptim.training.checkpoint import identity_of, read_checkpoint, refuse_other_training, write_checkpoint
from dpoptim.training.engines import engine_for
from dpoptim.training.microbatches import BatchQueue, MicrobatchSampler, load_microbatches
from dpoptim.training.probe import probe_model, show_the_batch_axis
from dpoptim.training.refusals import (
    refuse_changed_parameters,
    refuse_devices,
    refuse_foreign_parameters,
    refuse_unsupported,
)
from dpoptim.training.released_gradients import ReleasedGradients


class PrivateTraining:
    """A model in private training; made by `attach`.

    Attributes:
        plan: the promise being kept.
        steps_done: noisy steps taken so far (public), those that only looked for the clip norm included.
        finished_step: whether the last ``optimizer.step()`` moved the model; for schedulers.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        train_set: Dataset[Any],
        loss_reduction: Reduction,
        ledger: Ledger | None,
        label: str,
        noise_seed: int | None,
        partial_backward: bool,
        resume: str | Path | None,
        checkpoint_key: bytes | None,
    ) -> None:
        checkpoint, digest = (None, "") if resume is None else read_checkpoint(Path(resume), key=checkpoint_key)
        self._checkpoint_key = checkpoint_key
        refuse_unsupported(plan, model, optimizers, train_set, loss_reduction, ledger)
        self.plan, self.model, self.optimizers = plan, model, tuple(optimizers)
        self.steps_done = 0
        self.finished_step = False
        self._train_set = train_set
        self._reduction = loss_reduction
        self._seeded = noise_seed is not None
        # -> "open" while a step's pieces arrive -> "complete" when the last one has -> "released" until all is written down
        self._state = "idle"
        self._loop = 0  # counts calls of batches()
        # Where a seeded run goes on, it must not repeat the noise that it began with.
        later = f" after step {checkpoint['steps_done']}" if checkpoint and noise_seed is not None else ""
        coins = key_stream(noise_seed, "poisson coins" + later)
        self._group_coins = key_stream(noise_seed, "summation groups" + later)
        self._queue = BatchQueue(plan.sampler, coins, len(train_set), plan.steps)  # type: ignore[arg-type]
        self._probed = probe_model(model, train_set)
        self._engine = engine_for(plan, model, train_set, loss_reduction, partial_backward)
        refuse_foreign_parameters(self._engine, self.optimizers)
        refuse_devices(plan, self._engine)
        self._released_gradients = ReleasedGradients(self._engine, self.optimizers)
        self._ledger = Ledger(neighboring=plan.neighboring) if ledger is None else ledger
        self._identity = identity_of(plan, self._engine, self.optimizers, len(train_set))  # type: ignore[arg-type]
        if checkpoint is not None:
            refuse_other_training(checkpoint, self._identity, self._ledger)
        self._side = plan.method.private_side(plan)
        self._choice = plan.method.norm_choice(plan)
        if self._choice is not None:
            self._engine.clipping, self._engine.observer = self._choice.rule, self._choice.observe
        self._owns_ledger = ledger is None
        self._gate = Gate(
            event=plan.event,
            neighboring=plan.neighboring,
            query=plan.method.query(plan),
            releases=plan.steps,
            ledger=None if plan.noise_multiplier == 0 else self._ledger,
            noise=key_stream(noise_seed, "gaussian noise" + later),
            label=label,
            resume=None if checkpoint is None else checkpoint["gate"],
            checkpoint=digest,
        )
        self._caveats: dict[str, bool] = {} if checkpoint is None else checkpoint["caveats"]  # of the parts before
        self._saved_at = None if checkpoint is None else checkpoint["steps_done"]
        if checkpoint is not None:
            self._restore(checkpoint)
        self._engine.attach()
        if self._engine.hooks is not None:
            show_the_batch_axis(model, train_set)
        self._hooks = [optimizer.register_step_pre_hook(self._before_step) for optimizer in self.optimizers]
        self._hooks += [optimizer.register_step_post_hook(self._after_step) for optimizer in self.optimizers]

    # ---- data ------------------------------------------------------------------------------------------------

    def batches(
        self,
        *,
        physical_batch_size: int | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
    ) -> Iterator[Any]:
        """All batches of the steps that remain, drawn by the plan's sampler, collated as DataLoader would.

        Args:
            physical_batch_size: rows that memory holds; a larger logical batch arrives in pieces, and only the step
                after the last piece moves the model. None: one piece. It changes speed and memory, not the update.
            num_workers, collate_fn, pin_memory: as for ``torch.utils.data.DataLoader``.

        One call runs through the whole plan, all epochs; a second one goes on where the first stopped. An empty batch
        arrives as record 0 with weight zero: its step adds noise only. How many rows a batch has is private: do not
        log it.

        **Guarantee.** None for what is yielded: records are as private as the data set. Who takes part in a step is
        drawn once, and kept until that step's noisy sum is out, however often the loop is left and entered again.
        """
        if physical_batch_size is not None:
            physical_batch_size = whole_number("physical_batch_size", physical_batch_size, least=1)
        self._require_attached()
        if self.steps_done == self.plan.steps:
            raise PrivacyError(
                f"all {self.plan.steps} planned steps are done: one loop over private.batches() runs through all of them, "
                "epochs included. Fix: no outer loop over epochs (private.steps_done tells where it is), or a longer plan."
            )
        capacity = self._engine.capacity
        self._engine.physical_rows = capacity if physical_batch_size is None else min(capacity, physical_batch_size)
        self._refuse_interrupted()
        self._engine.refuse_writes()
        # A loop that was left in mid-step starts that step again, with the same records; nothing of it was released.
        self._engine.take()
        if self._choice is not None:
            self._choice.forget()
        self._state = "idle"
        groups = self._engine.number_of_groups(self.plan.batch_size, physical_batch_size)
        pieces = MicrobatchSampler(self._queue, groups, self._group_coins, physical_batch_size)
        loader = load_microbatches(
            self._train_set, pieces, num_workers=num_workers, collate_fn=collate_fn, pin_memory=pin_memory
        )
        self._loop = loop = self._loop + 1
        for batch, piece in loader:
            if loop != self._loop:
                raise PrivacyError("private.batches() was called again meanwhile. Fix: use one loop over it at a time.")
            if self._state == "complete":
                raise PrivacyError(
                    "a batch was delivered, but optimizer.step() was not called after it. "
                    "Fix: call loss.backward() and optimizer.step() once for every batch. After an error in the loop, "
                    "start it again: private.batches() goes on with the same batch."
                )
            self._released_gradients.drop()
            self._engine.begin_microbatch(piece.rows, null=piece.null, groups=piece.groups)
            self._state = "complete" if piece.last else "open"
            yield batch
        if self._state == "complete":
            raise PrivacyError("the last batch was delivered, but optimizer.step() was not called after it.")

    def loss(self, losses: Tensor) -> Tensor:
        """The scalar to differentiate, for `ValueClippedSGD`: the mean of the batch's losses.

        Args:
            losses: one for each delivered row, shape (rows,), computed from the model's output.

        **Guarantee.** None for the value, which is as private as the batch. Its backward pass adds bounded gradients.
        """
        self._require_attached()
        if not isinstance(self._engine, ValueEngine):
            raise PrivacyError(
                f"private.loss belongs to ValueClippedSGD, and this plan is for {type(self.plan.method).__name__}. "
                "Fix: loss.backward() on the loss of the batch."
            )
        return self._engine.loss(losses)

    # ---- the optimizer's hooks -------------------------------------------------------------------------------

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._released_gradients.take(optimizer):  # another one let the gate release; this one's share is in .grad
            return None
        self._refuse_interrupted()
        changed = self._run_closure(args, kwargs)
        self.finished_step = False
        if self._state == "idle":
            raise PrivacyError(
                "optimizer.step() was called without a batch from private.batches(). Fix: draw the batches there, and "
                "step once for each."
            )
        if getattr(optimizer, "grad_scale", None) is not None:
            raise PrivacyError(
                "GradScaler is not supported: its scale would change what is clipped. Fix: train without it: "
                "float32, and bfloat16 under torch.autocast, need none."
            )
        self._released_gradients.refuse_changes()
        self._engine.require_all_closed()
        if self._state == "complete":
            self._gate.open()  # first: a refusal must leave the sums as they were
            self._release()
            self._released_gradients.others_wait(optimizer)
        return changed

    def _release(self) -> None:
        """Let the gate release this step's sums, and write the noisy mean into ``.grad``.

        Nothing remembers the step before its noise is drawn: if that is interrupted, the step is done again.
        """
        sums = self._engine.take_sums()
        query = sums[0] if self._side is None else self._side.query(sums)
        if self._choice is not None:
            query = self._choice.query(query)
        noisy = self._gate.release_sum(query)
        self._state = "released"  # if what follows is interrupted, the run is over: the step must not happen twice
        if self._side is not None:
            self._side.released(sums)
        released = noisy if self._choice is None else self._choice.answer(noisy)
        if self._choice is not None:
            self._engine.clipping = self._choice.rule
        self._queue.released()
        self.steps_done += 1
        if released is not None:  # else the step was for the clip norm: optimizers find no gradients, and move nothing
            self._engine.write_means(released, self.plan.batch_size)
            self.finished_step = True
        self._state = "idle"

    def _refuse_interrupted(self) -> None:
        if self._state == "released":
            raise PrivacyError(
                "a step was interrupted just after its noisy sum was released, so it is unknown what the run remembers. "
                "Fix: go on from a checkpoint (private.save, attach(..., resume=...)), or start a new run."
            )

    def _run_closure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Run a closure here, so that its backward pass is over before the noisy mean is written."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            return None
        with torch.enable_grad():
            loss = closure()
        return (args[0], lambda: loss), {}

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.finished_step:
            self._released_gradients.used(optimizer)

    # ---- checkpoints -----------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write a checkpoint that ``attach(..., resume=path)`` goes on from: model, optimizers and all privacy state.

        **The file is a secret, like the data**: it holds who takes part in coming steps, what error feedback remembers, and
        the noise that correlated mechanisms will take back. To publish a model, save ``model.state_dict()``.

        What some of several optimizers have not used yet of the last release is not saved. The run may go on from the file
        if the `with` is left in this state, or not at all (the process died); left later, the run counts as completed.

        Args:
            path: an older checkpoint there is replaced, anything else refused; readable by its owner alone.

        Raises:
            PrivacyError: in the middle of a step, or something was changed that may not be.
            LedgerError: the ledger, which is told of the file first, cannot be written.
            ValueError: a state dict holds what could not be read back. OSError: the file cannot be written. What was there
                is unchanged.
        """
        self._require_attached()
        self._refuse_interrupted()
        if self._state != "idle":
            raise PrivacyError(
                "private.save was called in the middle of a step. Fix: save after optimizer.step() for the last piece of a "
                "batch, such as where private.finished_step is true."
            )
        refuse_changed_parameters(self._engine)
        contents = {
            "identity": self._identity,
            "durable": self._ledger.durable,
            "caveats": self._all_caveats(),
            "steps_done": self.steps_done,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "queue": self._queue.secret_state(),
            "side": None if self._side is None else self._side.secret_state(),
            "choice": None if self._choice is None else self._choice.state(),
            "gate": self._gate.secret_state(),
        }
        write_checkpoint(Path(path), contents, key=self._checkpoint_key, announce=self._gate.note_checkpoint)
        self._saved_at = self.steps_done

    def _all_caveats(self) -> dict[str, bool]:
        """What must be said of the guarantee, of all parts of the run."""
        found = {
            "seeded": self._seeded,
            "partial_backward": self._engine.partial_backward,
            "rounded": self._engine.recorder.rounded,
        }
        return {key: value or self._caveats.get(key, False) for key, value in found.items()}

    def _restore(self, checkpoint: dict[str, Any]) -> None:
        """Go on where `save` was called."""
        self.model.load_state_dict(checkpoint["model"])
        for optimizer, state in zip(self.optimizers, checkpoint["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.steps_done = checkpoint["steps_done"]
        self._queue.restore(checkpoint["queue"])
        if self._side is not None:
            self._side.restore(checkpoint["side"])
        if self._choice is not None:
            self._choice.restore(checkpoint["choice"])
            self._engine.clipping = self._choice.rule

    # ---- what may be said ------------------------------------------------------------------------------------

    def spent(self, delta: float | None = None) -> Guarantee:
        """The guarantee of what is reserved: the whole plan from the first step on, however early the run stops.

        Args:
            delta: state it at another delta than the plan's, 1e-14 < delta < 1.
        """
        guarantee = self.plan.guarantee if delta is None else self.plan.guarantee_at(delta)
        if self._gate.released == 0:
            return dataclasses.replace(guarantee, epsilon=0.0, delta=0.0, accountant="nothing released", status="proven")
        if self._all_caveats()["seeded"]:
            guarantee = dataclasses.replace(guarantee, notes=(*guarantee.notes, SEEDED))
        return guarantee

    @property
    def clip_norm(self) -> float:
        """What gradients are clipped to now; public. With a `PrivateQuantile`: ``nan`` until it is found."""
        found = self._choice is None or self._choice.found
        return self._engine.clipping.norm if found else math.nan

    @property
    def share_unclipped(self) -> float:
        """The noisy share of the last step's gradients that were not clipped; public. ``nan`` where none is released.

        Gradients within 9 % of the clip norm count in part, so that no rounding turns a vote.
        """
        return math.nan if self._choice is None else self._choice.share_below

    def remaining(self) -> str:
        """What the plan and the ledger still allow, for a person to read."""
        left = self.plan.steps - self.steps_done
        ledger = "in memory, without a budget" if self._owns_ledger else str(self._ledger.remaining())
        return f"{left} of {self.plan.steps} planned steps; ledger: {ledger}"

    @property
    def reservation(self) -> str | None:
        """The ledger's name for this run's reservation; None before the first noisy step, or without noise."""
        return None if self._gate.reservation is None else self._gate.reservation.id

    @property
    def basis(self) -> tuple[Basis, ...]:
        """What the guarantee rests on, with what attaching has found out."""
        loss, ledger = basis_of_loss(self._reduction, self._engine.reduction), basis_of_ledger(self._ledger.durable)
        caveats = basis_of_caveats(self._all_caveats(), resumed=bool(self._caveats))
        return (*self.plan.basis, ESCAPES, self._probed, *loss, ledger, *caveats)

    # ---- leaving ---------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Take everything off model and optimizer. Called by leaving the ``with``; harmless when repeated."""
        self._engine.detach()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._owns_ledger:
            self._ledger.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a private training cannot be pickled or copied: it holds sums and noise that must not be stored. "
            "Save model.state_dict() and optimizer.state_dict(), which hold released numbers only; private.save(path) "
            "writes a secret file to go on from."
        )

    def _require_attached(self) -> None:
        if not self._hooks:
            raise PrivacyError("this training has been detached. Fix: draw batches inside the `with` block.")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._engine.refuse_writes()
            if error is None and (self._saved_at != self.steps_done or self.steps_done == self.plan.steps):
                self._gate.finish()  # else it may go on from the checkpoint
        finally:
            self.detach()


def key_stream(seed: int | None, purpose: str) -> KeyStream:
    """An OS-keyed stream, or a repeatable one; coins and noise never share a key."""
    return KeyStream() if seed is None else KeyStream.from_seed(seed, purpose)
