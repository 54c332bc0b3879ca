"""Findings of attaching about model, loss and data before anything is reserved or drawn."""

import pickle
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpoptim.assumptions import enforced
from dpoptim.distributed.ranks import Ranks
from dpoptim.distributed.user_collectives import user_collectives_refused
from dpoptim.distributed.wrapping import wrapping_of
from dpoptim.errors import NotByThisWayError, PrivacyError, SamplesInteractError
from dpoptim.gate import SelectedRows
from dpoptim.gradients.engine import Engine, Reduction
from dpoptim.gradients.isolation import Isolation, require_choice
from dpoptim.gradients.watch.contents import Contents
from dpoptim.gradients.watch.plain_attributes import PlainAttributes
from dpoptim.gradients.watch.plain_values import PlainValues
from dpoptim.plan import Plan
from dpoptim.runtime.torch_internals import checkpointing_served, pytree
from dpoptim.training.agreed import agree_on_run
from dpoptim.training.batches.privacy_units import units_of
from dpoptim.training.checkpoints.checkpoint import identity_of
from dpoptim.training.engines import engine_for, training_method
from dpoptim.training.held_gradients import gradients_put_back
from dpoptim.training.refusals import (
    refuse_engine,
    refuse_other_unit,
    refuse_places_of_persons,
    refuse_unsupported,
)
from dpoptim.training.request import Request
from dpoptim.training.tables import totals_of_tables
from dpoptim.training.trials.carried_values import passes, refuse_carried
from dpoptim.training.trials.costs import with_cost
from dpoptim.training.trials.deterministic_runs import same_made_up_records
from dpoptim.training.trials.first_passes import BY_LOSS, OutputsMixedError
from dpoptim.training.trials.interactions import NothingAloneError
from dpoptim.training.trials.isolation import (
    Chosen,
    IsolationWarning,
    after_loss,
    choose_isolation,
)
from dpoptim.training.trials.isolation_words import by_what_changed
from dpoptim.training.trials.kept_values import KeptValues
from dpoptim.training.trials.loss_check import (
    NOT_CHECKED,
    LossCheck,
    LossNotCheckedWarning,
    check_loss,
)
from dpoptim.training.trials.own_generators import found_once
from dpoptim.training.trials.probe import positions_per_layer

JOINED = enforced(
    "the gradients of a record's several inputs in one call of the model are clipped as one"
)


class Prepared:
    """Model, optimizers and data as they were checked, and the engine that they need.

    Attributes:
        wrapping: of the model, and what it wraps.
        units: what an index stands for.
        chosen: how records are kept apart.
        loss: what was found of the loss, if there is one.
        engine: not attached yet.
        read: what loss and collate function read beside batch and model, after they were tried.

    Raises:
        PrivacyError, ValueError, TypeError: what cannot be trained privately; nothing is changed.
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
        require_choice(request.isolation, request.batch_axis)
        refuse_unsupported(
            plan, model, optimizers, train_set, request.loss_reduction, request.ledger
        )
        self.plan, self.optimizers, self.train_set = plan, tuple(optimizers), train_set
        self._request, self._ranks = request, ranks
        self.wrapping = wrapping_of(model)
        self.model = self.wrapping.module
        self.units = units_of(
            train_set, request.rows_per_record, request.rows_reduction, request.persons
        )
        refuse_other_unit(plan, self.units)
        refuse_places_of_persons(plan, self.units, sharded=request.sharded)
        self._row = self._a_row()
        self.read: KeptValues | None = None
        self._by_loss = False  # the loss asked for another way than the model
        self.chosen, self.loss, positions = self._tried()
        self.engine = self._engine(positions)
        self.engine.takes_bare = self.loss is None or not self.loss.labels
        refuse_engine(plan, self.engine, self.optimizers)

    def _tried(self) -> tuple[Chosen, LossCheck | None, dict[str, int]]:
        """Try the model and the loss on made-up records."""
        attributes = PlainAttributes(Contents.of(self.model))
        with self._trying() as values:
            try:
                chosen = self._chosen_isolation(self._row, self._request.batch_axis)
                loss = self._checked_loss(chosen)
            except OutputsMixedError as mixed:
                if self._request.loss is None or not self._may_be_slower():
                    raise
                try:
                    chosen, loss = self._alone_by_loss()
                except NothingAloneError:  # `mixed` would offer records alone
                    raise
                except SamplesInteractError as error:
                    seen = str(mixed).replace(BY_LOSS, "")  # it was tried
                    raise SamplesInteractError(f"{seen} The loss uses them: {error}") from None
            except NotByThisWayError as error:
                if not self._may_be_slower():
                    raise
                self._by_loss = True
                chosen, loss = self._by_another_way(chosen, error)
            batch = -(-self.plan.batch_size * self.units.rows.per_record // self._ranks.size)
            attributes.compare(Contents.of(self.model), everything=False)
            if attributes.change:
                chosen = replace(chosen, basis=by_what_changed(chosen.basis))
            if not self.wrapping.spread:
                asked, rows = self._request, self.units.rows.per_record
                runs = passes(self.model, asked.loss, asked.collate_fn, self._row, rows, chosen)
                refuse_carried(self.model, values, runs)
            chosen = with_cost(chosen, self.model, self.wrapping, batch, self.plan.steps)
            return chosen, loss, positions_per_layer(self.model, chosen.sample)

    def _alone_by_loss(self) -> tuple[Chosen, LossCheck | None]:
        """Records alone, for a model that returns mixtures of them, which the loss leaves out.

        Raises:
            SamplesInteractError: it does not.
        """
        with suppress(NotByThisWayError):
            self._checked_loss(Chosen(Isolation.of("rules"), (), None))
        self._by_loss = True
        reason = (
            "each record's loss is its own, though the model returns mixtures of records, or "
            "branches on a number of the whole batch (a residual that ends an iteration, top_db, "
            "an adaptive step)"
        )
        fix = "a model that decides by each record's own number, or by as many steps for all"
        other = after_loss(Isolation.of("alone"), None, reason, fix)
        return other, self._checked_loss(other)

    def _may_be_slower(self) -> bool:
        """Whether another way may be taken by itself; processes that differ in it hear so later."""
        return (
            self._request.isolation == "auto"
            and self.units.rows.per_record == 1
            and training_method(self.plan).value_bound is None
        )

    def _by_another_way(
        self, chosen: Chosen, error: NotByThisWayError
    ) -> tuple[Chosen, LossCheck | None]:
        """By the first way that the loss allows; with records alone, any loss does."""
        reason, fix = error.reason, error.fix
        for other in self._other_ways(chosen, error):
            try:
                return other, self._checked_loss(other)
            except NotByThisWayError as also:
                if also.fix not in ("", error.fix):  # another cause, which is the one to mend
                    reason, fix = f"{error.reason}, and in a faster way {also.reason}", also.fix
            except PrivacyError:
                continue
        other = after_loss(Isolation.of("alone"), chosen.sample, reason, fix)
        return other, self._checked_loss(other)

    def _other_ways(self, chosen: Chosen, error: NotByThisWayError) -> Iterator[Chosen]:
        """The loss calls the model once for several inputs of a record; second axes; ``vmap``."""
        axis = chosen.isolation.batch_axis
        if not (chosen.isolation.alone or axis):
            for joined in ("by batches", "by records"):
                isolation = replace(chosen.isolation, joined=joined)
                yield replace(chosen, isolation=isolation, basis=(*chosen.basis, JOINED))
        if axis == 0 and self._request.batch_axis is None:
            with suppress(PrivacyError):
                turned = self._chosen_isolation(self._row, batch_axis=1)
                if turned.sample is not None and not turned.isolation.alone:
                    yield turned
        if not chosen.isolation.enforced:
            vectorised = Isolation.of("vmap", axis)
            yield after_loss(vectorised, chosen.sample, error.reason, error.fix)

    def chosen_now(self) -> Chosen:
        """How the model's records would be kept apart as it is now."""
        if self._by_loss:
            return self.chosen  # which suits any model
        with self._trying():
            return self._chosen_isolation(self._a_row(), self._request.batch_axis)

    def _chosen_isolation(self, row: Any, batch_axis: int | None) -> Chosen:
        one: Any = [row]
        asked = self._request
        return choose_isolation(
            *(self.model, one, asked.isolation, batch_axis, self.wrapping, asked.collate_fn),
            loss=asked.loss,
        )

    @contextmanager
    def _trying(self) -> Iterator[PlainValues]:
        """Around trials of the model, which leave nothing in it; with the values it has before."""
        values = PlainValues(self.model)
        drawn = same_made_up_records(self.model) if self.wrapping.spread else nullcontext()
        with (
            user_collectives_refused("the model, loss or collate_fn"),
            self.wrapping.trying(self._ranks),
            found_once(),
            drawn,
            checkpointing_served(),
            gradients_put_back(self.model),
        ):
            try:
                yield values
            finally:
                values.put(values.before)

    def _a_row(self) -> Any:
        """A row for its form, rank 0's: those that try two forms may find two isolations."""
        row = self.units.a_row(self.train_set)
        if self.wrapping.spread:
            return self.wrapping.trial_rows([row], self._ranks)[0]
        if self._ranks.size == 1:
            return row
        first = self._ranks.from_first(partial(as_bytes, row))
        return row if first is None else pickle.loads(first)

    def _checked_loss(self, chosen: Chosen) -> LossCheck | None:
        request = self._request
        if request.loss is None:
            return None
        functions = {"loss": request.loss, "collate_fn": request.collate_fn}
        kept = KeptValues(functions, self.model)
        found = check_loss(
            self.model,
            request.loss,
            self.train_set,
            self._row,
            request.collate_fn,
            request.loss_reduction,
            self.units,
            chosen.isolation,
            self.wrapping,
            self._ranks,
            expected=-(-self.plan.batch_size // self._ranks.size),
            by_name=request.isolation == "alone",
        )
        self.read = KeptValues(functions, self.model)
        return replace(found, keeps=kept.changed())

    @property
    def reduction(self) -> Reduction | None:
        """The reduction of the losses that `backward` gets, if they are scalars."""
        found = None if self.loss is None else self.loss.scalar_reduction
        return self._request.loss_reduction or found

    @property
    def checked(self) -> str | None:
        """The reduction of the loss that was tried, ``"none"`` of one a record; None: untried."""
        return None if self.loss is None else self.loss.loss_reduction

    def _engine(self, positions: dict[str, int]) -> Engine:
        totals = self.wrapping.totals(self._ranks)
        if isinstance(self.plan.query, SelectedRows):
            isolation = self.chosen.isolation
            totals = totals_of_tables(self.model, self.optimizers, isolation, self._ranks)
        return engine_for(
            self.plan,
            self.model,
            self.chosen,
            self.reduction or "mean",
            partial_backward=self._request.partial_backward,
            rows=self.units.rows,
            totals=totals,
            positions=positions,
            placement=self.wrapping,
        )

    def warn(self, *, released: bool) -> None:
        """Tell of a slow way, and of a loss that nobody has checked.

        Whoever makes errors of these has the model as it was.

        Args:
            released: whether the model may be, with a guarantee, and is told of in this process.
        """
        if self.chosen.message:
            warnings.warn(self.chosen.message, IsolationWarning, stacklevel=5)
        if released and self.loss is None and not self.chosen.isolation.alone:
            warnings.warn(NOT_CHECKED, LossNotCheckedWarning, stacklevel=5)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The parts of the run that must stay the same, in all ranks, which ask together."""
        request = self._request
        count = agree_on_run(
            self._ranks,
            self.plan,
            self.engine,
            self.optimizers,
            self.train_set,
            self.units,
            {
                "loss_reduction": self.reduction,
                "partial_backward": request.partial_backward,
                "noise_seed": request.noise_seed,
                "projection": request.projection,
                "random_iterate": request.random_iterate,
            },
            sharded=request.sharded,
        )
        # what each rank has for itself may be cut otherwise where the run goes on
        places = "" if request.sharded else self.units.places_in(self.train_set, self.plan)
        return self._identity(count) | {"places of records": places}

    def same_as_before(self) -> bool:
        """Whether the names and shapes still are those of `identity`; in one process."""
        return self._identity(self.units.count).items() <= self.identity.items()

    def _identity(self, count: int) -> dict[str, Any]:
        found = identity_of(self.plan, self.engine, self.optimizers, self.units, count)
        return found | {"iterates": [self._request.projection, self._request.random_iterate]}


def as_bytes(row: Any) -> bytes | None:
    """A row by value, without what its tensors are views of; None where it cannot be sent."""
    try:
        return pickle.dumps(pytree.tree_map_only(Tensor, Tensor.clone, row))
    except (pickle.PicklingError, TypeError, AttributeError):
        return None
