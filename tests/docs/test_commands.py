"""Commands that pages name for their figures: the script is there, and takes these options."""

import re
from functools import cache
from pathlib import Path

import click
import pytest
import typer

from committed import BENCHMARKS
from dpoptim.cli import app
from dpoptim.reproduce.experiments import EXPERIMENTS

ROOT = BENCHMARKS.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = re.compile(r"(`{3}|`)(.+?)\1", re.S)
SCRIPT = re.compile(r"\b(benchmarks|tests)/[\w/]+\.py\b")
OPTION = re.compile(r"(?<!\S)--[a-z][a-z0-9-]*")
IMPORTED = re.compile(r"^(?:from|import) (\w+)", re.M)


def code_of(page: Path) -> list[str]:
    """Inline code and blocks, each on one line."""
    return [" ".join(found[2].split()) for found in CODE.finditer(page.read_text())]


def source_of(script: Path) -> str:
    """Its text, and that of the modules beside it that it imports, which may read its options."""
    text = script.read_text()
    beside = [script.parent / f"{name}.py" for name in IMPORTED.findall(text)]
    return "\n".join([text, *(each.read_text() for each in beside if each.is_file())])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_scripts_are_there_and_take_the_options(page: Path) -> None:
    for code in code_of(page):
        for found in SCRIPT.finditer(code):
            script = ROOT / found[0]
            assert script.is_file(), f"{page.name}: `{code}`"
            if found[1] == "benchmarks":
                for option in OPTION.findall(code[found.end() :]):
                    assert f'"{option}"' in source_of(script), f"{page.name}: `{code}`: {option}"


@cache
def options_of(name: str) -> set[str]:
    """The options of a command of ``dpoptim``, or of all commands of a group."""
    group = typer.main.get_command(app)
    command = group.get_command(click.Context(group), name)  # type: ignore[attr-defined]
    assert command is not None, name
    commands = [command, *getattr(command, "commands", {}).values()]
    parts = [part for each in commands for part in each.params]
    return {each for part in parts for each in (*part.opts, *part.secondary_opts)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_take_the_options(page: Path) -> None:
    for code in code_of(page):
        if (named := re.match(r"dpoptim ([a-z]+)(?= )", code)) is not None:
            for option in OPTION.findall(code):
                assert option in options_of(named[1]) | {"--help"}, f"{page.name}: `{code}`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_experiments_are_there(page: Path) -> None:
    for code in code_of(page):
        if (named := re.match(r"(?:dpoptim )?reproduce ([a-z][\w-]*)", code)) is not None:
            assert named[1] in EXPERIMENTS, f"{page.name}: `{code}`"
