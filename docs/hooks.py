"""Fills pages from the code when the site is built, so that nothing is listed by hand twice."""

import click
import typer

COMMANDS = "<!-- commands -->"
PAPERS = "<!-- papers -->"


def on_page_markdown(markdown: str, **page: object) -> str:
    """Put the command line's own help, and the table of the papers, where a page asks for it."""
    from dpoptim.reproduce import papers

    for place, made in ((COMMANDS, commands), (PAPERS, papers.table)):
        if place in markdown:
            markdown = markdown.replace(place, made())
    return markdown


def commands() -> str:
    from dpoptim.cli import app

    root = typer.main.get_command(app)
    assert isinstance(root, click.Group) or hasattr(root, "commands")
    return "\n\n".join(
        section(f"dpoptim {name}", command) for name, command in root.commands.items()
    )


def section(name: str, command: click.Command) -> str:
    """One command: its help and its options as a table."""
    if hasattr(command, "commands"):
        inner = [section(f"{name} {key}", sub) for key, sub in command.commands.items()]
        return "\n\n".join([f"## `{name}`", command.help or "", *inner])
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
    return "\n\n".join([f"## `{name}`", command.help or "", "\n".join(rows)])
