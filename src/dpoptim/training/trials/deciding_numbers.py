"""Losses that a number of the whole batch decides, though no record of a trial reaches it."""

from contextlib import suppress

from torch import Tensor

from dpoptim.errors import NotByThisWayError, SamplesInteractError
from dpoptim.losses import without_single_axes
from dpoptim.training.batches import records as forms
from dpoptim.training.randomness.drawing_collates import DRAWS, HeldDraws
from dpoptim.training.trials.compared_batches import Batches
from dpoptim.training.trials.deterministic_runs import Remembered, looked_at
from dpoptim.training.trials.fixed_noise import MIDDLE, see_one_row
from dpoptim.training.trials.interactions import NoneFiniteError
from dpoptim.training.trials.numbers_of_batches import NumbersOfBatches
from dpoptim.training.trials.other_numbers import (
    AGREE,
    SCALES,
    Runs,
    scaled_weights,
    sizes_in,
    sizes_of_batches,
)
from dpoptim.training.trials.own_generators import generators_of
from dpoptim.training.trials.program import Program, compare_if_possible, if_possible, in_turn
from dpoptim.training.trials.tolerances import computed_dtypes, tolerance_of
from dpoptim.training.trials.variations import Units

BY_THE_BATCH = (
    "{whose} branches on a number of the whole batch, or is limited by one, such as the mean or "
    "the largest of its losses, or whether any record has something: one record that moves it "
    "past the threshold, as later in training, changes what all others add. Fix: decide by each "
    "record's own number, torch.where(losses > 6, 0.01 * losses, losses); or leave it out: each "
    "record's gradient is clipped anyway."
)


def refuse_deciding_numbers(program: Program, records: Units) -> None:
    """Refuse a loss, or model, of which a number of the batch decides how records are computed.

    Such as ``if losses.mean() > 10``, where no record that is tried has such a loss: the program
    is run with other numbers in the places of means, sums, maxima and the like of the batch where
    Python, a kink, or a record's own numbers meet them, and again with weights that are larger and
    smaller. Seen is what torch's functions compute; of what numpy or Python compute of all losses,
    only what these other weights show.

    Raises:
        NotByThisWayError: the model does it, of which records alone show nothing.
        SamplesInteractError: the loss does.

    **Guarantee.** Refused only where it shows in batches of two sizes that no other axis has.
    """
    leaves = [t for _, t in forms.leaves_of(records[0][0]) if isinstance(t, Tensor)]
    model, per_record = program.model, len(records[0])
    taken = {*sizes_in((*leaves, *model.parameters(), *model.buffers())), per_record}
    counts = sizes_of_batches(taken, len(records))
    first, second = next(counts), next(counts)
    watched = list[NumbersOfBatches]()
    if if_possible(lambda: watched.append(watch(program, records, first))):
        return
    seen = watched[0]
    for scale in SCALES[1:3] if seen.reads else ():
        # weights so large may overflow, which shows nothing
        with scaled_weights(model, scale), suppress(NoneFiniteError):
            compare_if_possible(program, records)
    found = [decided_by(program, records, first)] if seen.decided else []
    if found != [""] and found:
        found.append(decided_by(program, records, second))
    if "" in found or not found:
        return
    if "loss" in found:
        raise SamplesInteractError(BY_THE_BATCH.format(whose="the loss"))
    raise NotByThisWayError(
        f'{BY_THE_BATCH.format(whose="the model")} Or isolation="alone", in which no record meets '
        "another.",
        reason="the model branches on a number of the whole batch, or is limited by one",
        fix="decide by each record's own number",
    )


def watch(program: Program, records: Units, count: int) -> NumbersOfBatches:
    """Run the program once, to see whether any number of the batch decides something."""
    model = program.model
    with looked_at(model, generators_of(model)):
        return runs_of(program, records, count).watched(inside=not isolated(program))


def isolated(program: Program) -> bool:
    """Whether no records meet in the model, whatever it does."""
    return all(way.enforced for way in program.ways)


def decided_by(program: Program, records: Units, count: int) -> str:
    """Whether a number of a batch of so many decides something in the "loss" or "model"; or ""."""
    found = list[str]()
    if_possible(lambda: found.append(tried(program, records, count)))
    return "".join(found)


def tried(program: Program, records: Units, count: int) -> str:
    """`decided_by`, or what was raised."""
    runs, model = runs_of(program, records, count), program.model
    with program.quieting.quiet(model, Remembered(lambda: [runs.losses()]), MIDDLE) as quieted:
        if quieted.draws:
            return ""
        see_one_row(quieted.noise, runs_of(program, records, 1).losses)
        dtypes = computed_dtypes(model, runs.losses)
        within = max(AGREE, tolerance_of(model, program.placement, dtypes))
        runs = runs_of(program, records, count, within)
        around = runs.watched(inside=False).decided
        if around and runs.decided(inside=False):
            return "loss"
        within_it = 0 if isolated(program) else runs.watched(inside=True).decided - around
        return "model" if within_it > 0 and runs.decided(inside=True) else ""


def runs_of(program: Program, records: Units, count: int, within: float = AGREE) -> Runs:
    """Runs of so many records, in turn, whose batch is made anew: collating may decide, too."""
    collate, order = HeldDraws(program.collate, DRAWS["all"]), in_turn(len(records), count)

    def losses() -> Tensor:
        batches = Batches(collate, records, order)
        batch = batches.of(order)
        return without_single_axes(batches.loss_of(program.loss, program.model, batch))

    return Runs(program.model, program.placement, losses, count, within)
