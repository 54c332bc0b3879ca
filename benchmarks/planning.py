"""Seconds of planning and drawing: calibrations, prices of long runs, coins, one pass over a file.

    python benchmarks/planning.py --out benchmarks/results

Medians of processor time on one thread; no calibration finds an earlier one. The regression is from
noisy sums, over a table on disk of which a chunk at a time is in memory; it is removed at the end.
That of 100 million records, 20 GB, is left out where the disk has no room for it twice; of it the
seconds of the clock are given, once, after the system was asked to forget what it knew of the file.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import dp_accounting
import numpy as np

from dpoptim.accounting import calibrate_noise_multiplier, compute_epsilon
from dpoptim.noise.stream import KeyStream
from dpoptim.sampling import PoissonSampling
from dpoptim.solvers import Budget, LinearModel
from dpoptim.solvers.sufficient_statistics import sufficient_statistics
from one_table import write_table

DELTA, RELATION = 1e-5, "add-or-remove-one"
REPEATS = 5
COINS = ((1_000_000, 1e-4), (1_000_000, 1e-3), (1_000_000, 1e-2), (100_000_000, 1e-5))
RECORDS, MANY_RECORDS, FEATURES, CHUNK = 4_000_000, 100_000_000, 50, 1 << 16


def seconds(work: Callable[[int], object], repeats: int = REPEATS) -> float:
    """Median processor time of ``work(0)``, ``work(1)``, ..., after one that does not count."""
    found = []
    for number in range(repeats + 1):
        start = time.process_time()
        work(number)
        found.append(time.process_time() - start)
    return statistics.median(found[1:])


def calibrated(number: int) -> None:
    """A calibration of 6,000 steps; epsilons differ, so that nothing is remembered."""
    calibrate_noise_multiplier(
        sample_rate=500 / 60_000,
        steps=6_000,
        epsilon=2 + number / 1000,
        delta=DELTA,
        neighboring=RELATION,
    )


def priced(number: int) -> None:
    """Ten million steps; noise differs likewise."""
    step = dp_accounting.PoissonSampledDpEvent(
        1e-4, dp_accounting.GaussianDpEvent(1 + number / 1000)
    )
    event = dp_accounting.SelfComposedDpEvent(step, 10_000_000)
    compute_epsilon(event, DELTA, RELATION)


def coins(records: int, rate: float) -> Callable[[int], None]:
    """The records of a step."""
    batches = PoissonSampling(rate).batches(KeyStream.from_seed(1, "coins"), records)

    def toss(_: int) -> None:
        next(batches)

    return toss


def by_the_clock(work: Callable[[int], object], file: Path) -> float:
    """Seconds of ``work(0)``, which reads a file from the disk."""
    os.sync()
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    work(0)
    return time.perf_counter() - start


def by_regression(folder: Path, records: int, *, clock: bool = False) -> tuple[float, float]:
    """Seconds of a closed-form regression from a table on disk, and of reading the table."""
    shape, generator = (records, FEATURES), np.random.default_rng(0)
    file, y = folder / "x.npy", np.empty(records)
    x = np.lib.format.open_memmap(file, "w+", np.float32, shape)
    for start in range(0, records, CHUNK):
        part = x[start : start + CHUNK]
        generator.random(dtype=np.float32, out=part)
        y[start : start + CHUNK] = part[:, 0]
    x.flush()
    del x, part
    model = LinearModel("squared", features=FEATURES)

    def fit(number: int) -> None:
        data = (np.load(file, mmap_mode="r"), y)
        budget = Budget(delta=DELTA, epsilon=1.0)
        sufficient_statistics(model, data, budget, radius=5.0, noise_seed=number)

    def read(_: int) -> None:
        found, room = np.load(file, mmap_mode="r"), np.empty((CHUNK, FEATURES), np.float32)
        for start in range(0, records, CHUNK):
            part = found[start : start + CHUNK]
            room[: len(part)] = part

    if clock:
        return by_the_clock(fit, file), by_the_clock(read, file)
    return seconds(fit, 3), seconds(read, 3)


def rows(records: int = RECORDS, many: int = MANY_RECORDS) -> Iterator[dict[str, object]]:
    """Lines of the table, one after the other; without the large table where no disk holds it."""
    yield row("calibration of 6,000 steps", seconds(calibrated))
    yield row("price of 10,000,000 steps", seconds(priced))
    for population, rate in COINS:
        name = f"coins of {population:,} records, {round(population * rate):,} expected"
        yield row(name, seconds(coins(population, rate), 50))
    yield from regressions(records, clock=False)
    if shutil.disk_usage(tempfile.gettempdir()).free > 2 * 4 * many * FEATURES:
        yield from regressions(many, clock=True)


def regressions(records: int, *, clock: bool) -> Iterator[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        fitted, read = by_regression(Path(folder), records, clock=clock)
    table = f"a table on disk of {records:,} x {FEATURES}, float32" + ", by the clock" * clock
    yield row(f"regression in closed form from {table}", fitted)
    yield row(f"reading {table}", read)


def row(what: str, took: float) -> dict[str, object]:
    return {"what": what, "seconds": float(f"{took:.3g}")}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["DPOPTIM_CACHE_DIR"] = cache
        write_table("planning", __doc__, rows())
