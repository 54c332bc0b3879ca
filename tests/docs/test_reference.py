"""Tries whether all that the reference shows is there, and arguments can be rendered."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHOWN = sorted(
    {
        name
        for page in (ROOT / "docs").rglob("*.md")
        for name in re.findall(r"^::: ([\w.]+)", page.read_text(), re.MULTILINE)
    }
)


def test_there_is_a_reference() -> None:
    assert len(SHOWN) > 20


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_shown_is_there(name: str) -> None:
    module, _, rest = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        assert hasattr(importlib.import_module(module), rest)


def test_names_of_arguments_stand_on_one_line() -> None:
    """`a, b,` with `c: as for ...` below is no argument to the renderer: it warns, and stops."""
    broken = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in (ROOT / "src").rglob("*.py")
        for doc in re.findall(r'"""(.*?)"""', path.read_text(), re.DOTALL)
        for line in re.findall(r"^ {8}(?:\w+, )+\w+,$", doc, re.MULTILINE)
    ]
    assert broken == []
