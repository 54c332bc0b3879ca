"""Gradient against value clipping at other budgets (cf. Fang et al. 2023, Fig. 5).

The linear model on Fashion-MNIST, with value clipping's sharp bound and clip norm 1. Scaled down to
the first 10,000 training images and five epochs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from dpoptim.reproduce.fang import STEPS, methods, run
from dpoptim.reproduce.private_runs import Arrays
from dpoptim.reproduce.results import deviation, write_rows

RECORDS, BATCH, EPOCHS = 10_000, 250, 5
BUDGETS = (  # epsilon and delta: each varies while the other stays
    *((epsilon, 1e-5) for epsilon in (0.5, 2.0, 8.0)),
    *((2.0, delta) for delta in (1e-6, 1e-8)),
)
METHODS = ("gradient clipping", "value clipping, sharp")


@dataclass(frozen=True)
class Score:
    """Test accuracy over seeds at a budget, at the learning rate that is best on other records."""

    method: str
    epsilon: float
    delta: float
    learning_rate: float
    accuracy: float
    standard_deviation: float
    seeds: int


def budgets(
    out: Path,
    parts: tuple[Arrays, Arrays, Arrays],
    *,
    seeds: int = 3,
    pairs: Sequence[tuple[float, float]] = BUDGETS,
) -> list[Score]:
    """Write ``fang_fig5.csv`` into the folder ``out``; parts are as `one_pass.load` has them."""
    (x, y), choosing, test = parts
    training = x[:RECORDS], y[:RECORDS]
    rows = []
    for epsilon, delta in pairs:
        for method in METHODS:
            plan = methods(1.0)[method].plan(
                n=len(training[0]), batch_size=BATCH, epochs=EPOCHS, epsilon=epsilon, delta=delta
            )
            tried = [run(plan, "linear", training, step, 0, choosing) for step in STEPS]
            step = STEPS[tried.index(max(tried))]
            found = [
                run(plan, "linear", training, step, seed, test) for seed in range(1, seeds + 1)
            ]
            rows.append(Score(method, epsilon, delta, step, mean(found), deviation(found), seeds))
            write_rows(out / "fang_fig5.csv", Score, rows)
    return rows
