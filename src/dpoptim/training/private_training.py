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

from dpoptim.accounting.guarantee import Guarantee
from dpoptim.accounting.ledger import Ledger
from dpoptim.errors import PrivacyError
from dpoptim.gate import Gate
from dpoptim.gradients.engine import Engine, Reduction
from dpoptim.gradients.value_engine import ValueEngine
from dpoptim.methods.value_clipped_sgd import ValueClippedSGD
from dpoptim.noise.stream import KeyStream
from dpoptim.plan import Basis, Plan, whole_number
from dpoptim.training.batches import BatchQueue, PieceSampler, deliveries
from dpoptim.training.checkpoint import read_checkpoint, write_checkpoint
from dpoptim.training.probe import positions_per_layer, probe_model
from dpoptim.training.refusals import refuse_changed_parameters, refuse_foreign_parameters, refuse_unsupported

SEEDED = "seeded: not for release"


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
    ) -> None:
        checkpoint = None if resume is None else read_checkpoint(Path(resume))
        refuse_unsupported(plan, model, optimizers, train_set, loss_reduction, ledger)
        self.plan, self.model, self.optimizers = plan, model, tuple(optimizers)
        self.steps_done = 0
        self.finished_step = False
        self._train_set = train_set
        self._reduction = loss_reduction
        self._seeded = noise_seed is not None
        self._state = "idle"  # -> "open" while a step's pieces arrive -> "complete" when the last one has
        self._loop = 0  # counts calls of batches()
        self._yet_to_step: set[torch.optim.Optimizer] = set()  # that have not used the last released gradients
        # Where a seeded run goes on, it must not repeat the noise that it began with.
        later = f" after step {checkpoint['steps_done']}" if checkpoint and noise_seed is not None else ""
        coins = key_stream(noise_seed, "poisson coins" + later)
        self._group_coins = key_stream(noise_seed, "summation groups" + later)
        self._queue = BatchQueue(plan.sampler, coins, len(train_set), plan.steps)  # type: ignore[arg-type]
        self._probed = probe_model(model, train_set)
        self._engine = engine_for(plan, model, train_set, loss_reduction, partial_backward)
        refuse_foreign_parameters(self._engine, self.optimizers)
        self._side = plan.method.private_side(plan)
        self._choice = plan.method.norm_choice(plan)
        if self._choice is not None:
            self._engine.clipping, self._engine.observer = self._choice.rule, self._choice.observe
        self._owns_ledger = ledger is None
        self._ledger = Ledger(neighboring=plan.neighboring) if ledger is None else ledger
        self._gate = Gate(
            event=plan.event,
            neighboring=plan.neighboring,
            query=plan.method.query(plan),
            releases=plan.steps,
            ledger=None if plan.noise_multiplier == 0 else self._ledger,
            noise=key_stream(noise_seed, "gaussian noise" + later),
            label=label,
        )
        self._saved = False
        self._resumed = checkpoint is not None
        if checkpoint is not None:
            self._restore(checkpoint)
        self._engine.attach()
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
        if isinstance(self._engine, ValueEngine):
            capacity = self._engine.capacity
            self._engine.physical_rows = capacity if physical_batch_size is None else min(capacity, physical_batch_size)
        # A loop that was left in mid-step starts that step again, with the same records; nothing of it was released.
        self._engine.take()
        if self._choice is not None:
            self._choice.forget()
        self._state = "idle"
        pieces = PieceSampler(self._queue, self.plan.batch_size, self._group_coins, physical_batch_size)
        loader = deliveries(self._train_set, pieces, num_workers=num_workers, collate_fn=collate_fn, pin_memory=pin_memory)
        self._loop = loop = self._loop + 1
        for batch, piece in loader:
            if loop != self._loop:
                raise PrivacyError("private.batches() was called again meanwhile. Fix: use one loop over it at a time.")
            if self._state == "complete":
                raise PrivacyError(
                    "a batch was delivered, but optimizer.step() was not called after it. "
                    "Fix: call loss.backward() and optimizer.step() once for every batch."
                )
            self._drop_gradients()
            self._engine.deliver(piece.rows, null=piece.null, groups=piece.groups)
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
        if optimizer in self._yet_to_step:  # another one let the gate release; this one's share is in .grad
            self._yet_to_step.remove(optimizer)
            return None
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
        for name, p in zip(self._engine.names, self._engine.parameters, strict=True):
            if p.grad is not None:
                raise PrivacyError(
                    f"parameter {name!r} has a .grad that did not come through the gate. Fix: let only loss.backward() "
                    "inside the loop make gradients (private.loss(losses).backward() with ValueClippedSGD), and do not "
                    "write to .grad."
                )
        refuse_changed_parameters(self._engine)
        refuse_foreign_parameters(self._engine, self.optimizers)
        self._engine.require_all_closed()
        if self._state == "complete":
            self._gate.open()  # first: a refusal must leave the sums, and the private side's memory, as they were
            sums = self._engine.take_sums()
            released = self._release(sums[0] if self._side is None else self._side.query(sums))
            self._queue.released()
            self._state = "idle"
            self.steps_done += 1
            if released is not None:  # else the optimizer finds no gradients, and moves nothing
                for p, total in zip(self._engine.parameters, self._engine.split(released), strict=True):
                    p.grad = (total / self.plan.batch_size).to(p.dtype)
                self.finished_step = True
                self._yet_to_step = {other for other in self.optimizers if other is not optimizer}
        return changed

    def _release(self, sums: list[Tensor]) -> list[Tensor] | None:
        """The noisy sums; None if the step's query was for the clip norm."""
        if self._choice is None:
            return self._gate.release_sum(sums)
        released = self._choice.answer(self._gate.release_sum(self._choice.query(sums)))
        self._engine.clipping = self._choice.rule
        return released

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
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None  # so that the next step finds none, whether or not zero_grad() is called

    def _drop_gradients(self) -> None:
        """An optimizer that skips a step leaves its share unused."""
        if self._yet_to_step:
            self._yet_to_step = set()
            for p in self._engine.parameters:
                p.grad = None

    # ---- checkpoints -----------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write a checkpoint that ``attach(..., resume=path)`` goes on from: model, optimizers and all privacy state.

        **The file is a secret, like the data**: it holds who takes part in coming steps, what error feedback remembers, and
        the noise that correlated mechanisms will take back. To publish a model, save ``model.state_dict()``.

        Args:
            path: replaced if it exists; readable by its owner alone.

        Raises:
            PrivacyError: in the middle of a step. OSError: the file cannot be written; what was there is unchanged.
        """
        self._require_attached()
        if self._state != "idle":
            raise PrivacyError(
                "private.save was called in the middle of a step. Fix: save after optimizer.step(), where "
                "private.finished_step is true or the batch was the last piece."
            )
        contents = {
            "plan": self.plan.to_json(),
            "steps_done": self.steps_done,
            "durable": self._ledger.durable,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "queue": self._queue.secret_state(),
            "side": None if self._side is None else self._side.secret_state(),
            "choice": None if self._choice is None else self._choice.state(),
            "gate": self._gate.secret_state(),
        }
        write_checkpoint(Path(path), contents)
        self._saved = True

    def _restore(self, checkpoint: dict[str, Any]) -> None:
        """Go on where `save` was called. The ledger is asked last, so that a refusal changes nothing in it."""
        if Plan.from_json(checkpoint["plan"]) != self.plan:
            raise ValueError(
                "resume: the checkpoint belongs to another plan. Fix: make the plan with the same settings, or load it with "
                "dpoptim.Plan.from_json."
            )
        held = {entry.id for entry in self._ledger.entries()}
        if checkpoint["durable"] and checkpoint["gate"]["reservation"] not in {None, *held}:
            raise ValueError(
                "resume: the run was charged to a ledger on disk. Fix: attach(..., ledger=...) with that ledger."
            )
        if len(checkpoint["optimizers"]) != len(self.optimizers):
            raise ValueError(f"resume: the checkpoint has {len(checkpoint['optimizers'])} optimizers; attach as many.")
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
        self._gate.restore(checkpoint["gate"])

    # ---- what may be said ------------------------------------------------------------------------------------

    def spent(self, delta: float | None = None) -> Guarantee:
        """The guarantee of what is reserved: the whole plan from the first step on, however early the run stops.

        Args:
            delta: state it at another delta than the plan's, 1e-14 < delta < 1.
        """
        guarantee = self.plan.guarantee if delta is None else self.plan.guarantee_at(delta)
        if self._gate.released == 0:
            return dataclasses.replace(guarantee, epsilon=0.0, delta=0.0, accountant="nothing released", status="proven")
        if self._seeded:
            guarantee = dataclasses.replace(guarantee, notes=(*guarantee.notes, SEEDED))
        return guarantee

    @property
    def clip_norm(self) -> float:
        """What gradients are clipped to now; public. With a `PrivateQuantile`: ``nan`` until it is found."""
        found = self._choice is None or self._choice.found
        return self._engine.clipping.norm if found else math.nan

    @property
    def share_unclipped(self) -> float:
        """The noisy share of the last step's gradients that were not clipped; public. ``nan`` where none is released."""
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
        loss = f"the loss is the {self._reduction} over the batch of one term per record (dpoptim.check tests it)"
        items = [
            Basis("enforced", "whatever would escape clipping is refused: other uses of a weight, batch statistics"),
            self._probed,
            Basis("trusted", loss),
            Basis("trusted", "the shape of a record is public"),
            Basis("trusted", "nothing trainable outside the model takes part in the loss; records keep their order in it"),
        ]
        if self._ledger.durable:
            items.append(Basis("enforced", "the whole run was charged to a ledger on disk before its first noisy sum"))
        else:
            items.append(Basis("trusted", "other runs on this data are added up elsewhere: the ledger was in memory"))
        if self._engine.partial_backward:
            items.append(Basis("trusted", "several backward passes over a batch cover disjoint records"))
        if self._engine.books.rounded:
            shared = "under torch.autocast, records are rounded alike whatever other records share their batch"
            items.append(Basis("trusted", shared))
        if self._resumed:
            again = "nothing that was released after the checkpoint had been looked at when the run was taken up again"
            items.append(Basis("trusted", again))
        if self._seeded:
            items.append(Basis("unproven", "noise and sampling were seeded: whoever knows the seed sees the data"))
        return (*self.plan.basis, *items)

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
            if error is None and (not self._saved or self.steps_done == self.plan.steps):
                self._gate.finish()  # else the run may go on from its checkpoint
        finally:
            self.detach()


def engine_for(
    plan: Plan, model: nn.Module, train_set: Dataset[Any], reduction: Reduction, partial_backward: bool
) -> Engine:
    """What turns backward passes into the plan's clipped sums."""
    capacity, method = plan.sampler.capacity(plan.n), plan.method
    if isinstance(method, ValueClippedSGD):
        if partial_backward:
            raise ValueError("partial_backward=True is not for ValueClippedSGD; use batches(physical_batch_size=...).")
        return ValueEngine(model, method.rule, capacity=capacity, paper=method.bound == "paper", reduction=reduction)
    return Engine(
        model,
        method.rule,
        capacity=capacity,
        reduction=reduction,
        partial_backward=partial_backward,
        positions=positions_per_layer(model, train_set),
    )


def key_stream(seed: int | None, purpose: str) -> KeyStream:
    """An OS-keyed stream, or a repeatable one; coins and noise never share a key."""
    return KeyStream() if seed is None else KeyStream.from_seed(seed, purpose)
