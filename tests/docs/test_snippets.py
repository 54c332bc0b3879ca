"""Every Python snippet of README and documents runs, and every link leads somewhere."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpoptim import registry

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PYTHON = re.compile(r"^ *```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


WITH_SNIPPETS = [page for page in PAGES if PYTHON.search(page.read_text())]


@pytest.fixture
def _methods_as_before() -> Iterator[None]:
    """Take off the list what a page registers."""
    before = set(registry.method_names())
    yield
    for name in set(registry.method_names()) - before:
        registry.unregister_method(name)


@pytest.mark.set_aside("docs/guides/lora.md")
@pytest.mark.slow
@pytest.mark.usefixtures("_methods_as_before")
@pytest.mark.filterwarnings("ignore:.*neighbouring:UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of other libraries, about each other
@pytest.mark.filterwarnings("ignore::dpoptim.OtherRunsWarning")  # snippets are of several programs
@pytest.mark.filterwarnings("ignore::dpoptim.OwnMeansWarning")
@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=names(WITH_SNIPPETS))
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a page in one namespace, in order, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "__main__"}
    for number, snippet in enumerate(PYTHON.findall(page.read_text()), 1):
        exec(compile(textwrap.dedent(snippet), f"{page.name}, snippet {number}", "exec"), scope)


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
