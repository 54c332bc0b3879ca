"""Models whose passes leave a value in a plain attribute that later passes read.

A running maximum, what the first batch initialises, a switch that stays where a batch has set it:
one record moves the losses of all that come in later batches, also where records pass alone.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.errors import SamplesInteractError
from dpoptim.gradients.oracle import Loss
from dpoptim.gradients.watch.plain_values import Kept, Place, PlainValues, same
from dpoptim.training.batches.collation import collate_records
from dpoptim.training.batches.loading import Collate
from dpoptim.training.batches.records import made_up
from dpoptim.training.trials.axes_of_records import axes_of, length_along, resized
from dpoptim.training.trials.compared_batches import own_containers
from dpoptim.training.trials.deterministic_runs import put_back, quiet
from dpoptim.training.trials.isolation import Chosen
from dpoptim.training.trials.loss_trials import tries_missing
from dpoptim.training.trials.made_up_records import Sample
from dpoptim.training.trials.neighbours import LARGE
from dpoptim.training.trials.variations import with_a_large_one

RECORDS = 3
TIMES_LONGER = (16, 4, 2)
MOST_LONG = 1 << 10  # positions
ROUNDS = 64  # times the precision of parameters
NAMED = 8  # attributes that are tried one by one
Run = Callable[[], Tensor]


def refuse_carried(model: nn.Module, values: PlainValues, runs: Iterable[Run]) -> None:
    """Refuse a model that reads what passes over other records have left; put values back.

    A count of passes is the same whatever records are, and what nobody reads moves no loss.

    Args:
        values: as they were before trials.
        runs: passes over made-up records of several kinds, which return losses or outputs; made
            only if they are needed.

    Raises:
        SamplesInteractError: by the attribute's name.
    """
    left = values.taken()
    changed = values.changed(left)
    if not changed:
        return
    try:
        with put_back(model):
            found = carried(model, values, left, [*runs])
    finally:
        values.put(values.before)
    if found is not None:
        raise SamplesInteractError(
            f"a pass leaves another value in the attribute {found!r}, which depends on its "
            "records, and later passes read it: records would be mixed through it from batch to "
            "batch. Fix: compute it anew in each pass, from each record alone; or set it before "
            "attaching, to a value that no pass changes (of a model that switches by itself, as "
            'BigBird does for short texts: model.bert.set_attention_type("original_full")).'
        )


def carried(model: nn.Module, values: PlainValues, left: Kept, runs: Sequence[Run]) -> str | None:
    """The name of an attribute by whose value losses differ, if that depends on records."""
    firsts, ends = dict[Run, Tensor](), list[Kept]()
    for run in runs:
        with suppress(Exception):  # whatever the user's model raises on made-up input
            firsts[run] = passed(model, values, run, values.before)
            ends.append(values.taken())
    changed = values.changed(left)
    if values.replaced(left):  # by what attaching has not tried
        return values.name_of(changed[0])
    within = max(
        ROUNDS * torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point()
    )

    def apart(first: Tensor, other: Tensor) -> bool:
        return not torch.allclose(first, other, rtol=within, atol=within, equal_nan=True)

    def moved(only: Sequence[Place], found: Kept) -> bool:
        own = {place: found[place] for place in only if place in found}
        others = {place: each for place, each in values.before.items() if place not in only}
        for run, first in firsts.items():
            with suppress(Exception):
                other = passed(model, values, run, others | own)
                if apart(first, other):
                    return True
        return False

    places = [place for place in changed if differ(place, ends)]
    if places and any(moved(places, found) for found in (left, *ends)):
        by_itself = (place for place in places[:NAMED] if moved([place], left))
        return values.name_of(next(by_itself, places[0]))
    # A flag is the same after any pass, and what it stands for may lie where nothing is put back.
    after = [*losses_after_others(model, values, [*firsts])]
    return values.name_of(changed[0]) if any(apart(after[0], each) for each in after[1:]) else None


def losses_after_others(
    model: nn.Module, values: PlainValues, runs: Sequence[Run]
) -> Iterator[Tensor]:
    """Losses of the first pass after each of the others, which begins with the values before."""
    for other in runs[1:]:

        def both(other: Run = other) -> Tensor:
            other()
            return runs[0]()

        with suppress(Exception):  # whatever the user's model raises on made-up input
            yield passed(model, values, both, values.before)


def passed(model: nn.Module, values: PlainValues, run: Run, kept: Kept) -> Tensor:
    """Losses of a pass that begins with these values."""
    with quiet(model, lambda: [run()]) as quieted:
        if quieted.draws:
            raise ValueError("no two passes can be compared")
        torch.manual_seed(0)
        values.put(kept)
        return run().detach().clone()


def differ(place: Place, ends: Sequence[Kept]) -> bool:
    """Whether passes over unlike records have left unlike values."""
    return any(unlike(ends[0].get(place), each.get(place)) for each in ends[1:])


def unlike(a: tuple[Any, Tensor | None] | None, b: tuple[Any, Tensor | None] | None) -> bool:
    if a is None or b is None:
        return a is not b
    if isinstance(a[0], nn.Module) and isinstance(b[0], nn.Module):
        return type(a[0]) is not type(b[0])  # made anew by each pass
    if isinstance(a[1], Tensor) and isinstance(b[1], Tensor):
        return a[1].shape != b[1].shape or not torch.equal(a[1], b[1])
    return not same(a, b)


def passes(
    model: nn.Module,
    loss: Loss | None,
    collate: Collate | None,
    row: Any,
    rows: int,
    chosen: Chosen,
) -> Iterator[Run]:
    """Passes over made-up records of several kinds, which return losses; or outputs, without one.

    Args:
        row: whose form the records have. rows: of a record.
    """
    if loss is not None:
        alone = chosen.isolation.alone
        yield from runs_of_loss(model, loss, collate or collate_records, row, rows, alone=alone)
    elif chosen.sample is not None:
        yield from runs_of_sample(model, chosen.sample)


def runs_of_loss(
    model: nn.Module, loss: Loss, collate: Collate, row: Any, rows: int, *, alone: bool
) -> Iterator[Run]:
    """Passes over made-up records: one, others, a large one, a shorter one, and longer ones.

    Args:
        row: whose form they have.
        rows: of a record.
        alone: whether only one record passes at a time.
    """
    generator = torch.Generator().manual_seed(0)
    try:
        first, *others = ([made_up(row, generator) for _ in range(rows)] for _ in range(RECORDS))
    except TypeError:  # nobody can make up such
        return
    groups = [[first], others[:1] if alone else others, *with_a_large_one([first])]
    groups += [[other] for other in of_other_lengths(first, longer=tries_missing(model))]
    for group in groups:
        with suppress(Exception):  # whatever the user's function raises on made-up records
            batch = collate([each for record in group for each in record])
            yield lambda batch=batch: loss(model, own_containers(batch))  # type: ignore[misc]


def of_other_lengths(rows: Sequence[Any], *, longer: bool) -> Iterator[Sequence[Any]]:
    """A record's rows, shorter; and longer, where that is asked for."""
    axes = next((candidates[0] for candidates in axes_of(rows[0])), None)
    if axes is not None:
        length = length_along(rows[0], axes)
        times = [n for n in TIMES_LONGER if longer and length * n <= MOST_LONG]
        for other in (length // 4, *(length * n for n in times)):
            yield [resized(each, axes, other) for each in rows]


def runs_of_sample(model: nn.Module, sample: Sample) -> Iterator[Run]:
    """Passes over the records that the model was tried on, and over others, one of them large."""
    for each in (sample, sample.records([0]), sample.with_another_first(LARGE)):
        yield lambda each=each: torch.cat([x.reshape(-1) for x in each.outputs(model)])  # type: ignore[misc]
