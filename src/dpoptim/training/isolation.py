"""Choice of the way of keeping records apart: the fastest that works, for each of its parts.

Tried on made-up records, against batches of one, before anything private is seen: layer rules for
all; then ``vmap`` for the modules in which these failed, for what surrounds them, and for the
whole model; then records alone.
"""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpoptim.assumptions import Assumption, enforced, trusted
from dpoptim.clipping import Clipping
from dpoptim.errors import PrivacyError, SamplesInteractError, quoted
from dpoptim.gradients.isolation import WHOLE_MODEL, Choice, Isolation
from dpoptim.gradients.layers.outside import OutsideUseError
from dpoptim.gradients.oracle import RecordsAlone, engine_sums, trainable
from dpoptim.gradients.placement import IN_PLACE, Placement
from dpoptim.gradients.refusals import watch_batch_statistics
from dpoptim.training.comparison import settled, tolerance_of
from dpoptim.training.freed_memory import freed_memory_given_back
from dpoptim.training.isolation_words import (
    ALONE,
    WAYS_IN_WORDS,
    WHOLE,
    basis_of,
    first_sentence,
    message_of,
)
from dpoptim.training.made_up import Sample, samples
from dpoptim.training.next_way import Failure, has_rule, places_of_records, promoted
from dpoptim.training.probe import positions_per_layer
from dpoptim.training.quiet import other_weights, put_back, quiet

NOT_FIRST = "its outputs do not have the batch axis first"
MOST_TRIALS = 16


class IsolationWarning(UserWarning):
    """Records are kept apart in a slower way than by rules for layers."""


@dataclass(frozen=True)
class Chosen:
    """Choice of `choose_isolation`.

    Attributes:
        isolation: how records are kept apart.
        basis: what to say of it among what a guarantee rests on.
        sample: a call of the model on made-up records; None where nobody knows how it is called.
        message: what to tell the user once; empty where rules serve every layer.
    """

    isolation: Isolation
    basis: tuple[Assumption, ...]
    sample: Sample | None
    message: str = ""


@freed_memory_given_back()
def choose_isolation(
    model: nn.Module,
    train_set: Dataset[Any],
    choice: Choice = "auto",
    batch_axis: int | None = None,
    placement: Placement = IN_PLACE,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Chosen:
    """Find the fastest way to keep records apart that gives each record its own gradient.

    Args:
        model: not attached.
        train_set: its record 0 shows the form of a record.
        choice: a way to take; "auto" to find out.
        batch_axis: the records' axis in the model's inputs; None to find out.
        placement: of the model's parameters.
        collate: makes the loop's batches; None: torch's.

    Raises:
        SamplesInteractError: the model mixes records, so that only each record's own batch could
            keep them apart; not where that, or ``vmap``, was chosen by name.
        PrivacyError: the way that was chosen does not serve this model.

    **Guarantee.** Only the structure, shapes and dtypes of record 0 are used, never its values.
    """
    watch_batch_statistics(model)
    if choice == "alone":
        return Chosen(Isolation.of("alone"), (enforced(ALONE),), None)
    if choice == "vmap":
        placement.refuse(Isolation.of("vmap"))
    with put_back(model):
        found, reason = working_sample(model, train_set, batch_axis, collate)
    if found is None:
        return unprobed(choice, batch_axis, reason)
    with quiet(model, lambda: found.outputs(model)):
        sample = found if choice == "vmap" else with_records_apart(model, found, batch_axis)
        if sample is None or (sample.folded and choice == "vmap"):
            return unprobed(choice, batch_axis, NOT_FIRST)
        trials = Trials(model, sample, placement)
        if not trials.finite:  # records without any token, say, where numbers are a mask
            sample = sample.with_ones()
            trials = Trials(model, sample, placement)
        isolation = Isolation.of("vmap" if choice == "vmap" else "rules", sample.axis)
        if not trials.finite:
            unknown = not_probed("gradients on random input are not finite")
            return Chosen(isolation, (unknown,), None)
        failure = trials.failure(isolation)
        if failure is not None and choice != "auto":
            raise trials.refusal(failure)
        first = failure
        if failure is not None:
            isolation = slower_way(model, sample, trials, isolation, failure)
        if isolation.folded and (gaps := with_gaps(model, sample, placement, isolation)):
            isolation, first = Isolation.of("alone"), first or gaps
        return Chosen(isolation, basis_of(isolation), sample, message_of(trials, isolation, first))


def with_gaps(
    model: nn.Module, sample: Sample, placement: Placement, isolation: Isolation
) -> Failure | None:
    """Why this way fails for records with masks; None if it does not, or if they cannot be tried.

    Positions that a mask selects, of all records in a row, look folded where the mask has no gaps.
    """
    try:
        trials = Trials(model, sample.with_gaps(), placement)
    except Exception:  # whatever the user's model raises on such input
        return None
    return trials.failure(isolation) if trials.finite else None


def unprobed(choice: Choice, batch_axis: int | None, reason: str) -> Chosen:
    """The way that is taken untried."""
    isolation = Isolation.of("vmap" if choice == "vmap" else "rules", batch_axis or 0)
    whole = (enforced(WHOLE),) if choice == "vmap" else ()
    return Chosen(isolation, (*whole, not_probed(reason)), None)


def after_loss(isolation: Isolation, sample: Sample | None, reason: str) -> Chosen:
    """Choice of a way that suits the loss, where for that reason the model's own does not."""
    message = (
        f"{WAYS_IN_WORDS[isolation.tier]}, because with the loss {reason}. Say "
        f"isolation={isolation.tier!r} to choose for yourself."
    )
    return Chosen(isolation, basis_of(isolation), sample, message)


def slower_way(
    model: nn.Module, sample: Sample, trials: "Trials", isolation: Isolation, first: Failure
) -> Isolation:
    """The next way after one that failed, by the first that does not."""
    isolation, failure = with_places(model, sample, trials, isolation, first)
    if failure is not None and sample.folded:  # a vectorised model would return another form
        return Isolation.of("alone")
    for _ in range(MOST_TRIALS):
        if failure is None or isolation.alone:
            return isolation
        isolation = promoted(model, isolation, failure)
        failure = None if isolation.alone else trials.failure(isolation)
    return Isolation.of("alone")


def working_sample(
    model: nn.Module,
    train_set: Dataset[Any],
    batch_axis: int | None,
    collate: Callable[[list[Any]], Any] | None,
) -> tuple[Sample | None, str]:
    """A call that the model takes, returning records on their axis; else None, and why."""
    reasons = []
    for candidate in samples(model, train_set, collate):
        sample = candidate.time_first() if batch_axis == 1 else candidate
        try:
            sample = sample.tried(model)
            if sample.returned:
                with_another_record(model, sample, (1.0,))  # takes others of this form, too
                return sample, ""
            reasons.append(NOT_FIRST)
        except PrivacyError:
            raise
        except Exception as error:  # whatever the user's model raises on made-up input
            reasons.append(f"the model raised {type(error).__name__} on random input")
    return None, reasons[0] if reasons else "records are not made of tensors"


def not_probed(reason: str) -> Assumption:
    return trusted(
        "the model treats records independently, and every layer has them on its first axis (not "
        f"tested on random inputs: {reason}; see dpoptim.check)",
    )


def with_records_apart(model: nn.Module, sample: Sample, batch_axis: int | None) -> Sample | None:
    """The sample; where its first axis is time, with the records on the second one.

    None: nobody can tell records from positions in what the model returns.

    Raises:
        SamplesInteractError: records are mixed on either axis.
    """
    if neighbours_are_invisible(model, sample):
        return sample
    if sample.folded:
        turned = sample.positions_first()
        return turned if neighbours_are_invisible(model, turned) else None
    if batch_axis is None:
        with suppress(RuntimeError):
            turned = sample.time_first().tried(model)
            if turned.returned and neighbours_are_invisible(model, turned):
                return turned
    raise SamplesInteractError(
        "records are mixed in the forward pass: replacing one changed the outputs of others. "
        "Usual causes: batch statistics, attention or sorting across the batch, records on another "
        "axis than the first (batch_axis=1). Fix: let each record's output depend on that record "
        'alone; or isolation="alone", where the loss leaves out what is mixed (similarities of all '
        "pairs, say)."
    )


@torch.no_grad()
def neighbours_are_invisible(model: nn.Module, sample: Sample) -> bool:
    """Whether another record, also an enormous one, leaves all other records' outputs alone."""
    before = sample.outputs(model)
    for sizes in ((1.0,), (1e6, 1e3, 10.0)):
        after = with_another_record(model, sample, sizes)
        if after is None:
            continue
        for pair in zip(before, after, strict=True):
            a, b = (out[1:] for out in pair)
            moved = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
            if a.numel() and not float(moved.max()) <= 1e-5 * float(
                a.nan_to_num(0.0, 0.0, 0.0).abs().max()
            ):
                return False
    return True


def with_another_record(
    model: nn.Module, sample: Sample, sizes: tuple[float, ...]
) -> list[Tensor] | None:
    """The outputs with another first record, of the first size that the model takes; or None."""
    for size in sizes:
        try:
            return sample.with_another_first(size).outputs(model)
        except ValueError:
            if len(sizes) == 1:
                raise
    return None


class Trials:
    """Clipped sums of made-up records, compared with those of batches of one."""

    def __init__(self, model: nn.Module, sample: Sample, placement: Placement) -> None:
        self.model, self.sample, self.placement = model, sample, placement
        with torch.no_grad():
            self._weights = [torch.randn_like(out) for out in sample.outputs(model)]
        alone = [self._part(range(i, i + 1)) for i in range(sample.rows)]
        self._alone = RecordsAlone(model, self._loss, alone, placement)
        norms = self._alone.squared.sqrt()
        self.finite = bool(norms.isfinite().all())
        clips_all_and_none = (norms.median() / 2, 2 * norms.max()) if self.finite else ()
        self._bounds = [max(float(each), 1e-6) for each in clips_all_and_none]
        self.seconds: dict[Isolation, float] = {}
        # of a model that no process holds whole, by formulas that keep no record's gradients
        positions = positions_per_layer(model, sample) if placement.spread else None
        self._sums = partial(engine_sums, placement=placement, positions=positions)

    def failure(self, isolation: Isolation) -> Failure | None:
        """Why this way does not give each record its own gradient; None if it does."""
        start = time.perf_counter()
        try:
            self.placement.refuse(isolation)
            shares = self._shares(isolation)
            again = partial(self._elsewhere, isolation)
            agrees = settled(list(shares.values()), again, tolerance_of(self.model, self.placement))
        except SamplesInteractError:
            raise
        except PrivacyError as error:
            known = error.layer is not None and error.layer in dict(self.model.named_modules())
            return Failure(
                first_sentence(str(error)),
                (error.layer or WHOLE_MODEL,) if known else (),
                outside=known and isinstance(error, OutsideUseError),
            )
        except Exception as error:  # whatever the user's model raises when it is run in another way
            return Failure(quoted(error))
        self.seconds[isolation] = time.perf_counter() - start
        if agrees:
            return None
        wrong = [name for name, share in shares.items() if not share <= 1]
        modules = tuple(dict.fromkeys(name.rpartition(".")[0] for name in wrong))
        return Failure(f"the gradient of {wrong[-1]!r} was not each record's own", modules)

    def factor(self, isolation: Isolation) -> float:
        """Time of such a pass over that of an ordinary one, on this batch."""
        ordinary = self._clock(range(self.sample.rows))
        if isolation.alone:
            return self.sample.rows * self._clock(range(1)) / ordinary
        return self.seconds[isolation] / len(self._bounds) / ordinary

    def refusal(self, failure: Failure) -> PrivacyError:
        return SamplesInteractError(
            "records are mixed, or the first axis of some layer is not the record: "
            f"{failure.reason}. Usual causes: positions of shape (T,) instead of (1, T), a "
            "(T, B, ...) layout, records sorted by length to be packed. Fix: "
            'isolation="auto", which finds another way; or keep the batch axis first, and records '
            "in their order (pack_padded_sequence(..., enforce_sorted=False))."
        )

    def _clock(self, indices: range) -> float:
        parameters, part = [*trainable(self.model).values()], self._part(indices)
        start = time.perf_counter()
        self.placement.gradients(self._loss(self.model, part), parameters)
        return time.perf_counter() - start

    def _part(self, indices: range) -> tuple[Sample, list[Tensor]]:
        weights = [w[indices.start : indices.stop] for w in self._weights]  # views: these are large
        return self.sample.records(list(indices)), weights

    @staticmethod
    def _loss(model: nn.Module, batch: tuple[Sample, list[Tensor]]) -> Tensor:
        sample, weights = batch
        terms = [(out * w).sum() for out, w in zip(sample.outputs(model), weights, strict=True)]
        return torch.stack([term.to(terms[0].device, terms[0].dtype) for term in terms]).sum()

    def _elsewhere(self, isolation: Isolation, seed: int) -> list[float]:
        """Distances with other weights, in tolerances."""
        with other_weights(self.model, seed):
            return [*Trials(self.model, self.sample, self.placement)._shares(isolation).values()]

    def _shares(self, isolation: Isolation) -> dict[str, float]:
        """By how many tolerances each parameter's sums are off, under the worse bound."""
        shares = dict.fromkeys(trainable(self.model), 0.0)
        for bound in self._bounds:
            for name, share in self._under(bound, isolation):
                shares[name] = share if math.isnan(share) else max(shares[name], share)
        return shares

    def _under(self, bound: float, isolation: Isolation) -> list[tuple[str, float]]:
        rows, clipping = self.sample.rows, Clipping(bound)
        given = self.model, self._loss, self._part(range(rows)), rows, clipping
        ours = self._sums(*given, "sum", isolation)
        allowed = bound * rows * tolerance_of(self.model, self.placement)
        found = self._alone.distances(ours, clipping, list(range(rows)), "sum")
        return [(name, each / allowed) for name, each in found.items()]


def with_places(
    model: nn.Module, sample: Sample, trials: Trials, isolation: Isolation, failure: Failure
) -> tuple[Isolation, Failure | None]:
    """Rules again, told where layers have their records; as before, if that is no help."""
    for lookups in (False, True):
        told, found = places_of_records(model, sample, isolation, lookups=lookups), failure
        for _ in range(MOST_TRIALS):
            outside = told.outside
            if found.outside:
                outside = outside | {name for name in found.modules if has_rule(model, name)}
            if found is not failure and outside == told.outside:
                break  # it failed for another reason
            told = replace(told, outside=outside)
            again = trials.failure(told)
            if again is None:
                return told, None
            found = again
    return isolation, failure
