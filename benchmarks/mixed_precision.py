"""Time and memory of private steps in bfloat16, as multiples of plain PyTorch's: GPT-2 small,
ViT-B, and low-rank updates of a Llama of 1.2 billion weights, on an accelerator.

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
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from dpoptim.training.memory import LiveTensors
from saving import save_csv
from steps import Step, opacus, ours, plain
from workloads import (
    WORKLOADS,
    VisionTransformer,
    Workload,
    adapted,
    classes,
    gpt,
    image,
    labels,
    llama,
)

WARM, ROUNDS = 3, 9


def words(output: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
    """As `tokens`, with classes on the last axis: a GPU takes an eighth of the time for that."""
    losses = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
    of_records = losses.view(target.shape).mean(1)
    return of_records.mean() if reduction == "mean" else of_records


def llama_1b() -> torch.nn.Module:
    """Of the shape of Llama 3.2 1B, in bfloat16, with updates of rank 8 in float32."""
    model = llama(2048, 16, 32, 8, hidden=8192, vocabulary=128_256, tied=True)
    return adapted(model.to(torch.bfloat16))


GPT_2, LLAMA = labels(16, 50_257, 1024), labels(8, 128_256, 1024)
LARGE = {
    work.name: work
    for work in (
        Workload(
            "GPT-2",
            lambda: gpt(768, 12, 12, vocabulary=50_257, length=1024, tied=True),
            GPT_2,
            GPT_2,
            words,
        ),
        Workload(
            "ViT-B",
            lambda: VisionTransformer(768, 12, 12, patches=196, numbers=768, classes=1000),
            image(128, 196, 768),
            labels(128, 1000),
            classes,
        ),
        Workload("Llama-1B, LoRA", llama_1b, LLAMA, LLAMA, words),
    )
}


def variants(narrow: torch.dtype) -> dict[str, Callable[[Workload, str], Step]]:
    """What takes turns, by name."""

    def step(make: Callable[..., Step], **options: bool) -> Callable[[Workload, str], Step]:
        return lambda work, device: make(work, device=device, narrow=narrow, **options)

    return {
        "plain": step(plain),
        "ours": step(ours),
        "ours, noise": step(ours, noise=True),
        "Opacus, hooks": step(opacus, ghost=False),
        "Opacus, ghost": step(opacus, ghost=True),
        "plain, compiled": step(plain, compiled=True),
        "ours, compiled": step(ours, compiled=True),
    }


VARIANTS = variants(torch.bfloat16)
PEERS = ("Opacus, hooks", "Opacus, ghost")


def warm(step: Step) -> Step:
    for _ in range(WARM):
        step()
    return step


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
    return str(seen.key_averages(group_by_input_shape=False).table(sort_by=by, row_limit=25))


def main() -> None:
    found = torch.accelerator.current_accelerator()
    parser = argparse.ArgumentParser(description="Private steps in bfloat16, against plain ones.")
    parser.add_argument("--device", default=found.type if found else "cpu")
    parser.add_argument("--workload", nargs="*", choices=[*LARGE, *WORKLOADS], default=list(LARGE))
    parser.add_argument("--variant", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument(
        "--profile", action="store_true", help="print the kernels of a step of ours"
    )
    parser.add_argument("--out", type=Path, help="folder for the table")
    options = parser.parse_args()
    device = torch.device(options.device)
    rows: list[dict[str, object]] = []
    for name in options.workload:
        work = (LARGE | WORKLOADS)[name]
        steps: dict[str, Step] = {}
        for variant in dict.fromkeys(["plain", *options.variant]):
            try:
                steps[variant] = warm(VARIANTS[variant](work, options.device))
            except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
                if variant not in PEERS:
                    raise
                print(f"{name}: {variant} does not run: {type(error).__name__}: {error}")
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
                    "records": len(work.data()[0]),
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
        where = "" if device.type == "cpu" else f"_{device.type}"
        save_csv(rows, options.out / f"mixed_precision{where}.csv")


if __name__ == "__main__":
    main()
