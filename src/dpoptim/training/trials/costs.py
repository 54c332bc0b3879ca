"""The time that a slower way of keeping records apart takes, at the batch that a plan expects."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.oracle import trainable
from dpoptim.gradients.placement import Placement
from dpoptim.training.trials.deterministic_runs import put_back
from dpoptim.training.trials.isolation import Chosen
from dpoptim.training.trials.isolation_words import warning_of
from dpoptim.training.trials.made_up_records import Sample

MOST, RUNS = 64, 2  # records that are timed at once; how often
LONG = 0.05  # seconds: what takes as long is timed on no larger batch


def with_cost(chosen: Chosen, model: nn.Module, placement: Placement, batch: int) -> Chosen:
    """The choice, whose message, if there is one, also tells what it costs.

    Args:
        batch: records that a step is expected to have in this process.

    **Guarantee.** Made-up records are timed, and nothing is decided by it.
    """
    if not chosen.message:
        return chosen
    found = None
    # of a model in parts all processes would have to run as often
    if chosen.sample is not None and not placement.spread:
        found = slowdown(model, chosen.sample, placement, chosen.isolation, batch)
    cost = ""
    if found is not None:
        times = float(f"{found:.1g}")
        cost = (
            f"A step of {batch} records, as the plan expects, takes about {times:g} times as long "
            "as an ordinary one (timed on made-up records)."
        )
    return replace(chosen, message=warning_of(chosen.message, chosen.isolation, cost))


def slowdown(
    model: nn.Module, sample: Sample, placement: Placement, isolation: Isolation, batch: int
) -> float | None:
    """Time of passes over so many records in this way over that of an ordinary one.

    Of as many as are timed quickly; for others by the time that each one more takes. None where the
    model does not run on batches of made-up records.
    """
    most = min(batch, MOST)
    with put_back(model):
        try:
            ordinary = Timing(partial(ordinary_pass, model, placement), sample, most)
            private = partial(private_pass, model, placement, isolation)
            if isolation.alone:
                taken = batch * private(sample.records([0]))
            else:
                taken = Timing(private, sample, most).seconds(batch)
            return taken / ordinary.seconds(batch)
        except Exception:  # whatever the user's model raises on batches of another length
            return None


class Timing:
    """Seconds of a pass, by how many records it has.

    Args:
        run: gives them for some records.
        most: records that are timed at once, unless the sample has more.
    """

    def __init__(self, run: Callable[[Sample], float], sample: Sample, most: int) -> None:
        self._one, self._rows = run(sample.records([0])), sample.rows
        self._few = run(sample)
        while self._few < LONG and self._rows < most:
            self._rows = min(4 * self._rows, most)
            indices = [i % sample.rows for i in range(self._rows)]
            self._few = run(sample.records(indices))

    def seconds(self, records: int) -> float:
        more = max(0.0, (self._few - self._one) / max(1, self._rows - 1))
        return self._few + (records - self._rows) * more


def ordinary_pass(model: nn.Module, placement: Placement, sample: Sample) -> float:
    parameters = [*trainable(model).values()]
    return quickest(lambda: placement.gradients(loss_of(sample, model), parameters))


def private_pass(
    model: nn.Module, placement: Placement, isolation: Isolation, sample: Sample
) -> float:
    engine = Engine(
        *(model, Clipping(1.0)),
        capacity=sample.rows,
        reduction="sum",
        isolation=isolation,
        totals=placement.trial_totals,
        placement=placement,
    )

    def run() -> None:
        engine.begin_microbatch(sample.rows)
        loss_of(sample, model).backward()
        engine.take()

    engine.attach()
    try:
        return quickest(run)
    finally:
        engine.detach()
        placement.settle()


def quickest(run: Callable[[], object]) -> float:
    """Seconds of the quickest of some runs, or of the first if that is long."""
    best = float("inf")
    for _ in range(RUNS):
        start = time.perf_counter()
        run()
        finish()
        best = min(best, time.perf_counter() - start)
        if best > LONG:
            break
    return best


def loss_of(sample: Sample, model: nn.Module) -> Tensor:
    terms = [out.float().square().sum() for out in sample.outputs(model)]
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()


def finish() -> None:
    """Wait for what an accelerator still computes."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
