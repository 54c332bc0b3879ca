"""Every line of every shell snippet runs, or names a target, package or program that is there."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from torch.distributed.run import parse_args
from typer.testing import CliRunner

from dpoptim.cli import app

ROOT = Path(__file__).parents[2]
SHELL = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [
    page
    for page in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    )
    if SHELL.search(page.read_text())
]

# Attacks that take long; tests/audit runs them. Here their options are read by the real parser.
LONG = "dpoptim audit "

VISITS = "visit,patient,age,outcome\n" + "".join(
    f"{row},P{row // 2},{20 + row * 7 % 60},{'ill' if row * 7 % 60 > 30 else 'healthy'}\n"
    for row in range(400)
)
SCHEMA = """
[columns.visit]
kind = "drop"

[columns.patient]
kind = "person"

[columns.age]
kind = "number"
bounds = [18, 95]

[columns.outcome]
kind = "target"
classes = ["healthy", "ill"]
"""


def dpoptim(line: str) -> None:
    if line.startswith(LONG):
        command = typer.main.get_command(app)
        context = command.make_context("dpoptim", shlex.split(line)[1:2], resilient_parsing=True)
        subcommand = command.get_command(context, "audit")  # type: ignore[attr-defined]
        subcommand.make_context("audit", shlex.split(line)[2:])
        return
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    assert result.exit_code == 0, f"{line}\n{result.output}\n{result.exception!r}"


def make(line: str) -> None:
    for target in shlex.split(line)[1:]:
        assert f"\n{target}:" in (ROOT / "Makefile").read_text(), line


def pip(line: str) -> None:
    *_, requirement = shlex.split(line)
    extras = re.findall(r"\[(.*?)\]", requirement)
    project = (ROOT / "pyproject.toml").read_text()
    assert requirement.startswith(("dpoptim", ".", "dist/"))
    assert all(f"\n{extra} = [" in project for group in extras for extra in group.split(","))


def torchrun(line: str) -> None:
    """Options only: that the guide's program runs under them is a test of tests/distributed."""
    assert parse_args(shlex.split(line)[1:]).training_script


def edit(line: str) -> None:
    Path(line.split()[1]).write_text(SCHEMA)


PROGRAMS: dict[str, Callable[[str], None]] = {
    "dpoptim": dpoptim,
    "make": make,
    "pip": pip,
    "torchrun": torchrun,
    "$EDITOR": edit,
}


def prepared(page: str) -> None:
    """Write into the working folder what the page says that its reader has."""
    Path("patients.csv").write_text(VISITS)
    Path("new.csv").write_text(VISITS)
    Path("old.csv").write_text(VISITS)
    Path("holdout.csv").write_text(VISITS)
    if page == "settings.md":
        Path("patients.schema.toml").write_text(SCHEMA)
    demo = "dpoptim train --data digits --epsilon 2 --delta 1e-5 --epochs 2 --out runs/demo"
    if page in {"officers.md", "ledger.md"}:
        dpoptim(f"{demo} --ledger patients.sqlite --budget 3,1e-5")


@pytest.mark.set_aside("tables", "settings")
@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_shell_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prepared(page.name)
    for snippet in SHELL.findall(page.read_text()):
        for line in snippet.splitlines():
            command = line.split("  #")[0].strip()
            if command and not command.startswith("#"):
                PROGRAMS[command.split()[0]](command)
