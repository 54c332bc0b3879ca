"""How much noise the prefix sums carry: strategies against the dense optimum, and amplified noise
against DP-SGD.

    python benchmarks/correlated_errors.py [--out benchmarks/results] [--steps 256]

Three tables. `correlated_errors.csv`: the mean error (root of the mean squared error of the prefix
sums, at one GDP) of each strategy over the least that any can have
(`dpoptim.theory.dense_strategies`), for one and several passes over fixed batches.
`amplified_errors.csv`: banded noise on batches sampled by turns, with the best number of bands,
over DP-SGD, at n = 60,000, batch 500, delta 1e-5; and the noise multiplier that DP-SGD would need
for the same error. `decay_errors.csv`: the mean error of the iterates of SGD whose learning rate
decays, with noise that is fitted to the decay and with noise that is fitted to constant rates, over
the least that any strategy can have.
"""

import argparse
import csv
import math
from itertools import product
from pathlib import Path

import numpy as np

from dpoptim.mechanisms import RunShape
from dpoptim.mechanisms.correlated import banded_error
from dpoptim.noise.correlated import (
    BandedToeplitz,
    BestStrategy,
    BinaryTree,
    BufferedToeplitz,
    Strategy,
    ToeplitzSquareRoot,
    Workload,
)
from dpoptim.noise.correlated.fitting import inverse
from dpoptim.noise.correlated.workload import Rates
from dpoptim.sampling import CyclicPoissonSampling
from dpoptim.theory.dense_strategies import least_mean_error

PASSES = (1, 4, 8, 16)
MOMENTA: tuple[float, ...] = (0.0, 0.9)
# a tenth of the steps up, then down by a cosine, to a hundredth
WARM_UP = tuple(min(t / 10, (1.01 + math.cos(math.pi * (t - 10) / 90)) / 2) for t in range(1, 101))
DECAYS: dict[str, Rates] = {"linear": "linear", "cosine": "cosine", "warm-up, cosine": WARM_UP}
N, BATCH, DELTA = 60_000, 500, 1e-5
CELLS = [(epochs, epsilon) for epochs in (10, 20, 40) for epsilon in (1.0, 2.0, 4.0, 8.0)]
BANDS = (1, 2, 4, 8, 16, 32, 64, 120)


def mean_error(strategy: Strategy, steps: int, passes: int) -> float:
    separation = steps // passes
    several = strategy.sensitivity(steps, passes, separation, regular=True) / strategy.sensitivity(
        steps
    )
    return float(np.sqrt(np.mean(strategy.prefix_std(steps) ** 2)) * several)


def against_the_optimum(steps: int) -> list[dict[str, object]]:
    rows = []
    for passes in PASSES:
        least = least_mean_error(steps, steps // passes)
        strategies: dict[str, Strategy] = {
            "best": BestStrategy(steps).made_for(steps, passes, steps // passes),
            "best of four vectors": BestStrategy(4).made_for(steps, passes, steps // passes),
            "best of no vectors": BestStrategy(0).made_for(steps, passes, steps // passes),
            "buffered Toeplitz": BufferedToeplitz(),
            "Toeplitz": ToeplitzSquareRoot(),
            "Toeplitz, normalised": ToeplitzSquareRoot(normalised=True),
            "tree": BinaryTree(),
            "tree, Honaker": BinaryTree("honaker"),
        }
        for name, strategy in strategies.items():
            ratio = mean_error(strategy, steps, passes) / least
            rows.append(
                {
                    "steps": steps,
                    "passes": passes,
                    "strategy": name,
                    "over the optimum": round(ratio, 4),
                }
            )
            print(rows[-1], flush=True)
    return rows


def with_decay(steps: int) -> list[dict[str, object]]:
    rows = []
    for momentum, decay, passes in product(MOMENTA, DECAYS, PASSES):
        workload, apart = Workload(momentum, DECAYS[decay]), steps // passes
        least = least_mean_error(steps, apart, workload=workload)
        found = {
            name: error_of_iterates(BestStrategy(steps, known), workload, steps, passes) / least
            for name, known in (("decay", workload), ("constant rates", Workload(momentum)))
        }
        few = mean_error(BestStrategy(4, workload).made_for(steps, passes, apart), steps, passes)
        rows.append(
            {
                "steps": steps,
                "passes": passes,
                "momentum": momentum,
                "decay": decay,
                "fitted to the decay": round(found["decay"], 4),
                "fitted to it, four vectors": round(few / least, 4),
                "fitted to constant rates": round(found["constant rates"], 4),
            }
        )
        print(rows[-1], flush=True)
    return rows


def error_of_iterates(best: BestStrategy, workload: Workload, steps: int, passes: int) -> float:
    """Mean error of a workload's iterates, whatever the bands were fitted to."""
    apart = steps // passes
    strategy = best.made_for(steps, passes, apart)
    assert isinstance(strategy, BandedToeplitz)
    column, rows = strategy.coefficients(steps)
    errors = workload.errors(inverse(column, steps), 1 / rows)
    charged = strategy.sensitivity(steps, passes, apart, regular=True)
    return float(np.sqrt(np.mean(errors**2)) * charged)


def against_dp_sgd() -> list[dict[str, object]]:
    rows = []
    for epochs, epsilon in CELLS:
        steps = epochs * N // BATCH
        found = []
        for bands in BANDS:
            sampler = CyclicPoissonSampling(BATCH / N, bands)
            run = RunShape(sampler, N, BATCH, steps, "add-or-remove-one")
            found.append(banded_error(run, Workload(), epsilon=epsilon, delta=DELTA))
        best, sgd = min(found, key=lambda each: each.mean_error), found[0]
        ratio = best.mean_error / sgd.mean_error
        rows.append(
            {
                "epochs": epochs,
                "epsilon": epsilon,
                "bands": best.bands,
                "over DP-SGD": round(ratio, 4),
                "noise multiplier of DP-SGD": round(sgd.noise_multiplier, 4),
                "for the same error": round(ratio * sgd.noise_multiplier, 4),
            }
        )
        print(rows[-1], flush=True)
    return rows


def write(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--steps", type=int, default=256)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    write(options.out / "correlated_errors.csv", against_the_optimum(options.steps))
    write(options.out / "decay_errors.csv", with_decay(options.steps))
    write(options.out / "amplified_errors.csv", against_dp_sgd())


if __name__ == "__main__":
    main()
