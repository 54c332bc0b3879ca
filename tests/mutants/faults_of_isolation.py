"""Seeded bugs in what keeps records apart, and what they write inside."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from dpoptim.errors import NotByThisWayError
from dpoptim.gradients.backward_pass import BackwardPass
from dpoptim.gradients.engine import Engine, Reduction
from dpoptim.gradients.hooks.hook_manager import HookManager
from dpoptim.gradients.hooks.model_hooks import ModeHook
from dpoptim.gradients.layers import made, normalisation
from dpoptim.gradients.layers.looped import LoopedLayer
from dpoptim.gradients.layers.recurrent import Steps
from dpoptim.gradients.rows_of_records import RowsOfRecords
from dpoptim.gradients.watch import values
from dpoptim.gradients.watch.model_watch import ModelWatch
from dpoptim.gradients.watch.values import Values
from dpoptim.training.batches import batch_loader, empty_slots
from dpoptim.training.losses import coupled_losses, handed_over
from dpoptim.training.losses.bare_losses import BareLosses
from dpoptim.training.losses.handed_over import HandedOver
from dpoptim.training.losses.parts_of_models import Noted
from dpoptim.training.losses.reduction import Reading
from dpoptim.training.prepared import Prepared
from dpoptim.training.trials import (
    fixed_noise,
    isolation,
    loss_check,
    loss_trials,
    missing_numbers,
    program,
)
from dpoptim.training.trials.deterministic_runs import Quieted
from dpoptim.training.trials.isolation import Chosen
from dpoptim.training.trials.length_trials import LengthTrials
from dpoptim.training.trials.numbers_of_batches import Change


@contextmanager
def values_unseen() -> Iterator[None]:
    """As `_version` saw it: writes through ``.data`` leave no trace."""
    with patch.object(Values, "changed", lambda self: None):
        yield


@contextmanager
def values_unread() -> Iterator[None]:
    """What reads the words of tensors leaves all of them out."""
    nothing = partial(torch.zeros, dtype=torch.int64)
    with patch.object(values._Memory, "read", lambda self: nothing(self._words)):
        yield


@contextmanager
def padding_unseen() -> Iterator[None]:
    """Records are compared with records as long as they are."""
    honest = loss_check.compare

    def compare(tried: object, records: object) -> object:
        return honest(tried, [next(iter(records))] * 2)  # type: ignore[arg-type,call-overload]

    with (
        patch.object(loss_trials, "with_padding", lambda records, *, sequences: iter(())),
        patch.object(loss_check, "compare", compare),
        patch.object(LengthTrials, "compare_longer", lambda *_, **__: None),
        patch.object(LengthTrials, "see", lambda *_: None),
    ):
        yield


def factors_unseen() -> AbstractContextManager[Any]:
    """A scalar is what it was declared to be, whatever a sum was divided by."""
    return patch.object(HandedOver, "_agreed", lambda self, reading: self._declared())


def changes_of_factors_unseen() -> AbstractContextManager[Any]:
    """What a scalar is divided by may be another number in each batch."""
    honest = HandedOver._agreed

    def agreed(self: HandedOver, reading: Reading | None) -> Reduction:
        self._factors = None
        return honest(self, reading)

    return patch.object(HandedOver, "_agreed", agreed)


def own_scalars_unread() -> AbstractContextManager[Any]:
    """What a loop differentiates by itself is taken for a mean."""
    return patch.object(BareLosses, "_read", lambda self, loss, everywhere: None)


def means_over_all_labels() -> AbstractContextManager[Any]:
    """Means over labels are differentiated as torch divides them."""
    return patch.object(HandedOver, "own_means", lambda self, engine, loss: nullcontext())


def others_rows_in_losses() -> AbstractContextManager[Any]:
    """A record's loss compares what the model returned for another with its own labels."""
    honest = Noted.returned
    return patch.object(Noted, "returned", lambda self: [x.roll(1, 0) for x in honest(self)])


@contextmanager
def other_parameters_unseen() -> Iterator[None]:
    """Weights of a loss may learn beside the model's."""
    with (
        patch.object(program, "refuse_other_parameters", lambda *given: None),
        patch.object(handed_over, "refuse_other_parameters", lambda *given: None),
    ):
        yield


def scale_of_noise_unseen() -> AbstractContextManager[Any]:
    """Random numbers of a model are held without their range."""
    return patch.object(fixed_noise, "scale_of", lambda name, given: (0.0, 1.0))


def alike_in_what_is_drawn() -> AbstractContextManager[Any]:
    """All records have the same random numbers where a loss is compared."""
    return patch.object(fixed_noise.FixedNoise, "_axis_of_rows", lambda self, drawn, name: None)


def one_draw_of_coins() -> AbstractContextManager[Any]:
    """A loss is compared where one of the things happens that may."""
    return patch.object(Quieted, "shares", False)


def chances_of_models_untried() -> AbstractContextManager[Any]:
    """Models that draw are compared by one draw, or in evaluation mode."""
    return patch.object(isolation, "refuse_mixing_by_chance", lambda model, sample, quieted: None)


def curvatures_unseen() -> AbstractContextManager[Any]:
    """Scalars of unclear graphs are taken for what they were declared to be."""
    return patch.object(coupled_losses, "curvatures_of_one", lambda *given: ())


def kinks_unseen() -> AbstractContextManager[Any]:
    """Nobody looks for slopes that turn where the whole batch's loss passes a number."""
    return patch.object(coupled_losses, "under_kinks", lambda loss: [])


def broadcast_unseen() -> AbstractContextManager[Any]:
    """Nobody looks whether a loss compares each output with every record's target."""
    return patch.object(handed_over, "refuse_broadcast", lambda *given: None)


def norms_at_each_microbatch() -> AbstractContextManager[Any]:
    """Spectral norms follow the weights once a microbatch."""
    honest = ModelWatch.begin

    def begin(self: ModelWatch) -> None:
        honest(self)
        self.step_begins = True

    return patch.object(ModelWatch, "begin", begin)


def large_numbers_untried() -> AbstractContextManager[Any]:
    """No layer is tried on a record with large numbers beside others."""
    return patch.object(isolation, "mixed_beside_large", lambda model, sample: "")


def other_ranges_untried() -> AbstractContextManager[Any]:
    """Losses are tried on normal numbers, and no others."""
    return patch.object(loss_trials, "with_ranges", lambda records, *_, **__: records)


def numbers_as_they_are() -> AbstractContextManager[Any]:
    """No number of a batch is taken to be another one."""
    return patch.object(Change, "other", lambda self, name, out, given: out)


def false_flags_untried() -> AbstractContextManager[Any]:
    """Made-up flags are True."""
    return patch.object(missing_numbers, "missing_flags", lambda row: None)


def whole_records_missing() -> AbstractContextManager[Any]:
    """Where something is no number, it is in all records but one."""
    own = "ever_more_of_every_other"
    return patch.object(missing_numbers, own, missing_numbers.ever_more)


def compared_in_bfloat16_alone() -> AbstractContextManager[Any]:
    """What a program computes under autocast is compared by its few digits, and no others."""
    return patch.object(program, "autocast_seen", lambda *, off=False: nullcontext(set()))


def states_of_neighbours() -> AbstractContextManager[Any]:
    """Each record's gradients of a recurrence are made of the states of the one before."""
    honest = Steps.previous
    return patch.object(Steps, "previous", lambda self: honest(self).roll(1, 0))


def channels_of_neighbours() -> AbstractContextManager[Any]:
    """Each record's gradients of a group norm are added to the next one's."""
    honest = normalisation.backward_in_groups

    def backward_in_groups(
        module: nn.GroupNorm, saved: tuple[Tensor, ...], g: Tensor, wanted: list[bool]
    ) -> list[Tensor]:
        x_gradient, *formed = honest(module, saved, g, wanted)
        return [x_gradient, *(each + each.roll(g.shape[1]) for each in formed)]

    return patch.object(normalisation, "backward_in_groups", backward_in_groups)


def made_weights_of_neighbours() -> AbstractContextManager[Any]:
    """Each record's gradients of weights that are made reach the next one's parameters, too."""
    honest = made.by_record

    def by_record(derivative: Any) -> Any:
        run = honest(derivative)
        return lambda of_weights: run([each + each.roll(1, 0) for each in of_weights])

    return patch.object(made, "by_record", by_record)


def modes_unwatched() -> AbstractContextManager[Any]:
    """Whoever attached in evaluation mode may switch batch statistics on."""
    return patch.object(ModeHook, "__call__", lambda self, module, args: None)


@contextmanager
def stale_rows() -> Iterator[None]:
    """Layers go by the rows of the model's last forward pass, and nobody compares these with what
    was delivered, nor with its groups.
    """
    honest = Engine._close

    def close(self: Engine, finished: BackwardPass) -> None:
        if finished.entries:
            self.rows_open, self.groups = finished.entries[0].records, None
        honest(self, finished)

    with (
        patch.object(HookManager, "see_output", lambda self, output: None),
        patch.object(Engine, "_close", close),
    ):
        yield


def slower_way_not_taken() -> AbstractContextManager[Any]:
    """The slower way is said, in its basis and message, and rules stay."""
    honest = Prepared._by_another_way

    def by_another_way(self: Prepared, chosen: Chosen, error: NotByThisWayError) -> Any:
        slower, loss = honest(self, chosen, error)
        return replace(slower, isolation=chosen.isolation, sample=chosen.sample), loss

    return patch.object(Prepared, "_by_another_way", by_another_way)


def flags_of_the_last() -> AbstractContextManager[Any]:
    """What a module that runs record by record says beside tensors is the last record's."""
    return patch.object(LoopedLayer, "_same_for_all", lambda self, found: found[-1])


def empty_slots_counted() -> AbstractContextManager[Any]:
    """What lies in a slot that no record took is summed like one."""
    honest = RowsOfRecords.shares
    return patch.object(
        RowsOfRecords,
        "shares",
        lambda self, records, present, device: honest(self, records, None, device),
    )


def moving_collates_taken() -> AbstractContextManager[Any]:
    """Nobody looks where a collate function puts the made-up records of empty slots."""
    return patch.object(empty_slots, "refuse_moving", lambda *given: {})


def seeds_of_the_program() -> AbstractContextManager[Any]:
    """Generators stay as the program seeded them while batches are delivered."""
    return patch.object(batch_loader, "secret_randomness", lambda *given: nullcontext())


def own_seeds_of_the_program() -> AbstractContextManager[Any]:
    """Generators that the model holds stay as it seeded them."""
    return patch.object(batch_loader, "generators_in", lambda *parts: [])


def coupled_losses_taken() -> AbstractContextManager[Any]:
    """Losses that are made of other records' outputs are differentiated as they are."""
    return patch.object(handed_over, "refuse_coupled_losses", lambda *given: None)
