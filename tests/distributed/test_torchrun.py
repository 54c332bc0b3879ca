"""The guide's programs run as printed, in processes that are told what torchrun tells them."""

import re
from pathlib import Path

import pytest

from command_work import run_script

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "many-processes.md"
PROGRAMS = re.findall(r"```py\n# (\w+\.py)\n(.*?)```", GUIDE.read_text(), flags=re.S)


@pytest.mark.set_aside("fit.py")
@pytest.mark.parametrize(("name", "program"), PROGRAMS, ids=[name for name, _ in PROGRAMS])
def test_a_program_of_the_guide_runs(name: str, program: str, tmp_path: Path) -> None:
    """torchrun itself starts ``dpoptim train``, in runs/test_many_processes.py."""
    (tmp_path / name).write_text(program)
    said, missing = run_script(tmp_path / name, tmp_path, ranks=2)
    assert not missing
    assert "".join(said).count("epsilon=") == 1
