"""The guide's programs run as printed, under torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dpoptim

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "many-processes.md"
PROGRAMS = re.findall(r"```py\n# (\w+\.py)\n(.*?)```", GUIDE.read_text(), flags=re.S)


def torchrun(folder: Path, *arguments: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """``torchrun`` on one machine, in a folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), *arguments]
    source = str(Path(dpoptim.__file__).parents[1])
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "program"), PROGRAMS, ids=[name for name, _ in PROGRAMS])
def test_a_program_of_the_guide_runs_under_torchrun(
    name: str, program: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(program)
    ran = torchrun(tmp_path, name)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("epsilon=") == 1
