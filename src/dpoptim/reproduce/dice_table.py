"""DP-SGD against DiceSGD at the same proven guarantee (cf. Zhang et al. 2024, Table 2 and Fig. 4).

All rows but the last kind promise the same epsilon at delta = 1e-5 under zero-out. The last,
DiceSGD as published, claims it and does not have it: its proven epsilon stands beside.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from dpoptim.accounting.accountant import compute_epsilon
from dpoptim.methods import DPFTRL, DPSGD, DiceSGD
from dpoptim.plan import Plan
from dpoptim.reproduce.dice_cases import Case
from dpoptim.reproduce.one_pass import DELTA
from dpoptim.reproduce.private_runs import Arrays, train_to_tail_mean
from dpoptim.reproduce.results import deviation, write_rows

EPSILONS = (2.0, 8.0)
PUBLISHED = "DiceSGD as published"
OPEN = "no privacy"
UNCLIPPED = 1e6
METHODS = ("DP-SGD", "DP-FTRL", "fixed batches, clipped", "DiceSGD", PUBLISHED)


@dataclass(frozen=True)
class Row:
    """A method's test score over seeds at its best settings; ``noise`` on the mean gradient."""

    case: str
    method: str
    epsilon: float
    proven_epsilon: float
    batch_size: int
    epochs: int
    clip_norm: float
    feedback_clip: float
    residual_clip: float
    learning_rate: float
    noise: float
    measure: str
    score: float
    standard_deviation: float
    seeds: int


def dice_table(
    out: Path,
    cases: Sequence[Case],
    *,
    seeds: int = 3,
    epsilons: Sequence[float] = EPSILONS,
    names: Sequence[str] = METHODS,
    stem: str = "dice_table",
    paper: Callable[[Row], float] | None = None,
) -> list[Row]:
    """Measure the named methods on all cases and write ``<stem>.csv`` into the folder ``out``.

    Batch size, epochs, clip norms and learning rate are the best of the case's grid for each
    method and epsilon, on records that are neither trained nor tested on, with noise of their own.
    Public data; choosing them is not charged. ``paper`` returns what it prints for a row.
    """
    rows: list[Row] = []
    for case, epsilon in itertools.product(cases, epsilons):
        plans: dict[str, list[Plan]] = {}
        for name, plan in candidates(
            len(case.training[0]), epsilon, case.epochs, case.batches, case.clip_norms, names
        ):
            plans.setdefault(name, []).append(plan)
        for name, mine in plans.items():
            tried = (
                (train(plan, case, step, 0, case.choosing), plan, step)
                for plan, step in itertools.product(mine, case.steps)
            )
            _, plan, step = max(tried, key=lambda each: each[0])
            found = [train(plan, case, step, seed, case.test) for seed in range(1, seeds + 1)]
            rows.append(row(name, plan, epsilon, case, step, found))
            write_rows(out / f"{stem}.csv", Row, rows, paper)
    return rows


def candidates(
    n: int,
    epsilon: float,
    epochs: Sequence[int],
    batches: Sequence[int],
    clip_norms: Sequence[float],
    names: Sequence[str] = METHODS,
    delta: float = DELTA,
) -> Iterator[tuple[str, Plan]]:
    """Plans of the named methods, each with its name."""
    for size, passes, clip in itertools.product(batches, epochs, clip_norms):
        for name in names:
            if name == PUBLISHED and 5 * size > n:  # its theorem needs more records
                continue
            noise = 0.0 if name == OPEN else None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # the table says it
                yield (
                    name,
                    method_of(name, clip).plan(
                        n=n,
                        batch_size=size,
                        epochs=passes,
                        epsilon=epsilon if noise is None else None,
                        noise_multiplier=noise,
                        delta=delta,
                        neighboring="zero-out",
                    ),
                )


def method_of(name: str, clip: float) -> DPSGD | DPFTRL | DiceSGD:
    if name == "DP-FTRL":
        return DPFTRL(clip)
    if name == PUBLISHED:
        return DiceSGD(clip, clip, accounting="paper")
    if name in ("DP-SGD", OPEN):
        return DPSGD(clip if name == "DP-SGD" else UNCLIPPED)
    return DiceSGD(clip) if name == "DiceSGD" else DiceSGD(clip, residual_clip=clip)


def train(plan: Plan, case: Case, step: float, seed: int, measured_on: Arrays) -> float:
    """Score of the mean of the second half of iterates; minus infinity if not finite."""
    model, optimizer = case.model_and_optimizer(step, plan.method.rule.norm)
    train_to_tail_mean(
        plan, model, optimizer, case.training, case.loss, seed, case.physical_batch_size
    )
    score = case.score(model.eval(), *measured_on)
    return score if math.isfinite(score) else -math.inf


def row(
    name: str, plan: Plan, epsilon: float, case: Case, step: float, found: Sequence[float]
) -> Row:
    dice = plan.method if isinstance(plan.method, DiceSGD) else None
    return Row(
        case=case.name,
        method=name,
        epsilon=epsilon,
        proven_epsilon=math.inf
        if name == OPEN
        else compute_epsilon(plan.event, plan.delta, plan.neighboring).epsilon,
        batch_size=plan.batch_size,
        epochs=round(plan.epochs),
        clip_norm=plan.method.rule.norm,
        feedback_clip=(dice.feedback_clip or 0.0) if dice else 0.0,
        residual_clip=(dice.residual_clip or 0.0) if dice else plan.method.rule.norm,
        learning_rate=step / plan.method.rule.norm if case.optimizer == "SGD" else step,
        noise=plan.query.standard_deviation / plan.batch_size,
        measure=case.measure,
        score=mean(found),
        standard_deviation=deviation(found),
        seeds=len(found),
    )
