"""Amplified banded noise: b-min-sep batches against cyclic Poisson ones, at the same budget.

    python benchmarks/min_separation.py [--out benchmarks/results]

At n = 60,000, batch 500, delta 1e-5, add-or-remove-one: the noise multipliers that a budget asks
for in 10 and 40 epochs with the bands that are best on cyclic Poisson batches, and with twice as
many on b-min-sep batches; the mean errors of the prefix sums, also over those of DP-SGD; and the
seconds of processor time of a b-min-sep calibration without a cache. Rows are written as they are
found.
"""

import argparse
import csv
import os
import tempfile
import time
from pathlib import Path

from dpoptim.mechanisms import RunShape
from dpoptim.mechanisms.correlated import banded_error, best_bands
from dpoptim.noise.correlated import Workload
from dpoptim.sampling import CyclicPoissonSampling, MinSeparationSampling, Sampler

N, BATCH, DELTA = 60_000, 500, 1e-5
# epochs and epsilon; those of 40 epochs take eight to fifteen minutes each
CELLS = tuple((epochs, epsilon) for epochs in (10, 40) for epsilon in (1.0, 2.0, 4.0, 8.0))
FACTORS = (1, 2)


def compared(epochs: int, epsilon: float) -> dict[str, object]:
    """One row of the table."""
    steps = epochs * N // BATCH

    def shape(sampler: Sampler) -> RunShape:
        return RunShape(sampler, N, BATCH, steps, "add-or-remove-one")

    budget = {"epsilon": epsilon, "delta": DELTA}
    turns = CyclicPoissonSampling(BATCH / N, 1)
    bands = best_bands(shape(turns), N // BATCH, Workload(), **budget)
    cyclic = banded_error(shape(CyclicPoissonSampling(BATCH / N, bands)), Workload(), **budget)
    independent = banded_error(shape(turns), Workload(), **budget)
    start = time.process_time()
    found = {
        many: banded_error(shape(MinSeparationSampling(BATCH / N, many)), Workload(), **budget)
        for many in (factor * bands for factor in FACTORS)
        if many * BATCH <= N
    }
    best = min(found.values(), key=lambda each: each.mean_error)
    return {
        "epochs": epochs,
        "epsilon": epsilon,
        "bands": bands,
        "cyclic Poisson": round(cyclic.noise_multiplier, 4),
        "b-min-sep": round(found[bands].noise_multiplier, 4),
        "error over cyclic Poisson": round(found[bands].mean_error / cyclic.mean_error, 4),
        "best bands": best.bands,
        "error with these": round(best.mean_error / cyclic.mean_error, 4),
        "error over DP-SGD": round(best.mean_error / independent.mean_error, 4),
        "seconds each": round((time.process_time() - start) / len(found)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as cache,
        (options.out / "min_separation.csv").open("w", newline="") as stream,
    ):
        os.environ["DPOPTIM_CACHE_DIR"] = cache
        writer = None
        for epochs, epsilon in CELLS:
            row = compared(epochs, epsilon)
            if writer is None:
                writer = csv.DictWriter(stream, list(row))
                writer.writeheader()
            writer.writerow(row)
            stream.flush()
            print(row, flush=True)


if __name__ == "__main__":
    main()
