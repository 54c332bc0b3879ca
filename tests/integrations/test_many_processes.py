"""Trainer, Accelerate and Lightning under torchrun release what a plain loop does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dpoptim

for name in ("transformers", "peft", "lightning.pytorch", "accelerate"):
    pytest.importorskip(name)

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
def test_loops_in_two_processes_release_the_same_weights(tmp_path: Path) -> None:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [str(Path(__file__).parent / "in_many_processes.py"), str(tmp_path)]
    paths = [str(Path(dpoptim.__file__).parents[1]), str(TESTS)]
    ran = subprocess.run(
        [sys.executable, "-m", *launcher, *program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-5000:]
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    for loop in ("Accelerate", "Trainer", "Lightning"):
        for name, value in first["plain"].items():
            torch.testing.assert_close(first[loop][name], value, rtol=0, atol=1e-6)
            assert torch.equal(first[loop][name], second[loop][name])  # the same bits on all ranks
    final = torch.load(tmp_path / "final.ckpt", weights_only=False)
    assert final["global_step"] == first["Lightning steps"]["steps"]
    assert "dpoptim_private_checkpoint" not in final
