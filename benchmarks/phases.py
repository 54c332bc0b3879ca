"""Where the time of a private step goes, in shares of the plain PyTorch step on the same model and
batch.

Both take turns under a profiler of Python functions; medians of the processor time of the thread
that runs the program. With several threads that is its share of what they divide among them, and
all that they do not, if the others are waited for asleep (``OMP_WAIT_POLICY=passive``), whatever
else the machine does.

Plain training computes the weight gradients inside its backward pass; ours forms norms and
weighted sums after it, from what the pass recorded, those of large layers record by record.

Run: ``OMP_WAIT_POLICY=passive python benchmarks/phases.py [--workload GPT ...] [--threads 1 2]
--out benchmarks/results``.
"""

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from saving import save_csv
from steps import ours, plain
from workloads import WORKLOADS

NAMES = (
    "softmax 785-10",
    "softmax 513-257",
    "MLP 784-256-10",
    "small CNN",
    "GPT",
    "Llama-like",
    "ViT",
    "ResNet, GroupNorm",
)
FUNCTIONS = {  # what a phase is the time of, and of which file
    "backward": ("method 'run_backward'", ""),
    "close": ("_close", "engine.py"),
    "norms": ("measure", "clipped_sum.py"),
    "sums": ("add_weighted", "clipped_sum.py"),
    "alone": ("add_record_by_record", "record_by_record.py"),
    "update": ("write_means", "engine.py"),
    "step": ("step", "sgd.py"),
}
Phases = dict[str, float]


def phases_of(step: Callable[[], None]) -> Phases:
    """This thread's seconds of one step by function, with all that these call."""
    profiler = cProfile.Profile(time.thread_time)
    profiler.enable()
    step()
    profiler.disable()
    stats = pstats.Stats(profiler)
    found = dict.fromkeys([*FUNCTIONS, "all"], 0.0)
    found["all"] = stats.total_tt  # type: ignore[attr-defined]
    for (file, _, function), (_, _, _, cumulative, _) in stats.stats.items():  # type: ignore[attr-defined]
        for phase, (name, where) in FUNCTIONS.items():
            if (
                name in function
                if phase == "backward"
                else name == function and file.endswith(where)
            ):
                found[phase] += cumulative
    return found


def measure(name: str, rounds: int, threads: int) -> dict[str, object]:
    torch.set_num_threads(threads)
    both = {"plain": plain(WORKLOADS[name]), "ours": ours(WORKLOADS[name])}
    found: dict[str, list[Phases]] = {variant: [] for variant in both}
    for turn in range(rounds + 2):
        for variant, step in both.items():
            phases = phases_of(step)
            if turn >= 2:  # the first ones are slower
                found[variant].append(phases)
    old, new = (
        {key: statistics.median(each[key] for each in turns) for key in turns[0]}
        for turns in found.values()
    )
    whole = old["all"]
    parts = {
        "plain: forward": old["all"] - old["backward"] - old["step"],
        "backward": old["backward"],
        "optimizer": old["step"],
        "ours: forward": new["all"] - new["backward"] - new["step"] - new["update"],
        "backward to inputs": new["backward"] - new["close"],
        "norms": new["norms"],
        "weighted sums": new["sums"],
        "both, record by record": new["alone"],
        "rest of the recorder": new["close"] - new["norms"] - new["sums"] - new["alone"],
        "update": new["update"] + new["step"],
        "in all": new["all"],
    }
    row: dict[str, object] = {"work": name, "threads": threads, "plain, ms": round(whole * 1e3, 1)}
    return row | {part: round(seconds / whole, 3) for part, seconds in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workload", nargs="*", default=NAMES, choices=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", nargs="*", type=int, default=[1])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    asked = parser.parse_args()
    rows = []
    for name in asked.workload:
        small = name.startswith(("softmax", "MLP"))
        for threads in asked.threads:
            rows.append(measure(name, asked.rounds * (20 if small else 1), threads))
            print(rows[-1], flush=True)
    save_csv(rows, asked.out / "phases.csv")


if __name__ == "__main__":
    main()
