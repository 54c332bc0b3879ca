"""Every example runs as its user would run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("script", EXAMPLES, ids=[script.stem for script in EXAMPLES])
def test_the_example_runs(script: Path, tmp_path: Path) -> None:
    """In a process of its own; what it needs and is not installed is said by the skip."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    if "ModuleNotFoundError: No module named" in done.stderr and "dpoptim" not in done.stderr.splitlines()[-1]:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


def test_the_index_names_every_example() -> None:
    index = (Path(__file__).parents[2] / "examples" / "README.md").read_text()
    assert all(f"`{script.name}`" in index for script in EXAMPLES)
