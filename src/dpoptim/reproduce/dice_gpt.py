"""Clip norms and learning rates of DiceSGD with Adam on a language model, with proven noise.

Cf. Zhang et al. 2024, Fig. 5. The paper fine-tunes GPT-2, whose weights are in no package, on
42,000 texts. Here a GPT of one narrow layer learns the development set's 4,672 from scratch in one
epoch, by Adam with constant rates, which the paper warms up and lets fall. (8, 8e-6)-DP, zero-out.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dpoptim.methods import DiceSGD
from dpoptim.plan import Plan
from dpoptim.reproduce.dice_cases import Case, restaurant_gpt
from dpoptim.reproduce.private_runs import private_steps
from dpoptim.reproduce.results import write_rows

EPSILON, DELTA = 8.0, 8e-6
BATCH = 256
CLIP_NORMS = (100.0, 10.0, 1.0, 0.1)  # C1 of Fig. 5, and C2
RATES = (0.02, 0.005)


@dataclass(frozen=True)
class Cell:
    """Mean loss of a word of the test texts after DiceSGD, C2 = C1; one seed."""

    clip_norm: float
    learning_rate: float
    loss: float


def small_case(directory: Path) -> Case:
    """Return E2E by the small model, tested on every fourth text."""
    case = restaurant_gpt(directory, known_words=256, width=32, layers=1)
    return replace(case, test=(case.test[0][::4], case.test[1][::4]))


def plan_of(clip_norm: float, case: Case) -> Plan:
    return DiceSGD(clip_norm).plan(
        n=len(case.training[0]),
        batch_size=BATCH,
        epochs=1,
        epsilon=EPSILON,
        delta=DELTA,
        neighboring="zero-out",
    )


def loss_by_settings(
    out: Path,
    case: Case,
    *,
    clip_norms: Sequence[float] = CLIP_NORMS,
    rates: Sequence[float] = RATES,
) -> list[Cell]:
    """Measure all cells; write ``dice_fig5.csv`` into the folder ``out``."""
    rows = []
    for clip_norm, rate in itertools.product(clip_norms, rates):
        rows.append(Cell(clip_norm, rate, loss_at(case, clip_norm, rate)))
        write_rows(out / "dice_fig5.csv", Cell, rows)
    return rows


def loss_at(case: Case, clip_norm: float, rate: float) -> float:
    """Return the test loss of a cell."""
    plan = plan_of(clip_norm, case)
    model, optimizer = case.model_and_optimizer(rate, 1.0)
    for _ in private_steps(plan, model, optimizer, case.training, case.loss, seed=1):
        pass
    return -case.score(model, *case.test)
