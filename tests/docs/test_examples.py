"""Every example runs as its user would run it."""

import ast
import json
import re
from pathlib import Path

import pytest

from command_work import run_script

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ATTACH = re.compile(r"dpoptim\.attach\(\n?[^`]*?\)(?: as |\n)")
# several models, none of which is called by a loss of the batch alone
SEVERAL = ("(plan, critic,", "[tables, others]")


# takes long to import, in two processes; the other one runs torchrun by itself
AS_RANKS = {"lora_fsdp"}
# A quarter of a minute each; guides have snippets of the same, which run.
LONG = "lora_fsdp", "lora_gpt2", "cnn_with_views"


@pytest.mark.set_aside(*LONG)
@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_the_example_runs(path: Path, tmp_path: Path) -> None:
    """In a process of its own; what it needs and is not installed is said by the skip."""
    said, missing = run_script(path, tmp_path, ranks=2 if path.stem in AS_RANKS else 1)
    if missing:
        assert not missing.startswith("dpoptim")
        pytest.skip(f"{missing} is not installed")
    assert said[0].strip()


def test_every_loop_gives_its_loss() -> None:
    """Without it nobody checks the loss, and that heads what is taken on trust."""
    pages = [*EXAMPLES, ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    calls = [call for page in pages for call in ATTACH.findall(page.read_text())]
    assert len(calls) > 10
    left_out = [call for call in calls if "loss=" not in call]
    assert [call for call in left_out if not any(each in call for each in SEVERAL)] == []


NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=[notebook.stem for notebook in NOTEBOOKS])
def test_the_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells in order; what a cell shows can be shown, as a table where it has one."""
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(notebook.read_text())["cells"]):
        if cell["cell_type"] != "code":
            continue
        assert not cell["outputs"]
        tree = ast.parse("".join(cell["source"]))
        shown = (
            ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
        )
        exec(compile(tree, f"{notebook.name}, cell {number}", "exec"), scope)
        if shown is not None:
            value = eval(compile(shown, f"{notebook.name}, cell {number}", "eval"), scope)
            assert getattr(value, "_repr_html_", value.__repr__)()


def test_the_index_names_every_example() -> None:
    index = (Path(__file__).parents[2] / "examples" / "README.md").read_text()
    assert all(f"`{script.name}`" in index for script in (*EXAMPLES, *NOTEBOOKS))
