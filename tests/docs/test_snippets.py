"""Every Python snippet of README and documents runs, and every link leads somewhere."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


@pytest.mark.usefixtures("_methods_as_before")
def test_the_sampler_of_the_guide_goes_by_places() -> None:
    """Replacing a person by one whose row stands elsewhere would move all others to other steps."""
    import torch

    import dpoptim

    page = (ROOT / "docs/guides/own-method.md").read_text()
    code = "\n".join(PYTHON.findall(page)[:2]).replace("print(plan.describe())", "")
    made: dict[str, Any] = {"__name__": "guide"}
    exec(compile(code, "own-method.md", "exec"), made)
    sampler = made["Halves"](0.5)
    assert sampler.goes_by_places(sharded=False)
    n = 40
    data = torch.utils.data.TensorDataset(torch.randn(n, 4), torch.zeros(n, dtype=torch.int64))
    persons = ["P", *map(str, range(n - 1))]

    def attached(plan: dpoptim.Plan) -> None:
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dpoptim.attach(plan, model, optimizer, data, persons=persons, loss_reduction="mean")

    shape: dict[str, Any] = {"n": n, "batch_size": 20, "steps": 4, "epsilon": 2.0, "delta": 1e-5}
    attached(made["HalvesSGD"](clip_norm=1.0).plan(**shape, neighboring="zero-out"))
    with pytest.raises(ValueError, match="not offered for persons"):
        attached(made["HalvesSGD"](clip_norm=1.0).plan(**shape, neighboring="replace-one"))
