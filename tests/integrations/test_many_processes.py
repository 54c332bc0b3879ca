"""Trainer, Accelerate and Lightning in two processes release what a plain loop does."""

import importlib
from pathlib import Path

import pytest
import torch

from command_work import fork_ranks
from ranks import run_ranks

for name in ("transformers", "peft", "lightning.pytorch", "accelerate"):
    pytest.importorskip(name)


def in_two_processes(rank: int, folder: str) -> None:
    work = importlib.import_module("integrations.in_many_processes")  # slow: not in each of them
    fork_ranks(2, lambda: work.main(Path(folder)))


@pytest.mark.variants
@pytest.mark.slow
def test_loops_in_two_processes_release_the_same_weights(tmp_path: Path) -> None:
    run_ranks(1, in_two_processes, str(tmp_path), group=False)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    for loop in ("Accelerate", "Trainer", "Lightning"):
        for name, value in first["plain"].items():
            torch.testing.assert_close(first[loop][name], value, rtol=0, atol=1e-6)
            assert torch.equal(first[loop][name], second[loop][name])  # the same bits on all ranks
    final = torch.load(tmp_path / "final.ckpt", weights_only=False)
    assert final["global_step"] == first["Lightning steps"]["steps"]
    assert "dpoptim_private_checkpoint" not in final
