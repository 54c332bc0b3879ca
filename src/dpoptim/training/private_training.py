"""A model in private training: batches out, clipped sums in, only the gate's answers beyond."""

import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.utils.data import Dataset

from dpoptim.accounting.ledger import Ledger
from dpoptim.distributed.checkpoints import common_state
from dpoptim.distributed.rank_signals import FINISH, SAVE
from dpoptim.distributed.ranks import Ranks
from dpoptim.errors import PrivacyError
from dpoptim.gate import Gate
from dpoptim.plan import Plan
from dpoptim.training.attached import Attached
from dpoptim.training.batch_loop import BatchLoop
from dpoptim.training.batches.batch_loader import BatchLoader, queue_of
from dpoptim.training.checkpoints.earlier_part import EarlierPart
from dpoptim.training.checkpoints.rank_files import save_with_parts
from dpoptim.training.engines import reads_sums
from dpoptim.training.hold_out_scores import HoldOutScores
from dpoptim.training.iterates import Iterates
from dpoptim.training.losses.bare_losses import BareLosses
from dpoptim.training.losses.handed_over import HandedOver
from dpoptim.training.other_libraries import explain
from dpoptim.training.other_runs import OtherRuns
from dpoptim.training.prepared import Prepared
from dpoptim.training.randomness.run_streams import RunStreams
from dpoptim.training.reentry import (
    refuse_another_program,
    refuse_several_processes,
    say_how_to_go_on,
)
from dpoptim.training.refusals import refuse_changed_parameters
from dpoptim.training.released_gradients import ReleasedGradients
from dpoptim.training.request import Request
from dpoptim.training.steps import Steps


class PrivateTraining(BatchLoop, HoldOutScores):
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
        request: Request,
        ranks: Ranks,
    ) -> None:
        earlier = EarlierPart.read(request.resume, request.checkpoint_key, ranks)
        self._prepared = found = Prepared(plan, model, optimizers, train_set, request, ranks)
        self.plan, self.model, self.optimizers = plan, found.model, found.optimizers
        self._units, self._engine, self._chosen = found.units, found.engine, found.chosen
        self._loss, self._reduction = found.loss, found.reduction
        self._handed_over = HandedOver(
            found.reduction,
            checked=found.checked,
            whole=plan.batch_size >= plan.n,
            returned=getattr(found.chosen.sample, "returned", ()),
            means=0 if found.loss is None else found.loss.means,
            last="" if found.loss is None else found.loss.last,
        )
        self._ranks, self._sharded, self._key = ranks, request.sharded, request.checkpoint_key
        self._streams = streams = RunStreams(ranks, request.noise_seed, earlier)
        queue = queue_of(plan, self._units, ranks, streams, sharded=self._sharded)
        self._iterates = Iterates(
            dict(zip(self._engine.names, self._engine.parameters, strict=True)),
            request.projection,
            streams.common("random iterate") if request.random_iterate else None,
            ranks,
        )
        self._released_gradients = ReleasedGradients(
            self._engine, self.optimizers, self._iterates.project
        )
        ranks.arrive("dpoptim.attach")
        self._owns_ledger, self._seeded = request.ledger is None, streams.seed is not None
        ledger = request.ledger or Ledger(neighboring=plan.neighboring)
        self._ledger = ranks.ledger(ledger.of_units(found.units.name))
        if self._owns_ledger:
            weakref.finalize(self, self._ledger.close)
        deal = ranks.dealer(streams.common("ranks of waiting"))
        earlier = earlier.of_this_rank(
            found.identity, self._ledger, ranks, self._engine.totals, deal, self._own_records
        )
        gate = Gate(
            event=plan.event,
            neighboring=plan.neighboring,
            query=plan.query,
            releases=plan.steps,
            ledger=None if plan.noise_multiplier == 0 else self._ledger,
            noise=streams.own("gaussian noise"),
            label=request.label,
            resume=earlier.gate,
            checkpoint=earlier.digest,
            part_of=plan.event_of_part,
            joined=not reads_sums(plan),
        )
        told = train_set if ranks.rank == 0 and not self._seeded else None
        self._other_runs = OtherRuns(
            self, plan, told, gate, ledger.id, found.units.name, earlier.reservation
        )
        self._steps = self._handed_over.steps = Steps(plan, self._engine, queue, gate, ranks)
        self._loader = BatchLoader(
            plan,
            train_set,
            request.collate_fn,
            self._units,
            queue,
            self._engine,
            self._steps,
            self._released_gradients,
            ranks,
            streams,
            sharded=self._sharded,
            check=self._loss,
            loss=request.loss,
        )
        self._caveats, self._saved_at, self._left = earlier.caveats, earlier.steps_done, False
        self._attached = Attached(
            found.wrapping,
            self.optimizers,
            self._engine,
            self._steps,
            self._released_gradients,
            self._chosen,
            self._iterates,
            BareLosses(self._engine, self._handed_over),
            request.wrappers,
        )
        self._loader.apart = self._attached.set_aside
        self._other_runs.warn()
        found.warn(released=told is not None and plan.noise_multiplier > 0)
        if earlier.contents is None:
            self._attached.put_on()
        else:
            self._attached.restore(earlier.contents)
            self._steps.restore(earlier.contents)
            self._attached.put_on()
            self._attached.redo(earlier.contents["unfinished"])
        ranks.arrive("dpoptim.attach")

    @property
    def _own_records(self) -> int | None:
        """How many are in this process alone; None where all have the same."""
        return self._units.count if self._sharded else None

    def _require_attached(self) -> None:
        if not self._attached.on:
            raise PrivacyError(
                "this training has been detached. Fix: draw batches inside the `with` block; `with "
                "private:` enters it again where it stopped, on the same charge."
            )

    # ---- checkpoints ----------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write a checkpoint for ``attach(..., resume=path)``: model, optimizers, privacy state.

        **The file is a secret, like the data**: it holds who takes part in coming steps, what
        error feedback remembers, and the noise that correlated mechanisms will take back. To
        publish a model, save ``model.state_dict()``. A run that was left can still be saved: the
        checkpoint is of where it stopped.

        What some of several optimizers have not used yet of the last release is not saved. The run
        may go on from the file if the `with` is left in this state, or not at all (the process
        died); left later, the run counts as completed.

        Args:
            path: an older checkpoint there is replaced, anything else refused; readable by its
                owner alone.

        Of several processes, all call it after the same step; each writes a part beside the file.

        Raises:
            RankError: another process does something else; named.
            PrivacyError: in the middle of a step, or something was changed that may not be.
            LedgerError: the ledger, which is told of the file first, cannot be written.
            ValueError: a state dict holds what could not be read back. OSError: the file cannot be
                written. What was there is unchanged.
        """
        self._steps.refuse_interrupted()
        self._attached.refuse_other_weights()
        if self._steps.gate.ended:
            raise PrivacyError(
                "private.save was called after private.finish: an ended run cannot go on. Fix: "
                "save model.state_dict()."
            )
        if not self._attached.on:  # left: a step that was begun is done again
            refuse_several_processes(self._ranks)
            self._steps.restart()
            if self.steps_done < self.plan.steps:
                self._steps.gate.reenter()
        elif self._steps.state != "idle":
            raise PrivacyError(
                "private.save was called in the middle of a step. Fix: save after optimizer.step() "
                "for the last microbatch of a batch, such as where private.finished_step is true."
            )
        refuse_changed_parameters(self._engine, everything=True)
        self._ranks.begin(SAVE, self.steps_done)
        contents = {
            "identity": self._prepared.identity,
            "durable": self._ledger.durable,
            "caveats": self._caveats_by_now(),
            "streams": self._streams.reached(),
            **self._attached.state(),
            **common_state(
                self._steps.secret_state(), self._ranks, self._engine.totals, self._own_records
            ),
        }
        save_with_parts(
            Path(path),
            contents,
            key=self._key,
            announce=self._steps.gate.note_checkpoint,
            ranks=self._ranks,
        )
        self._saved_at = self.steps_done

    # ---- iterates -------------------------------------------------------------------------------

    def swap_random_iterate(self) -> None:
        """Exchange the trained parameters with the iterate that ``random_iterate`` has kept.

        A second call undoes it, as training that goes on, and `save`, ask for.

        Raises:
            PrivacyError: none is kept.

        **Guarantee.** That of the run: the iterate was released, and coins chose it.
        """
        self._attached.swap_iterate()

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
            RankError: of several processes, not all call it after the same step; named.

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
        self._ranks.begin(FINISH, self.steps_done)
        self._steps.end(refund=refund)

    @property
    def why_no_refund(self) -> str:
        """Why ``finish(refund=True)`` could give nothing back; "" if it can. Public."""
        return self._steps.gate.why_nothing_is_returned

    def detach(self) -> None:
        """Take everything off model and optimizer, as leaving the ``with`` does; repeatable."""
        self._loader.restore_randomness()
        self._see_phases()
        self._attached.take_off()

    def _attach_again(self) -> None:
        """Go on in the process that left the run: the same batches, noise, counts and charge.

        Raises:
            PrivacyError: all steps are done, this is a forked process, or the model is attached
                elsewhere or has become another one.
            LedgerError: the ledger cannot be written.
        """
        self._steps.refuse_interrupted()
        refuse_several_processes(self._ranks)
        refuse_another_program(
            self.plan,
            self._engine,
            self.optimizers,
            same=self._prepared.same_as_before(),
            choose=self._prepared.chosen_now,
        )
        self._steps.gate.reenter()
        self._steps.restart()
        self._attached.put_on()
        self._left = True

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a private training cannot be pickled or copied: it holds sums and noise that must not "
            "be stored. Save model.state_dict() and optimizer.state_dict(), which hold released "
            "numbers only; private.save(path) writes a secret file to go on from."
        )

    def __enter__(self) -> Self:
        """Attach the training, a left one again where it stopped, on the same charge."""
        if not self._attached.on:
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
            if self._ranks.size == 1 and not self._steps.gate.ended:
                say_how_to_go_on(error, self.steps_done, self.plan.steps)
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
        if error is None:
            self._attached.share_parts(self._ranks)
