"""Imports between packages go down the list of docs/architecture.md, and never up."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/dpoptim"
STARTS = {"__init__", "__main__"}  # what is at the very top: names, and the program
LOADS_BY_NAME = {("registry", "methods")}


def layers() -> dict[str, int]:
    """The line of each package and module, from the top."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    block = page.split("Imports go down this list", 1)[1].split("```text", 1)[1].split("```", 1)[0]
    lines = [line.split() for line in block.strip().splitlines()]
    listed = [name for line in lines for name in line]
    assert len(listed) == len(set(listed)), "a package stands twice"
    return {name: number for number, line in enumerate(lines) for name in line}


def imported(text: str) -> Iterator[str]:
    """Packages and modules of this one that a source imports, in functions and for types, too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module == "dpoptim":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dpoptim."):
            yield (node.module or "").split(".")[1]
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            yield from (name[1] for name in names if name[0] == "dpoptim" and len(name) > 1)


def upward(text: str, of: str, layer: dict[str, int]) -> list[str]:
    """What a source of this package imports that is not below it."""
    others = {name for name in imported(text) if name != of and name in layer}
    return sorted(name for name in others if layer[name] <= layer[of])


def test_the_list_holds_every_package_and_module() -> None:
    there = {p.stem for p in SOURCE.glob("*.py")} | {p.parent.name for p in SOURCE.glob("*/*.py")}
    assert set(layers()) == there - STARTS


def test_imports_go_down() -> None:
    layer, found = layers(), []
    for path in SOURCE.rglob("*.py"):
        of = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if of in STARTS:
            continue
        wrong = upward(path.read_text(encoding="utf-8"), of, layer)
        found += [(str(path), name) for name in wrong if (of, name) not in LOADS_BY_NAME]
    assert not found


def test_an_import_upwards_is_seen() -> None:
    layer = layers()
    for line in ("from dpoptim.training import attach", "import dpoptim.runs.train"):
        assert upward(f"def f():\n    {line}", "gate", layer)
    assert upward("from dpoptim import training", "gradients", layer) == ["training"]
    assert upward("from dpoptim.gradients.engine import Engine", "training", layer) == []
