"""Documents and workflows agree with the versions of torch that `pyproject.toml` allows."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def minors() -> range:
    """Of the torch 2.x that the package allows."""
    (bounds,) = re.findall(r'"torch>=2\.(\d+),<2\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    return range(*map(int, bounds))


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/limits.md"])
def test_documents_name_the_versions_of_torch(page: str) -> None:
    named = re.findall(r"PyTorch 2\.(\d+) to 2\.(\d+)", (ROOT / page).read_text())
    assert named
    assert {tuple(map(int, each)) for each in named} == {(minors()[0], minors()[-1])}


def test_the_tests_own_torch_is_one_of_them() -> None:
    (pinned,) = re.findall(
        r"^torch==2\.(\d+)\.\d+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
    assert int(pinned) in minors()


@pytest.mark.parametrize("job", ["oldest", "newest"])
def test_the_first_and_the_last_of_them_are_not_pinned_away(job: str) -> None:
    workflow = (ROOT / ".github/workflows/tests.yml").read_text()
    (steps,) = re.findall(rf"^  {job}:\n((?:(?:    .*)?\n)+)", workflow, re.MULTILINE)
    assert "pip install" in steps
    assert "constraints.txt" not in re.sub("#.*", "", steps)
