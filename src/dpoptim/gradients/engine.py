"""The engine: per-record clipped gradient sums of any model, from one ordinary backward pass.

Everything in here is private. The sums live in buffers of the engine; ``.grad`` stays None.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from dpoptim.clipping import ClippingRule
from dpoptim.errors import PrivacyError
from dpoptim.gradients.accumulation.totals import MakeTotals, Totals
from dpoptim.gradients.arithmetic.precision import exact_arithmetic
from dpoptim.gradients.arithmetic.products import Groups, consecutive_groups, margin
from dpoptim.gradients.backward_pass import BackwardPass, BackwardRecorder, LayerUse
from dpoptim.gradients.choose_formula import PublicSizes
from dpoptim.gradients.clipped_sum import ClippedSum, Observer
from dpoptim.gradients.hooks.hook_manager import HookManager
from dpoptim.gradients.hooks.single_record_hooks import hooks_for
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.per_sample.per_sample_grads import PerSampleGrad
from dpoptim.gradients.per_sample.tied import merge
from dpoptim.gradients.placement import IN_PLACE, Placement
from dpoptim.gradients.rows_of_records import ONE_ROW, RowsOfRecords
from dpoptim.gradients.trained_parameters import TrainedParameters
from dpoptim.gradients.watch.model_watch import ModelWatch
from dpoptim.noise.few_rows import Vector
from dpoptim.runtime.torch_internals import run_backward

Reduction = Literal["mean", "sum"]
HandedOver = Literal["bare", "scalar", "vector"]  # "bare": whose graph shows nothing


class Engine:
    """Sums the clipped per-record gradients of a model while attached to it.

    Args:
        model: any module; it keeps its class and its state-dict keys.
        clipping: the bound on each record, and how many sums it adds to.
        capacity: B of the theorem in `products`; public. In larger batches, which come about where
            a nominal n is far below the size of the data, the margin no longer covers the rounding
            of a mean's factor.
        reduction: how a loss that the caller differentiates combines the rows of one backward pass.
        partial_backward: allow several backward passes over parts of a delivered microbatch. The
            parts must be disjoint, which only the caller can know; without it each takes exactly
            one pass over all its rows.
        positions: how many positions (of a sequence, say) each record has in a layer, by the
            layer's name; public, from the shape of a row. Only speed depends on it.
        rows: that make up a record.
        tied: parameters of the model that count as uses of another one (of the same shape): sums
            and norms are those of the two per_sample_grads added up, cross terms included.
        isolation: how records are kept apart; by rules, unless told otherwise.
        totals: where the sums live.
        placement: where the parameters are in forward passes, and otherwise.

    Attributes:
        physical_records: the most records of a backward pass; public. Decides how sums are formed.
        rows_open: rows delivered that have not been through a backward pass. Private.
        present: which rows of the delivered records are there, see `begin_microbatch`. Private.
        fixed_shape: whether every physical batch has the same public number of rows; see
            `training.batches.slots`.
        handed: how the loss has come that is being differentiated.
        handed_over: how losses have come so far.

    Raises:
        PrivacyError: a layer or option that cannot be clipped record by record, by name.

    **Guarantee.** For two batches that meet the conditions of the theorem in `products`, the sums
    that `take` returns differ by at most ``clipping.norm`` in Euclidean norm, rounding included.
    """

    takes_scalars = True  # beside one loss for each record
    takes_bare = True  # losses that the caller differentiates

    def __init__(
        self,
        model: nn.Module,
        clipping: ClippingRule,
        *,
        capacity: int,
        reduction: Reduction = "mean",
        partial_backward: bool = False,
        positions: Mapping[str, int] | None = None,
        rows: RowsOfRecords = ONE_ROW,
        tied: Mapping[nn.Parameter, nn.Parameter] | None = None,
        isolation: Isolation | None = None,
        totals: MakeTotals = Totals,
        placement: Placement | None = None,
    ) -> None:
        self.placement = placement or IN_PLACE
        self.placement.settle()
        self.model, self.clipping = model, clipping
        self.capacity, self.reduction = capacity, reduction
        self.physical_records, self.fixed_shape = capacity, False
        self.partial_backward = rows.whole_passes_only(partial_backward)
        self.positions, self.rows = dict(positions or {}), rows
        self.isolation = isolation or Isolation()
        self._trained = TrainedParameters(model, {**(tied or {}), **self.placement.used})
        self.names, self.parameters = self._trained.names, self._trained.parameters
        self.layers, self.places = self._trained.layers, self._trained.places
        clipping.units(self.layers)  # refuses bounds that are too small
        self.totals = totals(self.parameters, clipping.directions)
        self.groups: Groups | None = None
        self.present: Tensor | None = None
        self.rows_open = 0
        self.null = False
        self.handed: HandedOver = "bare"
        self.handed_over: set[tuple[HandedOver, Reduction]] = set()
        self.refusal: PrivacyError | None = None  # of a backward pass on the model, if one comes
        self.observer: Observer | None = None  # private
        self.hooks: HookManager | None = None
        self.state: ModelWatch | None = None  # what nobody may write while attached
        self.reads_in_turn = self.writes_attributes = False  # see `ModelWatch`, `PlainAttributes`
        self.recorder = BackwardRecorder(may_round=reduction == "sum")

    @property
    def takes_parts(self) -> bool:
        """Whether a backward pass may have any part of the rows that are open."""
        return self.partial_backward and self.rows_open > 0

    def attach(self, *, watched: bool = True) -> None:
        """Hook the model's layers, ``watched`` for `refuse_changes`; `detach` undoes it all."""
        with self.placement.in_forward():
            self.hooks = hooks_for(self.model, self.recorder, self.isolation)
        try:
            self.recorder.close = self._close
            self.placement.settle()
            self.state = self.hooks.watch_state() if watched else None
        except BaseException:
            self.detach()
            raise
        self.reads_in_turn = self.state is not None and self.state.in_turn

    def detach(self) -> None:
        if self.hooks is not None:
            self.hooks.undo()
        self.hooks = self.state = None
        self.recorder.close = self.recorder.refuse_undelivered

    def begin_microbatch(
        self,
        records: int,
        *,
        null: bool = False,
        groups: Groups | None = None,
        present: Tensor | None = None,
    ) -> None:
        """Announce the next physical batch.

        Args:
            records: in it.
            null: a placeholder whose gradient counts as zero.
            groups: that the rows are summed in, chosen record by record (condition 3 in
                `products`). None: consecutive ones, for neighbours that keep every other record in
                its place.
            present: which rows of the records are there, see `RowsOfRecords.of_records`. None: all.

        Raises:
            PrivacyError: rows of the microbatch before have not been through a backward pass.
        """
        self.require_all_closed()
        self.placement.settle()
        self.recorder.begin(self._trained.stored_narrow)
        self.rows_open, self.null = records * self.rows.per_record, null
        self.groups, self.present = groups, present
        if self.hooks is not None:
            self.hooks.see_microbatch(self.rows_open)
        if self.state is not None:
            self.state.begin()

    def backward(
        self,
        loss: Tensor,
        reduction: Reduction = "sum",
        handed_over: HandedOver = "vector",
    ) -> None:
        """Differentiate a loss of the delivered rows.

        Args:
            loss: one for each row, shape (rows,), or a scalar.
            reduction: how a scalar was made of the rows' losses, whatever the engine was made for.
            handed_over: what the caller gave.
        """
        with self.handing(loss, reduction, handed_over):
            run_backward(loss)

    @contextmanager
    def handing(self, loss: Tensor, reduction: Reduction, how: HandedOver) -> Iterator[None]:
        """Around the differentiation of a loss: see `backward`."""
        before = self.reduction
        self.reduction, self.handed = reduction, how
        if self._common_factor:
            self.recorder.look(loss)
        try:
            yield
        finally:
            self.reduction, self.handed = before, "bare"

    def refuse_changes(self, *, everything: bool = False) -> None:
        """Refuse a model that has kept anything of a batch: see `ModelWatch.refuse_changes`."""
        self.placement.settle()
        if self.state is not None:
            self.state.refuse_changes(everything=everything)
            self.writes_attributes |= self.state.plain.change

    def require_all_closed(self) -> None:
        """Refuse to leave delivered rows out: private data may have made that choice."""
        if self.rows_open and not self.null:
            raise PrivacyError(
                "a batch was delivered, but not all of its rows went through private.backward("
                "losses). Fix: call it on the losses of the whole batch, also when they are not "
                "finite (the engine leaves out such records by itself)."
            )

    def _close(self, finished: BackwardPass) -> None:
        with torch.set_grad_enabled(False), exact_arithmetic():
            uses = finished.uses(self._trained.places_of, self.rows_open)
            if not uses:
                return
            if self.refusal is not None:
                raise self.refusal
            rows = uses[0][0].records
            if not self.rows_open:
                self.recorder.refuse_undelivered(finished)
            turned = isinstance(self.hooks, HookManager) and self.hooks.turned
            inputs = self.isolation.inputs_of_each(rows, self.rows_open, turned=turned)
            rows //= inputs
            allowed = rows <= self.rows_open if self.partial_backward else rows == self.rows_open
            if not allowed:
                raise PrivacyError(
                    "a backward pass did not cover exactly the rows that were delivered. Fix: one "
                    "pass on the whole batch, records on the first axis; where a record has several"
                    " inputs (pairs, a GAN's real and fake ones), model(a) and model(b): add both "
                    "losses and make one pass; or give attach the loss, which shows how "
                    "model(torch.cat((a, b))) joins them; for parts, partial_backward=True."
                )
            if self._common_factor:
                self.recorder.refuse_rounding()
            self.rows_open -= rows
            self.recorder.looks = self.handed == "bare" and not self.recorder.may_round
            self.handed_over.add((self.handed, "mean" if self._common_factor else "sum"))
            if self.null or not rows:
                for place in range(len(self.parameters)):
                    self.totals.finish(place)
                return
            records = rows // self.rows.per_record
            gradients = self._gradients(uses, records, inputs)
            # each is forgotten when it has been summed, and so must be what it is made of
            uses.clear()
            finished.entries.clear()
            self._add_clipped(gradients, records)

    def _gradients(
        self, uses: Sequence[tuple[LayerUse, Mapping[str, int]]], records: int, inputs: int
    ) -> dict[int, PerSampleGrad]:
        """The pass's per-sample gradients, by the places of parameters; of ``inputs`` a row."""
        found: dict[int, list[PerSampleGrad]] = {}
        most, of_all = self.physical_records, self._trained.entries
        others = self.totals.travels, self._common_factor, len(self.clipping.directions[0])
        for use, places in uses:
            positions = self.positions.get(use.layer, 0) * self.rows.per_record * inputs or None
            public = PublicSizes(self.capacity, most, of_all, positions, *others)
            formed = use.per_sample_grads()
            for key, place in places.items():
                of_rows = RowsOfRecords(inputs).of_records(formed[key], use.records, None)
                self.totals.look(place, of_rows, self.present, self.rows.per_record)
                of_records = self.rows.of_records(of_rows, use.records // inputs, self.present)
                found.setdefault(place, []).append(of_records.chosen(public))
        entries = {place: self.parameters[place].numel() for place in found}
        return {i: merge(each, records, entries[i], most) for i, each in found.items()}

    def _add_clipped(self, gradients: dict[int, PerSampleGrad], records: int) -> None:
        """Add the clipped sum of one pass to the engine's buffers."""
        first, rows = self.parameters[0], records * self.rows.per_record
        clipped = ClippedSum(
            self.clipping.units(self.layers),
            self.margin(),
            self.rows.from_loss(
                records, self.present, first, None if self.reduction == "sum" else float(rows)
            ),
            records,
            first.device,
            self._groups_of(records),
            self._common_factor,
        )
        clipped.add(gradients, self.totals.sums, self.observer, self.totals.finish)

    def _groups_of(self, records: int) -> Groups:
        """The groups that the records of a pass are summed in."""
        if self.partial_backward:
            # which records share a pass is the caller's affair, so none may share a product
            return [[1]] * records
        if self.groups is None:
            return consecutive_groups(records)
        if sum(map(sum, self.groups)) != records:
            raise ValueError("groups must add up to the records of the pass.")
        return self.groups

    @property
    def _common_factor(self) -> bool:
        """Whether all gradients of a pass carry a factor that depends on its other records."""
        return self.reduction == "mean" and not self.fixed_shape

    def margin(self) -> float:
        """Share of the clip norm left to rounding where the loss is reduced so; see `products`."""
        return margin(self._trained.narrowest, self.capacity, common_factor=self._common_factor)

    def close_delivered(self) -> None:
        """Take all delivered rows as closed, by losses one each, whose sums were added."""
        self.rows_open = 0
        self.handed_over.add(("vector", "sum"))

    def take(self) -> list[Tensor]:
        """Return the logical batch's clipped sum, a flat float64 vector a device; start afresh.

        Zeros where no row was closed: an empty batch, or parameters that no loss reached. See
        `split`.
        """
        return self.take_sums()[0]

    def take_sums(self) -> list[list[Tensor]]:
        """All sums of the clipping rule, each as `take` returns it."""
        self._begin_step()
        return self.totals.take()

    def take_by_parameter(self) -> Sequence[Vector]:
        """The first sum alone, in less memory; see `Totals.take_by_parameter`."""
        self._begin_step()
        return self.totals.take_by_parameter()

    def restart(self) -> None:
        """Begin the logical batch again: what was added of it is forgotten."""
        self._begin_step(again=True)
        self.totals.restart()

    def _begin_step(self, *, again: bool = False) -> None:
        self.rows_open = 0
        if self.state is not None:
            self.state.end(again=again)

    def write_means(self, released: list[Tensor], divisor: float) -> None:
        """Write the gate's sums, divided and rounded to the parameters' dtype, into ``.grad``."""
        self.totals.write_means(released, divisor)

    def split(self, buffers: list[Tensor]) -> list[Tensor]:
        """Views of what `take` returned, one in the shape of each parameter."""
        return self.totals.split(buffers)
