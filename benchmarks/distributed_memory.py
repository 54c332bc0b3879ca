"""The most memory that a rank takes under ``fully_shard``, plain and private: in attach, and in a
step.

Each variant has processes of its own, whose C library gives freed memory back at once, so that
the resident set is what is in use; counted from what the process had before the model was built,
after a small model ran in the same way. With AdamW: parameters, gradients and its two averages
are shards. Linux only.
"""

import gc
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distributed_steps import MAKERS, Case
from ranks_of_benchmark import answered, leave
from workloads import WORKLOADS, VisionTransformer, Workload, gpt

GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_ARENA_MAX": "1"}
MEASURED = {  # the workload, what its batch is divided by, and a small one of its kind
    "GPT": (4, lambda: gpt(16, 1, 1)),
    "ViT": (4, lambda: VisionTransformer(24, 1, 3)),
}

OVER_PLAIN = ("memory over plain, FSDP2", "attach over a plain step, FSDP2")


def resident(key: str) -> int:
    """Bytes: ``VmRSS`` now, ``VmHWM`` at most since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


def forget_peak() -> None:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def rank_main(rank: int, size: int, store: str, who: str, title: str, answer: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    part, small = MEASURED[title]
    work = WORKLOADS[title]
    like = Workload(work.name, small, work.inputs, work.targets, work.loss)
    first = MAKERS[who](Case(like, part, "AdamW"), "FSDP2", dist.group.WORLD)
    first()
    first()
    gc.collect()
    before = resident("VmRSS")
    forget_peak()
    step = MAKERS[who](Case(work, part, "AdamW"), "FSDP2", dist.group.WORLD)
    attach = resident("VmHWM") - before
    step()  # the optimizer makes its averages
    forget_peak()
    step()
    step()
    found = attach, resident("VmHWM") - before
    leave(rank, answer, found)


def measured(who: str, title: str, size: int = 2) -> tuple[int, int]:
    """Bytes at most on rank 0: until the model is attached, and in a step."""
    before = dict(os.environ)
    os.environ.update(GIVE_BACK)
    try:
        found: tuple[int, int] = answered(rank_main, size, who, title)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return found


def memory_columns(title: str) -> dict[str, str]:
    """MiB of plain and private, at most in attach and in a step; the ratio of steps, and what
    attach takes of a plain step.
    """
    names = [
        f"{who}, FSDP2 {where} MiB" for who in ("plain", "private") for where in ("start", "step")
    ]
    if title not in MEASURED:  # too small to be seen in a process
        return dict.fromkeys([*names, *OVER_PLAIN], "")
    found = [each for who in ("plain", "private") for each in measured(who, title)]
    ratios = (f"{each / found[1]:.3g}" for each in (found[3], found[2]))
    return dict(zip(names, (f"{each / 2**20:.0f}" for each in found), strict=True)) | dict(
        zip(OVER_PLAIN, ratios, strict=True)
    )
