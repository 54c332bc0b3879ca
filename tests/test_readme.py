"""The README's Python runs as printed, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)


@pytest.mark.parametrize("block", BLOCKS)
def test_the_python_of_the_readme_runs(block: str) -> None:
    promised = re.findall(r"^print\(.*\)  # (.*)$", block, flags=re.M)
    assert promised
    printed: list[str] = []
    exec(compile(block, str(README), "exec"), {"print": lambda value: printed.append(str(value))})
    assert printed == promised


def test_links_lead_to_files() -> None:
    for page in (README, *(README.parent / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
