"""What a rank of test_many_processes.py runs: the same plan by every loop."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from integrations.small_language import Bag, Sentences
from integrations.test_same_weights import (
    Weights,
    by_accelerate,
    by_lightning,
    plain,
    trainer,
    weights,
)


def bare(found: Weights) -> dict[str, Tensor]:
    return {name.removeprefix("module."): value for name, value in found.items()}


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")  # other libraries' own
    data = Sentences()
    # which starts the process group
    results = {"Accelerate": bare(by_accelerate(Bag(), data, 4))}
    model = Bag()
    trainer(model, data, folder, 4).train()
    results["Trainer"] = weights(model)
    results["plain"] = plain(Bag(), data, 4)
    several: dict[str, Any] = {"devices": 2, "strategy": "ddp"}
    results["Lightning"], fit = by_lightning(Bag(), data, folder, 4, **several)
    results["Lightning steps"] = {"steps": torch.tensor(fit.global_step)}
    fit.save_checkpoint(folder / "final.ckpt")  # of weights: nobody goes on from here
    torch.save(results, folder / f"rank{dist.get_rank()}.pt")
