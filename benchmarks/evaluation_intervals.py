"""How often intervals of a private evaluation hold the truth, and how long they are.

A made-up regression, of which a share of the records is far off: what normal limits suit worst.
Run: ``python benchmarks/evaluation_intervals.py --out benchmarks/results`` writes
evaluation_intervals.csv: for squared error and R2 at 95 %, the share of `REPETITIONS` hold-outs
whose interval holds the population's figure, and the median length; beside it, R2's by the same
linearisation of the same records without privacy.
"""

from itertools import product

import numpy as np

from dpoptim.evaluation import evaluate_regressor
from one_table import write_table

REPETITIONS = 400
POPULATION = 2_000_000
SIZES = (300, 1_000, 5_000)
EPSILONS = (1.0, 8.0, 100.0)
FAR_OFF = (0.0, 0.02)
REACH = 1.959964  # of 95 %
DELTA = 1e-6


def records(n: int, far_off: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Predictions and targets, in [-1, 1]."""
    draws = np.random.default_rng(seed)
    predicted = 0.2 * draws.standard_normal(n)
    targets = predicted + 0.05 * draws.standard_normal(n)
    targets += np.where(draws.random(n) < far_off, draws.choice([-0.7, 0.7], n), 0.0)
    return np.clip(predicted, -1, 1), np.clip(targets, -1, 1)


def without_privacy(predicted: np.ndarray, targets: np.ndarray) -> tuple[float, float]:
    """R2, and how far its interval reaches."""
    errors, around = (targets - predicted) ** 2, (targets - targets.mean()) ** 2
    ratio = errors.mean() / around.mean()
    deviation = np.std(errors - ratio * around) / around.mean() / len(targets) ** 0.5
    return 1 - ratio, REACH * deviation


def measured(n: int, epsilon: float, far_off: float) -> dict[str, float]:
    """One line of the table."""
    predicted, targets = records(POPULATION, far_off, 0)
    error = float(((targets - predicted) ** 2).mean())
    r2 = 1 - error / float(targets.var())
    held, lengths = np.zeros((REPETITIONS, 3)), np.zeros((REPETITIONS, 3))
    for seed in range(REPETITIONS):
        sample = records(n, far_off, seed + 1)
        scores = evaluate_regressor(
            *sample, target_bound=1.0, epsilon=epsilon, delta=DELTA, noise_seed=seed
        )
        plain, reach = without_privacy(*sample)
        for place, (found, truth) in enumerate(((scores.squared_error, error), (scores.r2, r2))):
            held[seed, place] = found.low <= truth <= found.high
            lengths[seed, place] = found.high - found.low
        held[seed, 2], lengths[seed, 2] = abs(plain - r2) <= reach, 2 * reach
    shares, middle = held.mean(0), np.median(lengths, axis=0)
    return {
        "n": n,
        "epsilon": epsilon,
        "far_off": far_off,
        "error_held": round(float(shares[0]), 3),
        "r2_held": round(float(shares[1]), 3),
        "plain_r2_held": round(float(shares[2]), 3),
        "error_length": round(float(middle[0]), 4),
        "r2_length": round(float(middle[1]), 3),
        "plain_r2_length": round(float(middle[2]), 3),
    }


if __name__ == "__main__":
    write_table(
        "evaluation_intervals",
        __doc__,
        (measured(*case) for case in product(SIZES, EPSILONS, FAR_OFF)),
    )
