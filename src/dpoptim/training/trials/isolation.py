"""Choice of the way of keeping records apart: the fastest that works, for each of its parts.

Tried on made-up records, against batches of one, before anything private is seen: layer rules for
all; then ``vmap`` for the modules in which these failed, for what surrounds them, and for the
whole model; then records alone.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from dpoptim.assumptions import Assumption, enforced
from dpoptim.errors import PrivacyError, SamplesInteractError
from dpoptim.gradients.hooks.refusals import mixed_by_outliers, watch_batch_statistics
from dpoptim.gradients.isolation import Choice, Isolation
from dpoptim.gradients.placement import IN_PLACE, Placement
from dpoptim.runtime.freed_memory import freed_memory_given_back
from dpoptim.training.trials.deterministic_runs import Quieted, in_all_digits, quiet
from dpoptim.training.trials.first_passes import (
    NOT_FIRST,
    first_sample,
    outputs_mixed,
    raised_on_random,
    refuse_memory,
    refuse_mixing_by_chance,
)
from dpoptim.training.trials.isolation_fallback import (
    Failure,
    places_of_records,
    promoted,
    told_more,
)
from dpoptim.training.trials.isolation_trials import Trials, on_other_records
from dpoptim.training.trials.isolation_words import (
    ALONE,
    WHOLE,
    basis_of,
    forgets,
    message_of,
    not_probed,
    slower,
)
from dpoptim.training.trials.made_up_records import Sample
from dpoptim.training.trials.neighbours import (
    first_mixing,
    mixed_beside_large,
    neighbours_are_invisible,
)

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
        message: what to tell the user once, but for what it costs; empty where rules serve every
            layer.
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
    loss: Callable[[nn.Module, Any], Any] | None = None,
) -> Chosen:
    """Find the fastest way to keep records apart that gives each record its own gradient.

    Args:
        model: not attached.
        train_set: its record 0 shows the form of a record.
        choice: a way to take; "auto" to find out.
        batch_axis: the records' axis in the model's inputs; None to find out.
        placement: of the model's parameters.
        collate: makes the loop's batches; None: torch's.
        loss: shows how the loop calls the model; None: as batches and models look.

    Raises:
        SamplesInteractError: the model mixes records, so that only each record's own batch could
            keep them apart; not where that, or ``vmap``, was chosen by name.
        PrivacyError: the way that was chosen does not serve this model.

    **Guarantee.** Only the structure, shapes and dtypes of record 0 are used, never its values.
    """
    watch_batch_statistics(model)
    if choice == "alone" or mixed_by_outliers(model):
        return records_alone(model, train_set, choice, batch_axis, collate, loss)
    if choice == "vmap":
        placement.refuse(Isolation.of("vmap"))
    found, reason = first_sample(model, train_set, batch_axis, collate, loss)
    if found is None:
        return unprobed(choice, batch_axis, reason)
    with quiet(model, lambda: found.outputs(model)) as quieted:
        if quieted.draws:
            chosen = incomparable(choice, found)
        else:
            tried = replace(found, quieted=quieted)
            sample, reason = (
                (tried, NOT_FIRST) if choice == "vmap" else if_taken(model, tried, batch_axis)
            )
            if sample is None or (sample.folded and choice == "vmap"):
                chosen = unprobed(choice, batch_axis, reason)
            elif choice != "vmap" and (mixing := mixed_beside_large(model, sample)):
                chosen = apart_from_large(choice, sample, mixing)
            else:
                with in_all_digits(lambda: sample.records([0, 1]).outputs(model)):
                    chosen = chosen_by_trials(model, sample, choice, placement)
    return in_training(model, chosen, choice, placement, quieted)


def in_training(
    model: nn.Module, chosen: Chosen, choice: Choice, placement: Placement, quieted: Quieted
) -> Chosen:
    """The choice that was made where the model was quiet, if it will do in training, too.

    Raises:
        SamplesInteractError: nothing will.
    """
    if chosen.sample is not None:
        refuse_memory(model, chosen.sample)
        if quieted.noise is not None and not chosen.isolation.enforced:
            refuse_mixing_by_chance(model, chosen.sample, quieted)
    return as_it_trains(model, chosen, choice, placement) if quieted.evaluates else chosen


def records_alone(
    model: nn.Module,
    train_set: Dataset[Any],
    choice: Choice,
    batch_axis: int | None,
    collate: Callable[[list[Any]], Any] | None,
    loss: Callable[[nn.Module, Any], Any] | None,
) -> Chosen:
    """Records alone: by choice, or since some layer is known to mix them, which is then told.

    Raises:
        SamplesInteractError: another way was chosen by name.
    """
    mixing = "" if choice == "alone" else mixed_by_outliers(model)
    if mixing and choice != "auto":
        raise SamplesInteractError(f'{mixing}; or isolation="alone".')
    found, reason = first_sample(model, train_set, batch_axis, collate, loss)
    alone = Isolation.of("alone")
    message = in_this_way(alone, None, mixing).message if mixing else ""
    if found is None:
        return Chosen(alone, (enforced(ALONE), forgets(reason)), None, message)
    refuse_memory(model, found)
    return Chosen(alone, (enforced(ALONE),), None, message)


def chosen_by_trials(
    model: nn.Module, sample: Sample, choice: Choice, placement: Placement
) -> Chosen:
    """The way that is asked for, if it gives each made-up record its own gradient, or the next."""
    trials = Trials(model, sample, placement)
    if not trials.finite:  # records without any token, say, where numbers are a mask
        sample = sample.with_ones()
        trials = Trials(model, sample, placement)
    isolation = Isolation.of("vmap" if choice == "vmap" else "rules", sample.axis)
    if not trials.finite:
        unknown = not_probed("gradients on random input are not finite")
        return Chosen(isolation, (unknown,), None)
    failure = trials.failure(isolation)
    if failure is not None and choice == "rules":
        isolation, failure = with_places(model, sample, trials, isolation, [failure])
    if failure is not None and choice != "auto":
        raise trials.refusal(failure, choice)
    failures = [] if failure is None else [failure]
    if failure is not None:
        isolation = slower_way(model, sample, trials, isolation, failures)
    isolation, gaps = on_other_records(model, trials, isolation)
    if gaps is not None and choice != "auto":
        raise trials.refusal(gaps, choice)
    if gaps is not None:
        isolation, failures = Isolation.of("alone"), [*failures, gaps]
    return Chosen(isolation, basis_of(isolation, sample), sample, message_of(isolation, failures))


def incomparable(choice: Choice, sample: Sample) -> Chosen:
    """Records alone, for a model of which no two runs on the same records can be compared.

    Raises:
        PrivacyError: another way was chosen by name.
    """
    reason = (
        "the model draws from numpy's or Python's random generators in evaluation mode as well, so "
        "that nobody can tell whether records are mixed"
    )
    if choice != "auto":
        raise PrivacyError(
            f'{reason}. Fix: isolation="alone", in which no record meets another; or draw from '
            "torch's generator, or in training mode only."
        )
    return in_this_way(Isolation.of("alone"), sample, reason)


def apart_from_large(choice: Choice, sample: Sample, mixing: str) -> Chosen:
    """Records alone, for a model that is `mixed_beside_large`, which is told.

    Raises:
        SamplesInteractError: another way was chosen by name.
    """
    if choice != "auto":
        raise SamplesInteractError(f'{mixing}; or isolation="alone".')
    return in_this_way(Isolation.of("alone"), sample, mixing)


def in_this_way(isolation: Isolation, sample: Sample | None, reason: str, fix: str = "") -> Chosen:
    message = slower(isolation, reason, fix)
    return Chosen(isolation, basis_of(isolation, sample), sample, message)


def as_it_trains(model: nn.Module, chosen: Chosen, choice: Choice, placement: Placement) -> Chosen:
    """The way chosen in evaluation mode, if it also runs in training mode; else records alone.

    Raises:
        SamplesInteractError: it does not, and was chosen by name.
    """
    sample = chosen.sample
    if sample is None or chosen.isolation.alone:
        return chosen
    with quiet(model, lambda: sample.outputs(model), as_trained=True):
        trials = Trials(model, sample, placement)
        failure = trials.raised(chosen.isolation)
    if failure is None:
        return chosen
    if choice != "auto":
        raise trials.refusal(failure, choice)
    return in_this_way(Isolation.of("alone"), sample, f"in training mode {failure.reason}")


def unprobed(choice: Choice, batch_axis: int | None, reason: str) -> Chosen:
    """The way that is taken untried."""
    if choice == "vmap":
        whole = Isolation.of("vmap", batch_axis or 0)
        return Chosen(whole, (enforced(WHOLE), not_probed(reason)), None)
    untried = replace(Isolation.of("rules", batch_axis or 0), untried=True)
    return Chosen(untried, (not_probed(reason),), None)


def after_loss(isolation: Isolation, sample: Sample | None, reason: str, fix: str = "") -> Chosen:
    """Choice of a way that suits the loss, where for that reason the model's own does not."""
    return in_this_way(isolation, sample, f"with the loss: {reason}", fix)


def slower_way(
    model: nn.Module,
    sample: Sample,
    trials: Trials,
    isolation: Isolation,
    failures: list[Failure],
) -> Isolation:
    """The next way after one that failed, by the first that does not.

    Args:
        failures: of the ways that failed, here too.
    """
    isolation, failure = with_places(model, sample, trials, isolation, failures)
    if failure is not None and sample.folded:  # a vectorised model would return another form
        return Isolation.of("alone")
    for _ in range(MOST_TRIALS):
        if failure is None or isolation.alone:
            return isolation
        failures.append(failure)
        isolation = promoted(model, isolation, failure)
        failure = None if isolation.alone else trials.failure(isolation)
    return Isolation.of("alone")


def if_taken(model: nn.Module, sample: Sample, batch_axis: int | None) -> tuple[Sample | None, str]:
    """`with_records_apart`; None, and why, also where the model raises on some random numbers."""
    try:
        return with_records_apart(model, sample, batch_axis), NOT_FIRST
    except PrivacyError:
        raise
    except Exception as error:  # whatever the user's model raises on random input
        return None, raised_on_random(error)


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
        with suppress(Exception):  # whatever the user's model raises on records turned round
            turned = sample.time_first().tried(model)
            if turned.returned and neighbours_are_invisible(model, turned):
                return turned
    raise outputs_mixed(where=first_mixing(model, sample))


def with_places(
    model: nn.Module,
    sample: Sample,
    trials: Trials,
    isolation: Isolation,
    failures: list[Failure],
) -> tuple[Isolation, Failure | None]:
    """Rules again, told where layers have their records; as before, if that is no help.

    Args:
        failures: of rules; what cannot be vectorised is added.
    """
    failure = failures[0]
    tellings: tuple[dict[str, bool], ...] = ({}, {"lookups": True}, {"interleaved": True})
    for telling in tellings:
        told, found = places_of_records(model, sample, isolation, **telling), failure
        if "interleaved" in telling and not told.interleaved:
            break
        for _ in range(MOST_TRIALS):
            before, told = told, told_more(model, told, found)
            if found is not failure and told == before:
                break  # it failed for another reason
            again = trials.failure(told)
            if again is None:
                return told, None
            found = again
            failures += [again] if again.unvectorised else []
    return isolation, failure
