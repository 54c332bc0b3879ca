"""Time and memory of private steps in bfloat16, as multiples of plain PyTorch's: GPT-2 small and
ViT-B on an accelerator.

Variants take turns, each with a model and a batch of its own (so all of them must fit), under
torch.autocast; medians. "ours" clips and sums, "ours, noise" also draws the noise, on the device.
Memory is the peak above model, optimizer and batch: of the device's allocator, on the CPU of
tensors alive. ``--profile`` prints the kernels that take longest.

Run: ``python benchmarks/mixed_precision.py [--workload GPT-2] [--profile] [--out DIR]``. Without
an accelerator, the smaller models of `step_time.py`: ``--device cpu --workload GPT ViT``.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from dpoptim.training.memory import LiveTensors
from saving import save_csv
from steps import Step, ours, plain
from workloads import WORKLOADS, VisionTransformer, Workload, classes, gpt, image, labels, tokens

WARM, ROUNDS = 3, 9


GPT_2 = labels(8, 50_257, 1024)
LARGE = {
    work.name: work
    for work in (
        Workload(
            "GPT-2",
            lambda: gpt(768, 12, 12, vocabulary=50_257, length=1024, tied=True),
            GPT_2,
            GPT_2,
            tokens,
        ),
        Workload(
            "ViT-B",
            lambda: VisionTransformer(768, 12, 12, patches=196, numbers=768, classes=1000),
            image(64, 196, 768),
            labels(64, 1000),
            classes,
        ),
    )
}


VARIANTS: dict[str, Callable[[Workload, str], Step]] = {
    "plain": lambda work, device: plain(work, device=device, narrow=torch.bfloat16),
    "ours": lambda work, device: ours(work, device=device, narrow=torch.bfloat16),
    "ours, noise": lambda work, device: ours(
        work, noise=True, device=device, narrow=torch.bfloat16
    ),
    "plain, compiled": lambda work, device: plain(
        work, compiled=True, device=device, narrow=torch.bfloat16
    ),
    "ours, compiled": lambda work, device: ours(
        work, compiled=True, device=device, narrow=torch.bfloat16
    ),
}


def seconds(step: Step, device: torch.device) -> float:
    wait(device)
    started = time.perf_counter()
    step()
    wait(device)
    return time.perf_counter() - started


def wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def peak(step: Step, device: torch.device) -> float:
    """MiB that a step takes beyond what is there before."""
    if device.type == "cpu":
        with LiveTensors() as live:
            step()
        return live.peak / 2**20
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    step()
    wait(device)
    return (torch.accelerator.max_memory_allocated(device) - before) / 2**20


def kernels(step: Step, device: torch.device) -> str:
    """Where a step's time goes, by kernel."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as seen:
        step()
        wait(device)
    by = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return str(seen.key_averages(group_by_input_shape=False).table(sort_by=by, row_limit=15))


def main() -> None:
    found = torch.accelerator.current_accelerator()
    parser = argparse.ArgumentParser(description="Private steps in bfloat16, against plain ones.")
    parser.add_argument("--device", default=found.type if found else "cpu")
    parser.add_argument("--workload", nargs="*", choices=[*LARGE, *WORKLOADS], default=list(LARGE))
    parser.add_argument("--variant", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument(
        "--profile", action="store_true", help="print the kernels of a step of ours"
    )
    parser.add_argument("--out", type=Path, help="folder for mixed_precision.csv")
    options = parser.parse_args()
    device = torch.device(options.device)
    rows: list[dict[str, object]] = []
    for name in options.workload:
        work = (LARGE | WORKLOADS)[name]
        steps = {
            variant: VARIANTS[variant](work, options.device)
            for variant in dict.fromkeys(["plain", *options.variant])
        }
        for step in steps.values():
            for _ in range(WARM):
                step()
        memory = {variant: peak(step, device) for variant, step in steps.items()}
        times: dict[str, list[float]] = {variant: [] for variant in steps}
        for _ in range(ROUNDS):
            for variant, step in steps.items():
                times[variant].append(seconds(step, device))
        for variant, taken in times.items():
            middle, base = statistics.median(taken), statistics.median(times["plain"])
            rows.append(
                {
                    "workload": name,
                    "variant": variant,
                    "milliseconds": f"{middle * 1e3:.4g}",
                    "ratio": f"{middle / base:.3g}",
                    "samples_per_second": f"{len(work.data()[0]) / middle:.4g}",
                    "peak_mib": f"{memory[variant]:.0f}",
                }
            )
        if options.profile:
            print(kernels(steps.get("ours", steps["plain"]), device))
    table = Table(*rows[0], title=f"{device}, torch {torch.__version__}, bfloat16")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=120).print(table)
    if options.out is not None:
        save_csv(rows, options.out / "mixed_precision.csv")


if __name__ == "__main__":
    main()
