"""Pages that the code fills say what the code says today."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("made_pages", DOCS / "made_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MADE = program()


@pytest.mark.parametrize("page", MADE.MADE)
def test_pages_are_as_the_code_has_them(page: str) -> None:
    remade = MADE.remade(page)
    assert len(remade.splitlines()) > 60
    assert (DOCS / page).read_text() == remade, "run python docs/made_pages.py"
