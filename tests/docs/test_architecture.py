"""The architecture page names files that exist, and imports go the way that it says."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "dpoptim"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
CORE = ("accounting", "noise", "sampling", "clipping", "gradients", "gate")
OUTSIDE = (
    "training",
    "estimators",
    "runs",
    "commands",
    "cli",
    "integrations",
    "audit",
    "reproduce",
    "solvers",
)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([a-z_/]+\.py)`", PAGE))))
def test_files_on_the_page_exist(name: str) -> None:
    assert list(SOURCE.rglob(name)), name


def imported(path: Path) -> set[str]:
    """Parts of the package that a file imports when it is itself imported."""
    tree = ast.parse(path.read_text())
    modules = [
        node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module
    ]
    return {module.split(".")[1] for module in modules if module.startswith("dpoptim.")}


def test_the_core_knows_nothing_of_what_stands_on_it() -> None:
    for part in CORE:
        files = (
            sorted((SOURCE / part).rglob("*.py"))
            if (SOURCE / part).is_dir()
            else [SOURCE / f"{part}.py"]
        )
        for path in files:
            assert not imported(path) & set(OUTSIDE), path
