"""How fast is the noise? Millions of normal numbers a second, ours beside torch's and numpy's
generators.

    python benchmarks/noise_throughput.py [--size 4194304] [--rounds 15] [--json FILE]
    python benchmarks/noise_throughput.py --device cuda --size 124439808

All contenders overwrite (or add to) an array that already exists. They take turns within each
round, so that a busy machine slows all of them alike; printed are medians over the rounds, and the
same of the processor time that all threads took, which a busy machine changes less: if that does
not grow with threads, they scale where cores are free. Ours is the only cryptographic one. On a
device, each is waited for.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from dpoptim.noise import KeyStream, add_normal, fill_standard_normal


def contenders(size: int, threads: int) -> dict[str, Callable[[], object]]:
    """Name -> one fill of `size` numbers with `threads` threads (torch.randn on CPU always uses
    one).
    """
    stream = KeyStream()
    double = torch.zeros(size, dtype=torch.float64)
    single = torch.zeros(size, dtype=torch.float32)
    words = np.empty(size, np.uint64)
    pieces = np.array_split(double.numpy(), threads)
    generators = [np.random.Generator(np.random.SFC64()) for _ in pieces]
    pool = ThreadPoolExecutor(threads)

    def sfc64() -> None:
        list(pool.map(lambda g, piece: g.standard_normal(out=piece), generators, pieces))

    return {
        "ours, fill float64": lambda: fill_standard_normal(stream, double, threads=threads),
        "ours, add to float64": lambda: add_normal(stream, double, 1.0, threads=threads),
        "ours, add to float32": lambda: add_normal(stream, single, 1.0, threads=threads),
        "our keystream alone (words, 1 thread)": lambda: stream.words(words),
        "torch.randn float64": lambda: torch.randn(size, out=double),
        "torch.randn float32 (no tail beyond 5.77)": lambda: torch.randn(size, out=single),
        "numpy SFC64 standard_normal": sfc64,
    }


def contenders_on(device: torch.device, size: int) -> dict[str, Callable[[], object]]:
    """As `contenders`, for arrays on a device. The parts are as many as GPT-2 has parameters."""
    stream = KeyStream()
    double = torch.zeros(size, dtype=torch.float64, device=device)
    single = torch.zeros(size, dtype=torch.float32, device=device)
    parts = [*single.tensor_split(148)]
    return {
        "ours, fill float64": lambda: fill_standard_normal(stream, double),
        "ours, add to float64": lambda: add_normal(stream, double, 1.0),
        "ours, add to float32": lambda: add_normal(stream, single, 1.0),
        "ours, add to 148 tensors of float32": lambda: add_normal(stream, parts, 1.0),
        "torch.randn float64": lambda: torch.randn(size, out=double, device=device),
        "torch.randn float32": lambda: torch.randn(size, out=single, device=device),
    }


def measure(size: int, threads: int, rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Median millions of numbers a second, and a second of processor time, for every contender."""
    torch.set_num_threads(threads)
    clocks = (time.perf_counter, time.process_time)
    seconds: dict[str, list[list[float]]] = {}
    there = device.type != "cpu"
    runs = contenders_on(device, size) if there else contenders(size, threads)
    for turn in range(rounds + 1):
        for name, run in runs.items():
            start = [clock() for clock in clocks]
            run()
            if there:
                torch.accelerator.synchronize(device)
            if turn:  # the first turn warms up
                taken = [clock() - began for clock, began in zip(clocks, start, strict=True)]
                seconds.setdefault(name, []).append(taken)
    return {
        name: [size / statistics.median(each) / 1e6 for each in zip(*values, strict=True)]
        for name, values in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=1 << 22, help="numbers in a fill")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()

    cores = os.cpu_count() or 1
    counts = sorted({1, cores}) if options.device.type == "cpu" else [1]
    table = {
        threads: measure(options.size, threads, options.rounds, options.device)
        for threads in counts
    }
    print(
        f"{options.size} numbers, medians of {options.rounds} interleaved rounds, millions a "
        "second (a second of processor time)"
    )
    print(f"{'':<44}" + "".join(f"{f'{threads} thread(s)':>16}" for threads in table))
    for name in table[1]:
        figures = ("{:.0f} ({:.0f})".format(*column[name]) for column in table.values())
        print(f"{name:<44}" + "".join(f"{each:>16}" for each in figures))
    if options.json:
        facts = {
            "size": options.size,
            "rounds": options.rounds,
            "torch": torch.__version__,
            "cores": cores,
            "device": str(options.device),
        }
        facts |= {"machine": platform.machine(), "numpy": np.__version__}
        options.json.write_text(json.dumps(facts | {"millions_per_second": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
