"""Public figures of a run while it trains, its guarantee and the guarantee's basis."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console

from dpoptim.accounting.guarantee import SEEDED, Guarantee, rounded_up
from dpoptim.accounting.ledger import Ledger
from dpoptim.assumptions import Assumption
from dpoptim.distributed.ranks import Ranks
from dpoptim.gradients.engine import Engine, Reduction
from dpoptim.gradients.per_sample import native
from dpoptim.notebook import as_table
from dpoptim.plan import Plan
from dpoptim.training.assumptions import (
    ESCAPES,
    WRITES,
    basis_of_caveats,
    basis_of_ledger,
    basis_of_loss,
    basis_of_ranks,
    caveats_of,
    in_order,
)
from dpoptim.training.attached import Attached
from dpoptim.training.batches.batch_loader import BatchLoader
from dpoptim.training.batches.privacy_units import Units
from dpoptim.training.batches.slots import basis_of_slots, less_lost_delta
from dpoptim.training.losses.handed_over import HandedOver
from dpoptim.training.other_runs import OtherRuns
from dpoptim.training.prepared import Prepared
from dpoptim.training.progress import show_progress
from dpoptim.training.steps import Steps
from dpoptim.training.trials.isolation import Chosen
from dpoptim.training.trials.loss_check import LossCheck


class PublicFigures:
    """The public side of `PrivateTraining`, which sets what these figures are read off.

    **Guarantee.** Everything here is determined by the plan, by what was released, and by what the
    program is.
    """

    plan: Plan
    _steps: Steps
    _engine: Engine
    _units: Units
    _ranks: Ranks
    _ledger: Ledger
    _owns_ledger: bool
    _other_runs: OtherRuns
    _loader: BatchLoader
    _attached: Attached
    _chosen: Chosen
    _handed_over: HandedOver
    _loss: LossCheck | None
    _reduction: Reduction | None
    _seeded: bool
    _sharded: bool
    _caveats: dict[str, bool]  # of the parts before
    _left: bool  # and entered again
    _prepared: Prepared
    _phases = False  # whether what the loss reads was seen to change

    def _require_attached(self) -> None:
        """Refuse what has no meaning outside of the `with` block."""
        raise NotImplementedError

    @property
    def steps_done(self) -> int:
        """Noisy steps taken so far (public), those that only looked for the clip norm included."""
        return self._steps.done

    @property
    def finished_step(self) -> bool:
        """Whether the last ``optimizer.step()`` moved the model; for schedulers."""
        return self._steps.moved

    def spent(self, delta: float | None = None) -> Guarantee:
        """The guarantee of what is reserved: the whole plan, however early the run stops.

        Nothing is spent only where the ledger knows of no release that anybody has begun: a run
        that goes on from a checkpoint counts what was released after it, too.

        Args:
            delta: state it at another delta than the plan's, 1e-14 < delta < 1.
        """
        guarantee = self._units.stated(
            self.plan.guarantee if delta is None else self.plan.guarantee_at(delta)
        )
        if not self._all_caveats()["varies"]:
            guarantee = less_lost_delta(self.plan, guarantee)
        if self._steps.gate.nothing_released:
            return dataclasses.replace(
                guarantee, epsilon=0.0, delta=0.0, accountant="nothing released", status="proven"
            )
        if self._all_caveats()["seeded"]:
            guarantee = dataclasses.replace(guarantee, notes=(*guarantee.notes, SEEDED))
        return guarantee

    @property
    def clip_norm(self) -> float:
        """The current clip norm; public. With a `PrivateQuantile` ``nan`` until it is found."""
        found = self._steps.clip_norm.found
        return self._engine.clipping.norm if found else math.nan

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise in each entry of the last released gradients; public.

        Before the first release, of the gradients to come; 0 without noise; ``nan`` where the
        noise is of a tree; the root mean square where parameters differ (`ScaledClipNorm`).
        Optimizers with a ``noise_std`` of their own, such as
        `dpoptim.optim.AdamBC`, are told it.
        """
        return self._steps.noise_std

    @property
    def share_unclipped(self) -> float:
        """The noisy, public share of unclipped gradients in the last step; ``nan``: none released.

        Gradients within 9 % of the clip norm count in part, so that no rounding turns a vote.
        """
        return self._steps.clip_norm.share_below

    def remaining(self) -> str:
        """Steps and budget that remain, for a person to read."""
        left = self.plan.steps - self.steps_done
        ledger = (
            "in memory, without a budget" if self._owns_ledger else str(self._ledger.remaining())
        )
        return f"{left} of {self.plan.steps} planned steps; ledger: {ledger}"

    @property
    def reservation(self) -> str | None:
        """The ledger's name for this run's reservation; None before it, or without noise."""
        return None if self._steps.gate.reservation is None else self._steps.gate.reservation.id

    @property
    def ledger(self) -> Ledger:
        """The ledger that the run is charged to: in memory, where none was given."""
        return self._ledger

    @property
    def model_is_as_left(self) -> bool:
        """Whether the model still is what the run made of it: see `Attached.is_as_left`."""
        return self._attached.is_as_left

    def left_weights(self, weights: Mapping[str, Any]) -> bool:
        """Whether a state dict is known to be what the run left: see `Attached.left`."""
        return self._attached.left(weights)

    @property
    def stated_plan(self) -> Plan:
        """The plan, with the unit that the run protects: what a certificate is of."""
        return self._units.planned(self.plan)

    @property
    def basis(self) -> tuple[Assumption, ...]:
        """The guarantee's basis, with the findings of attaching."""
        caveats = self._caveats_by_now()
        loss = basis_of_loss(self._loss, self._reduction, caveats, self._engine.isolation)
        ledger = basis_of_ledger(self._ledger.durable, self._other_runs.words())
        others = basis_of_caveats(caveats, resumed=bool(self._caveats))
        ranks = basis_of_ranks(
            self._ranks.size, sharded=self._sharded, by_person=self._units.persons is not None
        )
        checked = not caveats["collate"]
        slots = () if caveats["varies"] else basis_of_slots(self.plan, collate_checked=checked)
        of_model = (ESCAPES, *WRITES[self._engine.reads_in_turn], *self._chosen.basis)
        return in_order(
            (
                *loss,
                *self._units.basis(self.plan),
                *of_model,
                *ledger,
                *ranks,
                *others,
                *slots,
            )
        )

    @property
    def record_gradients(self) -> str:
        """Name of what forms single records' gradients: compiled functions, or PyTorch.

        Public. Which of them decides the last bits, as the processor does: a seeded run repeats
        to the bit where both are the same.
        """
        return native.kind()

    def describe(self) -> str:
        """The plan for a person to read, with what its guarantee rests on by now."""
        return self.stated_plan.describe(self.basis)

    def __repr__(self) -> str:
        return f"<PrivateTraining: {self.steps_done} of {self.plan.steps} steps, {self.spent()}>"

    def _repr_html_(self) -> str:
        """For notebooks: `describe` as a table."""
        return as_table(self.describe())

    def progress(self, items: Iterable[Any], console: Console | None = None) -> Iterator[Any]:
        """Iterate over `batches` or `steps` beside a progress bar: steps, time, epsilon reserved.

        Example::

            for batch in private.progress(private.batches()): ...
        """
        label = f"private steps (epsilon {rounded_up(self.plan.guarantee.epsilon)} reserved)"
        return show_progress(items, lambda: self.steps_done, self.plan.steps, label, console)

    def _see_phases(self) -> None:
        """Note whether loss and collate function read other values than when they were tried."""
        if self._attached.on and not self._phases and self._prepared.read is not None:
            self._phases = bool(self._prepared.read.changed())

    def _caveats_by_now(self) -> dict[str, bool]:
        self._see_phases()
        return self._all_caveats()

    def _all_caveats(self) -> dict[str, bool]:
        """Caveats of the guarantee, from all parts of the run."""
        found = caveats_of(
            self._engine,
            seeded=self._seeded,
            collate=self._loader.collates_unchecked,
            phases=self._phases,
        )
        found["varies"], found["left"] = self._loader.shapes_vary, self._left
        found["adds"] = self._handed_over.adds
        return {key: value or self._caveats.get(key, False) for key, value in found.items()}
