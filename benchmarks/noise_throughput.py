"""How fast is the noise? Millions of normal numbers a second, ours beside torch's and numpy's
generators; on a device, milliseconds.

    python benchmarks/noise_throughput.py [--size 4194304] [--rounds 15] [--json FILE]
    python benchmarks/noise_throughput.py --device cuda

All contenders overwrite (or add to) an array that already exists. They take turns within each
round, so that a busy machine slows all of them alike; printed are medians over the rounds, and the
same of the processor time that all threads took, which a busy machine changes less: if that does
not grow with threads, they scale where cores are free. Ours is the only cryptographic one. On a
device, each is waited for; sizes are few numbers and as many as GPT-2 small has parameters. "room"
is the memory that a call takes meanwhile; "first" its first call, in which kernels are compiled
(where Triton has not kept them) and compared with the CPU's draws.
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
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from dpoptim.noise import KeyStream, add_normal, fill_standard_normal, gaussian
from mixed_precision import peak, seconds

PARTS = 148  # parameters of GPT-2 small, which has as many numbers as the last of these
SIZES_THERE = [1 << 14, 1 << 16, 1 << 18, 124_439_808]


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
    """As `contenders`, for arrays on a device, each on its own or cut into `PARTS`."""
    stream = KeyStream()
    double = torch.zeros(size, dtype=torch.float64, device=device)
    single = torch.zeros(size, dtype=torch.float32, device=device)
    parts = [*single.tensor_split(PARTS)]
    narrow = [part.to(torch.bfloat16) for part in parts]

    def add(least: int) -> None:
        with patch.object(gaussian, "LEAST_ON_DEVICE", least):  # entries for which kernels draw
            add_normal(stream, single, 1.0)

    return {
        "ours, add to float32": lambda: add(0),
        "ours, add to float64": lambda: add_normal(stream, double, 1.0),
        f"ours, add to {PARTS} tensors of float32": lambda: add_normal(stream, parts, 1.0),
        f"ours, add to {PARTS} tensors of bfloat16": lambda: add_normal(stream, narrow, 1.0),
        "ours, add to float32, through the CPU": lambda: add(size + 1),
        "torch.randn float32": lambda: torch.randn(size, out=single, device=device),
        "torch.randn float64": lambda: torch.randn(size, out=double, device=device),
        "torch.randn and an addition, float32": lambda: single.add_(torch.randn_like(single)),
    }


def measure_on(device: torch.device, size: int, rounds: int) -> list[dict[str, object]]:
    """A line for each of `contenders_on`."""
    runs = contenders_on(device, size)
    first = {name: seconds(run, device) for name, run in runs.items()}
    room = {name: peak(run, device) for name, run in runs.items()}
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            taken[name].append(seconds(run, device))
    return [
        {
            "numbers": size,
            "what": name,
            "milliseconds": f"{statistics.median(each) * 1e3:.3g}",
            "room, MiB": f"{room[name]:.1f}",
            "first, s": f"{first[name]:.2g}",
        }
        for name, each in taken.items()
    ]


def measure(size: int, threads: int, rounds: int) -> dict[str, list[float]]:
    """Median millions of numbers a second, and a second of processor time, for every contender."""
    torch.set_num_threads(threads)
    clocks = (time.perf_counter, time.process_time)
    found: dict[str, list[list[float]]] = {}
    runs = contenders(size, threads)
    for turn in range(rounds + 1):
        for name, run in runs.items():
            start = [clock() for clock in clocks]
            run()
            if turn:  # the first turn warms up
                taken = [clock() - began for clock, began in zip(clocks, start, strict=True)]
                found.setdefault(name, []).append(taken)
    return {
        name: [size / statistics.median(each) / 1e6 for each in zip(*values, strict=True)]
        for name, values in found.items()
    }


def on_the_cpu(size: int, rounds: int) -> list[dict[str, object]]:
    """A line for each of `contenders`: with one thread, and with as many as there are cores."""
    counts = sorted({1, os.cpu_count() or 1})
    columns = {threads: measure(size, threads, rounds) for threads in counts}
    return [
        {
            "numbers": size,
            "what": name,
            **{
                f"{threads} thread(s)": "{:.0f} ({:.0f})".format(*column[name])
                for threads, column in columns.items()
            },
        }
        for name in columns[1]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, nargs="*", help="numbers in a fill")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    there = options.device.type != "cpu"
    found = [
        line
        for size in options.size or (SIZES_THERE if there else [1 << 22])
        for line in (
            measure_on(options.device, size, options.rounds)
            if there
            else on_the_cpu(size, options.rounds)
        )
    ]
    unit = "milliseconds" if there else "millions a second (a second of processor time)"
    table = Table(*found[0], title=f"{unit}, medians of {options.rounds} interleaved rounds")
    for line in found:
        table.add_row(*map(str, line.values()))
    Console(width=140).print(table)
    if options.json:
        facts = {
            "rounds": options.rounds,
            "torch": torch.__version__,
            "cores": os.cpu_count() or 1,
            "device": str(options.device),
            "machine": platform.machine(),
            "numpy": np.__version__,
        }
        options.json.write_text(json.dumps(facts | {"found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
