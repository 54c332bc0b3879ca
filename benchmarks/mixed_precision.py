"""Time and memory of private steps in bfloat16, as multiples of plain PyTorch's: GPT-2 small,
ViT-B, low-rank updates of a Llama of 1.2 billion weights, and a ResNet, on an accelerator.

Variants take turns, each with a model and a batch of its own (so all of them must fit), under
torch.autocast; medians. "ours" clips and sums, "ours, noise" also draws the noise, on the device,
and "ours, graph" has its passes in a CUDA graph (on other devices it is the same as that); Opacus
takes part where it is installed and runs. Memory is the peak of the first steps above model,
optimizer and batch: of the device's allocator, on the CPU of tensors alive. ``--profile`` prints
the kernels that take longest, ``--docs`` writes the table into a page.

Run: ``python benchmarks/mixed_precision.py --device cuda [--out benchmarks/results]
[--docs docs/speed.md]``, which is every row of the page's table. Without an accelerator, the
smaller models of `step_time.py` (``--device cpu --workload GPT ViT``), or, to try the command, the
same ones made tiny: ``--device cpu --tiny``.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from dpoptim.training.trials.memory import LiveTensors
from saving import save_csv, write_between
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
    resnet,
)

WARM, ROUNDS = 5, 9  # the fifth step of a graph is the first that is replayed


def words(output: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
    """As `tokens`, with classes on the last axis: a GPU takes an eighth of the time for that."""
    losses = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
    of_records = losses.view(target.shape).mean(1)
    return of_records.mean() if reduction == "mean" else of_records


def gpt_2(records: int, *, tiny: bool) -> Workload:
    """GPT-2 small; its vocabulary is odd, and tiny's as well."""
    width, depth, vocabulary, length = (24, 1, 57, 8) if tiny else (768, 12, 50_257, 1024)

    def build() -> torch.nn.Module:
        return gpt(width, depth, 12, vocabulary=vocabulary, length=length, tied=True)

    batch = labels(records, vocabulary, length)
    return Workload("GPT-2", build, batch, batch, words)


def vit_b(records: int, *, tiny: bool) -> Workload:
    width, depth, patches, classes_ = (24, 1, 9, 5) if tiny else (768, 12, 196, 1000)

    def build() -> torch.nn.Module:
        return VisionTransformer(width, depth, 12, patches=patches, numbers=width, classes=classes_)

    images = image(records, patches, width)
    return Workload("ViT-B", build, images, labels(records, classes_), classes)


def llama_1b(records: int, *, tiny: bool) -> Workload:
    """Of the shape of Llama 3.2 1B, in bfloat16, with updates of rank 8 in float32."""
    width, depth, heads, vocabulary = (32, 1, 8, 57) if tiny else (2048, 16, 32, 128_256)
    length = 8 if tiny else 1024

    def build() -> torch.nn.Module:
        model = llama(
            width, depth, heads, heads // 4, hidden=4 * width, vocabulary=vocabulary, tied=True
        )
        return adapted(model.to(torch.bfloat16))

    batch = labels(records, vocabulary, length)
    return Workload("Llama-1B, LoRA", build, batch, batch, words)


def resnet_wide(records: int, *, tiny: bool) -> Workload:
    """As in `workloads`."""
    width, side = (8, 8) if tiny else (64, 32)
    images = image(records, 3, side, side)
    return Workload("ResNet, wide", lambda: resnet(width), images, labels(records, 10), classes)


LARGE: dict[str, tuple[Callable[..., Workload], tuple[int, ...]]] = {
    "GPT-2": (gpt_2, (16, 8)),
    "ViT-B": (vit_b, (128, 64)),
    "Llama-1B, LoRA": (llama_1b, (8, 4)),
    "ResNet, wide": (resnet_wide, (64,)),
}


def workloads(name: str, *, tiny: bool = False) -> list[Workload]:
    """A model with each of its batches; of 4 and 2 records where ``tiny``."""
    if name not in LARGE:
        return [WORKLOADS[name]]
    make, batches = LARGE[name]
    return [
        make(records // (batches[0] // 4) if tiny else records, tiny=tiny) for records in batches
    ]


def variants(narrow: torch.dtype) -> dict[str, Callable[[Workload, str], Step]]:
    """What takes turns, by name."""

    def step(make: Callable[..., Step], **options: bool) -> Callable[[Workload, str], Step]:
        return lambda work, device: make(work, device=device, narrow=narrow, **options)

    return {
        "plain": step(plain),
        "ours": step(ours),
        "ours, noise": step(ours, noise=True),
        "ours, graph": step(ours, noise=True, graphed=True),
        "Opacus, hooks": step(opacus, ghost=False),
        "Opacus, ghost": step(opacus, ghost=True),
        "plain, compiled": step(plain, compiled=True),
        "ours, compiled": step(ours, compiled=True),
    }


VARIANTS = variants(torch.bfloat16)
IN_MEMORY = ("ours, noise", "ours, graph")
PEERS = ("Opacus, hooks", "Opacus, ghost")
UNCOMPILED = [name for name in VARIANTS if "compiled" not in name]


def warm(step: Step) -> None:
    for _ in range(WARM):
        step()


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
    """MiB that the first steps take beyond what is there before."""
    if device.type == "cpu":
        with LiveTensors() as live:
            warm(step)
        return live.peak / 2**20
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    warm(step)
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


def measure(
    work: Workload, names: Sequence[str], device: torch.device, *, profiled: bool = False
) -> list[dict[str, object]]:
    """A row for each variant that runs, plain first."""
    steps: dict[str, Step] = {}
    memory: dict[str, float] = {}
    for variant in dict.fromkeys(["plain", *names]):
        try:
            step = VARIANTS[variant](work, str(device))
            memory[variant] = peak(step, device)
            steps[variant] = step
        except (RuntimeError, NotImplementedError, TypeError, ValueError, ImportError) as error:
            if variant not in PEERS:
                raise
            print(f"{work.name}: {variant} does not run: {type(error).__name__}: {error}")
        gc.collect()  # what a variant that failed had made
    times: dict[str, list[float]] = {variant: [] for variant in steps}
    for _ in range(ROUNDS):
        for variant, step in steps.items():
            times[variant].append(seconds(step, device))
    if profiled:
        print(kernels(steps.get("ours", steps["plain"]), device))
    records = len(work.data()[0])
    medians = {variant: statistics.median(taken) for variant, taken in times.items()}
    return [
        {
            "workload": work.name,
            "variant": variant,
            "records": records,
            "milliseconds": f"{middle * 1e3:.4g}",
            "ratio": f"{middle / medians['plain']:.3g}",
            "samples_per_second": f"{records / middle:.4g}",
            "peak_mib": f"{memory[variant]:.0f}",
        }
        for variant, middle in medians.items()
    ]


def page_table(rows: Sequence[Mapping[str, object]]) -> str:
    """The page's table: multiples of plain's time, and of its memory without and with a graph."""
    timed = [name for name in VARIANTS if any(row["variant"] == name for row in rows)]
    heads = ["model", "records", "plain, ms", *timed[1:], "memory, ours / plain"]
    out = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    found: dict[tuple[str, int], dict[str, Mapping[str, object]]] = {}
    for row in rows:
        key = (str(row["workload"]), int(str(row["records"])))
        found.setdefault(key, {})[str(row["variant"])] = row
    names = list(dict.fromkeys(name for name, _ in found))
    for name, records in sorted(found, key=lambda key: (names.index(key[0]), -key[1])):
        of = found[name, records]
        cells = [str(of[each]["ratio"]) if each in of else "-" for each in timed[1:]]
        base = float(str(of["plain"]["peak_mib"]))
        peaks = [float(str(of[each]["peak_mib"])) for each in IN_MEMORY if each in of]
        memory = ", ".join(f"{each / base:.2f}" for each in peaks) if base else "-"
        taken = f"{float(str(of['plain']['milliseconds'])):.3g}"
        out.append(f"| {' | '.join([name, str(records), taken, *cells, memory])} |")
    return "\n".join(out)


def main() -> None:
    found = torch.accelerator.current_accelerator()
    parser = argparse.ArgumentParser(description="Private steps in bfloat16, against plain ones.")
    parser.add_argument("--device", default=found.type if found else "cpu")
    choices = list(dict.fromkeys([*LARGE, *WORKLOADS]))
    parser.add_argument("--workload", nargs="*", choices=choices, default=list(LARGE))
    parser.add_argument("--variant", nargs="*", choices=list(VARIANTS), default=UNCOMPILED)
    parser.add_argument("--tiny", action="store_true", help="the large models, made tiny")
    parser.add_argument(
        "--profile", action="store_true", help="print the kernels of a step of ours"
    )
    parser.add_argument("--out", type=Path, help="folder for the table")
    parser.add_argument("--docs", type=Path, help="page that the table is written into")
    options = parser.parse_args()
    device = torch.device(options.device)
    rows = [
        row
        for name in options.workload
        for work in workloads(name, tiny=options.tiny)
        for row in measure(work, options.variant, device, profiled=options.profile)
    ]
    table = Table(*rows[0], title=f"{device}, torch {torch.__version__}, bfloat16")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=120).print(table)
    if options.out is not None:
        where = "" if device.type == "cpu" else f"_{device.type}"
        save_csv(rows, options.out / f"mixed_precision{where}.csv")
    if options.docs is not None:
        write_between(options.docs, {"accelerator": page_table(rows)}, "mixed_precision")


if __name__ == "__main__":
    main()
