"""Accelerated-DP-SRGD, one pass (Choquette-Choo, Ganesh and Thakurta 2024, Algorithm 1).

Nesterov's method on a *recursive* gradient: batch t says how ``eta_t grad F(x_t) - eta_{t-1} grad
F(x_{t-1})`` moved, and the sum of all that was said so far is ``eta_t grad F(x_t)``, estimated
from t + 1 batches instead of one. Those sums are prefix sums of a stream in which every record
takes part once, so correlated noise hides each record at an error that barely grows with the
number of steps.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import dp_accounting
import torch
from torch import Tensor
from torch.utils.data import default_collate

from dpoptim.accounting.accountant import compute_epsilon
from dpoptim.accounting.guarantee import (
    SEEDED,
    Guarantee,
    neighboring_name,
    neighbours_differ_by,
    parse_neighboring,
)
from dpoptim.accounting.ledger import Ledger
from dpoptim.data.sparse_rows import rows_at_once
from dpoptim.distributed.rank_signals import RELEASE
from dpoptim.distributed.ranks import ALONE, Ranks
from dpoptim.gate import CorrelatedSum, Gate
from dpoptim.noise.stream import key_stream
from dpoptim.solvers.budget import Budget
from dpoptim.solvers.problem import Problem
from dpoptim.solvers.srgd_settings import SRGD

CHUNK = 8192  # records handed on at a time; a batch may be larger than memory


@dataclass(frozen=True)
class SRGDResult:
    """Result of the solver; all of it is covered by ``guarantee`` and may be published.

    Attributes:
        weights: y_T (accelerated) or the last iterate; float64, shape (d,).
        average: the mean of the iterates x_1, ..., x_T.
        guarantee: of everything here.
        settings: of the run.
        gradient_norms: norm of each step's noisy gradient estimate.
    """

    weights: Tensor
    average: Tensor
    guarantee: Guarantee
    settings: SRGD
    gradient_norms: tuple[float, ...]


def accelerated_srgd(
    problem: Problem,
    data: Sequence[Any] | Iterable[Any],
    settings: SRGD,
    *,
    budget: Budget | None,
    neighboring: str = "zero-out",
    ledger: Ledger | None = None,
    label: str = "accelerated SRGD",
    noise_seed: int | None = None,
    ranks: Ranks = ALONE,
) -> SRGDResult:
    """Minimise the population risk that ``data`` is a sample of, in one pass.

    Args:
        problem: the loss. A public penalty of its own is added to the risk exactly and costs
            nothing.
        data: the records in an order that does not depend on them; see `stream.batches`.
        settings: steps, batch size, clipping, step sizes.
        budget: what the run may cost, and where its guarantee is stated; None turns the noise off
            and promises nothing.
        neighboring: ``"zero-out"`` or ``"replace-one"``.
        ledger: where it is charged; in memory by default.
        label: public text for the ledger's entry.
        noise_seed: makes the noise repeatable, for tests; the guarantee is then marked as not for
            release.
        ranks: the processes that hold the other records; ``data`` is this one's part, as arrays,
            and every batch takes a share of it in proportion.

    Returns:
        weights and average, the guarantee and the settings.

    Raises:
        ValueError: a relation that would make n private, or too few records.
        LedgerError: the budget of the ledger does not cover the run; nothing was released.

    **Guarantee.** The run is mu-GDP for the budget's mu, for every loss, convex or not. Each
    record is in one batch, so it changes one of the clipped sums, by at most ``clip_norm`` (twice
    that under replace-one); the mechanism hides one such change in all prefix sums together, and
    everything else is computed from what it released.

    Examples:
        >>> import torch
        >>> from dpoptim.solvers import Budget, LinearModel, LinearProblem
        >>> from dpoptim.solvers import accelerated_srgd, suggested_settings
        >>> x = torch.rand(1_000, 3, dtype=torch.float64) / 2
        >>> y = x @ torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
        >>> problem = LinearProblem(LinearModel("squared", features=3), capacity=1_000)
        >>> budget = Budget(delta=1e-6, epsilon=2.0)
        >>> settings = suggested_settings(1_000, 4, budget.gdp)
        >>> accelerated_srgd(problem, (x, y), settings, budget=budget).weights.shape
        torch.Size([4])
    """
    relation = neighboring_name(parse_neighboring(neighboring))
    if relation == "add-or-remove-one":
        raise ValueError(
            "neighboring='add-or-remove-one' would shift every later record into another batch. "
            "Fix: neighboring='zero-out' or 'replace-one'."
        )
    capacity = getattr(problem, "capacity", settings.batch_size)
    if capacity < settings.batch_size:
        raise ValueError(
            f"problem was made for batches of {capacity} records; make it with "
            f"capacity={settings.batch_size}."
        )
    settings, own = shares_of_batches(data, settings, ranks)
    stream = batches_in_order(data, own, settings.steps)
    multiplier = 0.0 if budget is None else neighbours_differ_by(relation) / budget.gdp
    query = CorrelatedSum(settings.clip_norm, multiplier, settings.noise, settings.steps)
    event = dp_accounting.NonPrivateDpEvent() if budget is None else query.event
    gate = Gate(
        event=event,
        neighboring=relation,
        query=query,
        releases=settings.steps,
        ledger=None
        if budget is None
        else ranks.ledger(Ledger(neighboring=relation) if ledger is None else ledger),
        noise=key_stream(noise_seed, "gaussian noise"),
        label=label,
    )

    x = z = settings.constraint.project(problem.initial())
    before = x
    prefix = torch.zeros_like(x)
    average = torch.zeros_like(x)
    norms = []
    for t, batch in enumerate(stream):
        eta = t + 1.0
        terms = (
            [(1.0, x)]
            if settings.gradient == "independent"
            else [(eta, x), (-(eta - 1), before)][: t + 1]
        )
        total = torch.zeros_like(x)
        for records in batch:
            total += problem.clipped_sum(problem.prepare(records), terms, settings.clip_norm)
        ranks.begin(RELEASE, t)
        gate.open()  # reserved before a sum leaves this process
        (released,) = gate.release_sum([ranks.total(total)])  # empty but on rank 0, which draws
        # From here on everything is public.
        released = ranks.known(released, total) / settings.batch_size
        prefix = eta * released if settings.gradient == "independent" else prefix + released
        # eta_t times the estimate of the gradient at x_t
        weighted = prefix + eta * problem.penalty_gradient(x)
        norms.append(float(weighted.norm()) / eta)
        before = x
        y = settings.constraint.project(x - weighted / (settings.beta * eta))
        if settings.accelerated:
            z = settings.constraint.project(z - weighted / settings.beta)
            coupling = 2 / (eta + 2)  # tau_{t+1} = eta_{t+1} / (eta_0 + ... + eta_{t+1})
            x = (1 - coupling) * y + coupling * z
        else:
            x = y
        average += (x - average) / eta
    gate.finish()
    return SRGDResult(
        y, average, _guarantee(event, budget, relation, noise_seed), settings, tuple(norms)
    )


def shares_of_batches(data: Any, settings: SRGD, ranks: Ranks) -> tuple[SRGD, int]:
    """The settings for all processes' batch, and how many of its records are this one's.

    Raises:
        ValueError: on all ranks: data that comes in no arrays, or batches of nothing.
    """
    if ranks.size == 1:
        return settings, settings.batch_size
    sizes = ranks.all_gather(len(data[0]) if isinstance(data, tuple) else 0)
    if 0 in sizes:
        raise ValueError("data must be a tuple of arrays, with a record at least, on every rank.")
    own = [settings.batch_size * size // sum(sizes) for size in sizes]
    if not sum(own):
        raise ValueError(
            f"batch_size={settings.batch_size} leaves no rank a record. Fix: larger batches."
        )
    return replace(settings, batch_size=sum(own)), own[ranks.rank]


def _guarantee(
    event: dp_accounting.DpEvent, budget: Budget | None, relation: str, noise_seed: int | None
) -> Guarantee:
    if budget is None:
        return Guarantee.without_noise(relation, 1.0)
    guarantee = compute_epsilon(event, budget.delta, relation)
    return guarantee if noise_seed is None else replace(guarantee, notes=(*guarantee.notes, SEEDED))


def batches_in_order(
    data: Sequence[Any] | Iterable[Any], batch_size: int, steps: int
) -> Iterator[Iterator[tuple[Any, ...]]]:
    """Batch t: records from t * batch_size to (t + 1) * batch_size, in order, in chunks.

    Args:
        data: a tuple of arrays of equal length, records on the first axis (tensors, numpy arrays,
            memory maps); or an iterable of records, each a tuple of tensors or numbers of the same
            shapes, which is read once and no further than needed. What it raises is passed on, so
            it must not fail because of what a record holds.
        batch_size: B, a public number; 0 for a process without a part in the batches.
        steps: T; batch_size * steps records are used, and what is left over is not looked at.

    Raises:
        ValueError: arrays of unequal length, or too few records. (Their number is public under the
            relations of the single-pass solvers.)
    """
    wanted = batch_size * steps
    if isinstance(data, tuple):
        lengths = {len(part) for part in data}
        if len(lengths) != 1:
            raise ValueError(
                f"data must be arrays of one length, got lengths {[len(part) for part in data]}."
            )
        if (n := lengths.pop()) < wanted:
            raise too_few(n, batch_size, steps)
        return (batch_slices(data, t * batch_size, (t + 1) * batch_size) for t in range(steps))
    records = iter(data)
    return (collated(records, batch_size, steps) for _ in range(steps))


def batch_slices(data: tuple[Any, ...], start: int, stop: int) -> Iterator[tuple[Any, ...]]:
    at_once = rows_at_once(math.prod(getattr(data[0], "shape", (0, 1))[1:]), CHUNK)
    for first in range(start, stop, at_once):
        yield tuple(part[first : min(first + at_once, stop)] for part in data)


def collated(records: Iterator[Any], batch_size: int, steps: int) -> Iterator[tuple[Any, ...]]:
    left = batch_size
    while left:
        chunk = list(itertools.islice(records, min(CHUNK, left)))
        if not chunk:
            raise too_few(None, batch_size, steps)
        left -= len(chunk)
        yield tuple(default_collate(chunk))


def too_few(n: int | None, batch_size: int, steps: int) -> ValueError:
    have = "ended early" if n is None else f"has {n} records"
    return ValueError(
        f"data {have}, but {steps} batches of {batch_size} need {batch_size * steps}; take fewer "
        "steps or smaller batches."
    )
