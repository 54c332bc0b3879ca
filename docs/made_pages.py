"""Writes what pages have from the code: the command line's own help, and the table of the papers.

    python docs/made_pages.py

Nothing is listed by hand twice; a test compares pages and code.
"""

import re
from collections.abc import Callable
from pathlib import Path

import click
import typer

DOCS = Path(__file__).parent
BEGIN, END = "<!-- made by docs/made_pages.py -->\n", "<!-- end -->\n"
BOLD = re.compile(r"\[bold\](.+?)\[/\]", re.DOTALL)  # as consoles show it
KEPT = re.compile("\b\n(.+?)(?=\n\n|\\Z)", re.DOTALL)  # lines as they are, after a backspace


def papers() -> str:
    from dpoptim.reproduce import papers

    return papers.table()


def commands() -> str:
    from dpoptim.cli import app

    root = typer.main.get_command(app)
    assert isinstance(root, click.Group) or hasattr(root, "commands")
    return "\n\n".join(
        section(f"dpoptim {name}", command)
        for name, command in root.commands.items()
        if not command.hidden
    )


def section(name: str, command: click.Command) -> str:
    """One command: its help and its options as a table."""
    described = BOLD.sub(lambda found: f"`{' '.join(found[1].split())}`", command.help or "")
    described = KEPT.sub(r"```text\n\1\n```", described)
    if hasattr(command, "commands"):
        inner = [section(f"{name} {key}", sub) for key, sub in command.commands.items()]
        return "\n\n".join([f"## `{name}`", described, *inner])
    rows = ["| option | meaning | default |", "|---|---|---|"]
    for p in command.params:
        shown = (
            ", ".join(f"`{o}`" for o in (*p.opts, *p.secondary_opts))
            if p.param_type_name == "option"
            else f"`{p.name}`"
        )
        default = (
            "" if p.default is None or callable(p.default) or p.default == () else f"`{p.default}`"
        )
        meaning = " ".join((getattr(p, "help", None) or "").split()).replace("|", "\\|")
        rows.append(f"| {shown} | {meaning} | {default} |")
    return "\n\n".join([f"## `{name}`", described, "\n".join(rows)])


MADE: dict[str, Callable[[], str]] = {"papers.md": papers, "reference/cli.md": commands}


def remade(page: str) -> str:
    """A page's text, with what is made in it made anew."""
    before, rest = (DOCS / page).read_text().split(BEGIN)
    _, after = rest.split(END)
    return "".join([before, BEGIN, "\n", MADE[page]().rstrip(), "\n\n", END, after])


if __name__ == "__main__":
    for page in MADE:
        (DOCS / page).write_text(remade(page))
