"""``dpoptim ledger``: what was promised about a data set, and whether the file still says so."""

from pathlib import Path
from typing import Annotated

import typer

from dpoptim.terminal import clear_errors, say


def ledger(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="A ledger, as --ledger of `dpoptim train` names it; or several.",
            metavar="FILE...",
        ),
    ],
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Read all of it again: structure, digests, events, budget."),
    ] = False,
    events: Annotated[
        bool,
        typer.Option("--events", help="Also print each run's event, for other accountants."),
    ] = False,
    page: Annotated[
        Path | None, typer.Option(help="Also write a page (HTML) to this file.")
    ] = None,
    digest: Annotated[
        str | None,
        typer.Option(
            help="With --verify: a digest printed earlier; it must still be in the chain."
        ),
    ] = None,
) -> None:
    """Show a ledger: what its runs cost together, its budget, what is left, and each run.

    Of several, each, and what all cost together somebody who is in all of their data sets.

    The digest that it prints covers every entry. Write it down elsewhere, and --verify --digest
    shows later whether the ledger was written anew or replaced by an older copy.

    Example: [bold]dpoptim ledger patients.sqlite --verify[/]
    """
    with clear_errors():
        from dpoptim.accounting.ledger import Ledger

        if digest is not None and not verify:
            raise ValueError("--digest is compared by --verify; add it.")
        refuse_files(files, of_one=digest is not None or page is not None)
        opened = [Ledger(file) for file in files]
        for each in opened:
            say(each.describe(events=events))
            if verify:
                entries = each.verify(digest=digest)
                say(
                    f"verified    {entries} entries, whole and as they were written; the budget "
                    "admits every run"
                )
            say(f"digest      {each.digest}")
        if len(opened) > 1:
            from dpoptim.accounting.ledgers_together import ledgers_together

            say(ledgers_together(opened))
        if page is not None:
            from dpoptim.files import write_atomically
            from dpoptim.runs.ledger_page import ledger_page

            write_atomically(page, ledger_page(opened[0]))
            say(f"page        {page}")


def refuse_files(files: list[Path], *, of_one: bool) -> None:
    """Refuse files that are no ledgers, or one twice; or several, where one is asked for."""
    if len(files) > 1 and of_one:
        raise ValueError("--digest and --page are for one ledger. Fix: one file at a time.")
    if len({file.resolve() for file in files}) < len(files):
        raise ValueError("a ledger is named twice, and would count twice. Fix: each once.")
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(
                f"there is no ledger at {file}; `dpoptim train`, `tune` and `evaluate` make one: "
                "--ledger FILE --budget EPSILON,DELTA."
            )
