"""How often the interval of a private AUC holds the truth, and how wide it is.

A made-up model whose scores are true probabilities, of an outcome that half of the records have,
or one in twenty. Run: ``python benchmarks/auc_intervals.py --out benchmarks/results`` writes
auc_intervals.csv: at 95 %, the share of `REPETITIONS` hold-outs whose interval holds the
population's AUC, and the median length; beside it, that of Hanley and McNeil (1982) on the same
records without privacy.
"""

from itertools import product

import numpy as np
from scipy.special import expit
from sklearn.metrics import roc_auc_score

from dpoptim.evaluation import evaluate_classifier
from one_table import write_table

REPETITIONS = 200
POPULATION = 1_000_000
SIZES = (300, 1_000, 5_000, 20_000)
EPSILONS = (0.5, 1.0, 8.0)
LOG_ODDS = {"1/2": 0.0, "1/20": -4.0}  # of the middle record, by the share that has the outcome
SPREAD = 1.5  # of log-odds
REACH = 1.959964  # of 95 %
DELTA = 1e-6


def records(n: int, outcome: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities, and who has the outcome."""
    draws = np.random.default_rng(seed)
    scores = expit(LOG_ODDS[outcome] + SPREAD * draws.standard_normal(n))
    return scores, (draws.random(n) < scores).astype(int)


def without_privacy(scores: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """The AUC, and how far its interval reaches."""
    area, have = float(roc_auc_score(y, scores)), int(y.sum())
    lack = len(y) - have
    first, second = area / (2 - area) - area**2, 2 * area**2 / (1 + area) - area**2
    variance = area * (1 - area) + (have - 1) * first + (lack - 1) * second
    return area, REACH * (variance / (have * lack)) ** 0.5


def measured(n: int, epsilon: float, outcome: str) -> dict[str, float | str]:
    """One line of the table."""
    truth = roc_auc_score(*records(POPULATION, outcome, 0)[::-1])
    held, lengths = np.zeros((REPETITIONS, 2)), np.zeros((REPETITIONS, 2))
    for seed in range(REPETITIONS):
        scores, y = records(n, outcome, seed + 1)
        found = evaluate_classifier(
            np.stack([1 - scores, scores], axis=1),
            y,
            classes=[0, 1],
            epsilon=epsilon,
            delta=DELTA,
            noise_seed=seed,
        ).auc
        area, reach = without_privacy(scores, y)
        held[seed] = found.low <= truth <= found.high, abs(area - truth) <= reach
        lengths[seed] = found.high - found.low, 2 * reach
    shares, middle = held.mean(0), np.median(lengths, axis=0)
    return {
        "n": n,
        "epsilon": epsilon,
        "outcome": outcome,
        "auc": round(float(truth), 3),
        "held": round(float(shares[0]), 3),
        "plain_held": round(float(shares[1]), 3),
        "length": round(float(middle[0]), 3),
        "plain_length": round(float(middle[1]), 3),
    }


if __name__ == "__main__":
    write_table(
        "auc_intervals",
        __doc__,
        (measured(*case) for case in product(SIZES, EPSILONS, LOG_ODDS)),
    )
