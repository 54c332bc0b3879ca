"""The guide's program runs as printed, under torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dpoptim

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "many-processes.md"


@pytest.mark.slow
def test_the_program_of_the_guide_runs_under_torchrun(tmp_path: Path) -> None:
    (program,) = re.findall(r"```py\n(.*?)```", GUIDE.read_text(), flags=re.S)
    (tmp_path / "train.py").write_text(program)
    source = str(Path(dpoptim.__file__).parents[1])
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "train.py",
    ]
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("epsilon=") == 1
    assert "add-or-remove-one" in ran.stdout
