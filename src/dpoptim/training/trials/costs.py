"""The time that a slower way of keeping records apart takes, at the batch that a plan expects."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
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
LONG = 0.05  # seconds: what takes as long is timed on no larger batch, in a short run
LONGEST, LONG_RUN = 5.0, 20  # seconds that are spent on a batch in a run of so many steps
MEMORY = 2**30  # bytes that rows of the parameters may take in one that is timed for long
LARGE_RUN = 1e11  # parameters times records; from here on rules for layers are timed, too
TOLD = 3.0  # ordinary steps: what rules cost, if it is more
SLOW_RULES = "rules for layers keep records apart, and take long for this model."
FEWER = 0.7  # of the time, for which smaller physical batches are worth a word


@dataclass(frozen=True)
class Cost:
    """The price of a step, in ordinary ones.

    Attributes:
        times: in one physical batch.
        timed: whether on as many records, or by the time that each one more took of fewer.
        rows: of a physical batch in which it takes less; None: of none that was timed.
        in_pieces: times, in physical batches of these.
    """

    times: float
    timed: bool
    rows: int | None = None
    in_pieces: float = math.inf

    def words(self, batch: int) -> str:
        """The price, of a step of so many records."""
        found = "about" if self.timed else "at least about"
        more = ""
        if self.rows is not None:
            more = (
                f"; with private.batches(physical_batch_size={self.rows}), "
                f"{found} {rounded(self.in_pieces)}"
            )
        return (
            f"A step of {batch} records, as the plan expects, takes {found} {rounded(self.times)} "
            f"times as long as an ordinary one{more} (timed on made-up records)."
        )


def rounded(times: float) -> str:
    return f"{float(f'{times:.1g}'):g}"


def with_cost(
    chosen: Chosen, model: nn.Module, placement: Placement, batch: int, steps: int
) -> Chosen:
    """The choice, whose message, if there is one, also tells what it costs.

    There is one of rules for layers, too, where they cost more than `TOLD` in a large run.

    Args:
        batch: records that a step is expected to have in this process.
        steps: of the run; the longer it is, the larger are the batches that are timed.

    **Guarantee.** Made-up records are timed, and nothing is decided by it.
    """
    large = sum(p.numel() for p in model.parameters()) * batch * steps >= LARGE_RUN
    if not chosen.message and not (large and chosen.isolation.tier == "rules"):
        return chosen
    found = None
    # of a model in parts all processes would have to run as often
    if chosen.sample is not None and not placement.spread:
        found = slowdown(model, chosen.sample, placement, chosen.isolation, batch, steps)
    if not chosen.message and (found is None or found.times <= TOLD):
        return chosen
    cost = "" if found is None else found.words(batch)
    message = chosen.message or SLOW_RULES
    return replace(chosen, message=warning_of(message, chosen.isolation, cost))


def slowdown(
    model: nn.Module,
    sample: Sample,
    placement: Placement,
    isolation: Isolation,
    batch: int,
    steps: int,
) -> Cost | None:
    """Time of passes over so many records in this way over that of an ordinary one.

    Of as many as are timed; for others by the time that each one more takes, which may be too
    little: large rows of parameters fit no cache. None where the model does not run on batches of
    made-up records.
    """
    held = max(1, sum(p.numel() * p.element_size() for p in trainable(model).values()))
    limit = Limit(min(batch, MOST), MEMORY // held if steps >= LONG_RUN else 0)
    with put_back(model):
        try:
            ordinary = Timing(partial(ordinary_pass, model, placement), sample, limit)
            plain = ordinary.seconds(batch)
            private = partial(private_pass, model, placement, isolation)
            if isolation.alone:
                return Cost(batch * private(sample.records([0])) / plain, timed=True)
            timing = Timing(private, sample, limit)
        except Exception:  # whatever the user's model raises on batches of another length
            return None
    whole, (rows, pieces) = timing.seconds(batch), timing.in_pieces(batch)
    fewer = rows < batch and pieces <= FEWER * whole
    return Cost(
        whole / plain,
        timed=timing.rows >= batch,
        rows=rows if fewer else None,
        in_pieces=pieces / plain,
    )


@dataclass(frozen=True)
class Limit:
    """Records that are timed at once.

    Attributes:
        most: if that is quick.
        slowly: also if it takes up to `LONGEST`.
    """

    most: int
    slowly: int = 0

    def allows(self, rows: int, last: float, expected: float) -> bool:
        """Whether to time so many, of which fewer took ``last`` seconds."""
        return last < LONG or (rows <= self.slowly and expected <= LONGEST)


class Timing:
    """Seconds of a pass, by how many records it has.

    Args:
        run: gives them for some records.
        limit: on records that are timed at once, unless the sample has more.
    """

    def __init__(self, run: Callable[[Sample], float], sample: Sample, limit: Limit) -> None:
        rows = sample.rows
        self._found = {1: run(sample.records([0])), rows: run(sample)}
        while rows < limit.most:
            last, more = self._found[rows], min(4 * rows, limit.most)
            if not limit.allows(more, last, last * more / rows):
                break
            rows = more
            self._found[rows] = run(sample.records([i % sample.rows for i in range(rows)]))
        self.rows = rows

    def seconds(self, records: int) -> float:
        """The time of a pass over so many."""
        few, one = self._found[self.rows], self._found[1]
        more = max(0.0, (few - one) / max(1, self.rows - 1))
        return few + (records - self.rows) * more

    def in_pieces(self, records: int) -> tuple[int, float]:
        """The number of records in a pass by which so many take least, and the seconds."""
        taken = {rows: -(-records // rows) * each for rows, each in self._found.items()}
        quickest = min(taken, key=taken.__getitem__)
        return quickest, taken[quickest]


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
