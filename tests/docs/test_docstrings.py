"""Docstrings of public names: their sections are complete, and their examples run."""

import ast
import doctest
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dpoptim

MODULES = (
    "dpoptim",
    "dpoptim.accounting",
    "dpoptim.audit",
    "dpoptim.data",
    "dpoptim.estimators",
    "dpoptim.evaluation",
    "dpoptim.methods",
    "dpoptim.noise",
    "dpoptim.optim",
    "dpoptim.preprocessing",
    "dpoptim.solvers",
    "dpoptim.tuning",
)


def public() -> dict[str, Any]:
    """Functions and classes of our own, each under the first name that it has."""
    found: dict[int, tuple[str, Any]] = {}
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            thing = getattr(module, name)
            ours = getattr(thing, "__module__", "").startswith("dpoptim")
            if ours and (inspect.isfunction(thing) or inspect.isclass(thing)):
                found.setdefault(id(thing), (f"{module.__name__}.{name}", thing))
    return dict(found.values())


PUBLIC = public()
FUNCTIONS = {name: thing for name, thing in PUBLIC.items() if inspect.isfunction(thing)}


def documented(doc: str) -> set[str]:
    """Names before the colons of the section Args: alone, or several with commas."""
    section = re.search(r"^Args:\n((?: .*\n|\n)*)", doc + "\n", re.MULTILINE)
    text = textwrap.dedent(section.group(1)) if section else ""
    heads = re.findall(r"^(\w+(?:,\s+\w+)*):", text, re.MULTILINE)
    return {name for head in heads for name in re.split(r",\s+", head)}


def raises(function: Callable[..., Any]) -> bool:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return any(isinstance(node, ast.Raise) for node in ast.walk(tree))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_what_it_takes_returns_and_raises(name: str) -> None:
    function = inspect.unwrap(FUNCTIONS[name])
    doc = inspect.getdoc(function) or ""
    signature = inspect.signature(function)
    taken = {
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    assert not taken - documented(doc)
    assert signature.return_annotation in (None, "None") or "\nReturns:\n" in doc
    assert not raises(function) or "\nRaises:\n" in doc


@pytest.mark.parametrize("name", PUBLIC)
def test_a_docstring_begins_with_a_sentence(name: str) -> None:
    first = (inspect.getdoc(PUBLIC[name]) or "").split("\n\n")[0]
    assert first.endswith((".", ":", "``", ")")), first
    assert not first.startswith(("What ", "Of "))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # that a tiny example is tiny
@pytest.mark.parametrize("name", PUBLIC)
def test_its_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    doc = inspect.getdoc(PUBLIC[name]) or ""
    parser = doctest.DocTestParser()
    test = parser.get_doctest(doc, {}, name, None, None)
    told: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    assert runner.run(test, out=told.append).failed == 0, "".join(told)
    made_by_users = name in FUNCTIONS and not name.startswith("dpoptim.audit.audit_")
    assert test.examples or not made_by_users


def test_no_docstring_begins_with_what_or_of() -> None:
    """It begins with a verb or a noun, as a summary in a list does."""
    source = Path(dpoptim.__file__).parent
    found = [
        f"{path.relative_to(source)}: {doc.splitlines()[0]}"
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and (doc := ast.get_docstring(node) or "").startswith(("What ", "Of "))
    ]
    assert found == []
