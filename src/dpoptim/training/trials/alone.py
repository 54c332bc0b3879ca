"""Losses of records that pass alone, held against those of the batches they were written for."""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.errors import NotByThisWayError, PrivacyError, SamplesInteractError
from dpoptim.training.batches.records import made_up
from dpoptim.training.losses.label_means import means_for_all, of_own_means
from dpoptim.training.trials.compared_batches import Batches
from dpoptim.training.trials.comparison import Comparison
from dpoptim.training.trials.deterministic_runs import put_back
from dpoptim.training.trials.fixed_noise import MIDDLE, see_one_row
from dpoptim.training.trials.interactions import NothingAloneError, nothing_to_learn
from dpoptim.training.trials.isolation import IsolationWarning
from dpoptim.training.trials.loss_trials import MADE_UP
from dpoptim.training.trials.program import Program, if_possible, in_turn
from dpoptim.training.trials.tolerances import computed_dtypes, tolerance_of
from dpoptim.training.trials.variations import with_padding

OTHER_LOSS = (
    'isolation="alone" makes another loss of this one, since the gradient of a batch is neither '
    "the mean nor the sum of its records' own: every record is trained as if it were the batch, "
    "and nothing weighs it by others, or mixes or compares it with them."
)


def refuse_other_meaning(program: Program, form: Any, *, by_name: bool) -> bool:
    """Refuse a loss that records alone would make another one of, on made-up records.

    What cannot be run on these, or cannot be compared, is let through: no record meets another.

    Args:
        form: a row, of which only the form is used.
        by_name: whether the user asked for records alone; then a warning does, but for losses
            that would have no gradient at all.

    Returns:
        whether some were compared, and none had a gradient.

    Raises:
        NothingAloneError: no record alone has a gradient.
        SamplesInteractError: the batch's gradient is neither the mean nor the sum of theirs.
    """
    generator, zero = torch.Generator().manual_seed(0), list[bool]()
    try:
        records = [[made_up(form, generator)] for _ in range(MADE_UP)]
    except TypeError:
        return False
    try:
        for tried in (records, *with_padding(records, sequences=False)):
            if_possible(lambda: zero.append(compare_alone(program, tried)))  # noqa: B023
    except (NothingAloneError, NotByThisWayError):
        raise
    except SamplesInteractError as error:
        if not by_name:
            raise SamplesInteractError(
                f"on made-up records: {error} Or, if every record is to be trained as if it were "
                'the batch, isolation="alone".'
            ) from None
        warnings.warn(OTHER_LOSS, IsolationWarning, stacklevel=8)
    return bool(zero) and all(zero)


def compare_alone(program: Program, records: Sequence[Sequence[Any]]) -> bool:
    """Hold the gradient of a batch against its records' own, of a program without other ways.

    Returns:
        whether there are none: see `Comparison.shows_nothing`.
    """
    model, batches = (
        program.model,
        Batches(program.collate, records, in_turn(len(records), MADE_UP)),
    )

    def summed(model: nn.Module, batch: Any) -> Tensor:
        return batches.loss_of(program.loss, model, batch).sum()

    one, together = batches.of([0]), batches.together
    with program.quieting.quiet(model, lambda: [summed(model, together)], MIDDLE) as quieted:
        if quieted.draws:
            return False
        see_one_row(quieted.noise, lambda: summed(model, one))
        dtypes = computed_dtypes(model, lambda: summed(model, together))
        means = means_for_all(summed(model, together), summed(model, batches.alone[0]))
        loss = partial(of_own_means, summed, batches.records_in, len(means))
        tolerance = tolerance_of(model, program.placement, dtypes)
        compared = Comparison(model, loss, batches, (), program.placement, False, tolerance)
        compared.reduction(program.reductions)
        return compared.shows_nothing() and not quieted.shares


def refuse_nothing_to_learn(program: Program, taken: Sequence[Sequence[Any]]) -> None:
    """Refuse a loss by which records of the data set have no gradient, as made-up ones have none.

    What cannot be run is let through.

    Raises:
        SamplesInteractError: that is so, which is one bit about a few records.
    """
    model, found = program.model, list[bool]()
    batches = Batches(program.collate, taken, in_turn(len(taken), len(taken)))

    def summed(model: nn.Module, batch: Any) -> Tensor:
        return batches.loss_of(program.loss, model, batch).sum()

    def tried() -> None:
        tolerance = tolerance_of(model, program.placement, ())
        how = (), program.placement, True, tolerance
        # with numbers that differ from draw to draw: of two views that are alike nothing is left
        with put_back(model), torch.enable_grad():
            found.append(Comparison(model, summed, batches, *how).shows_nothing())

    with suppress(PrivacyError):
        if_possible(tried)
    if found and found[0]:
        raise nothing_to_learn()
