"""Output of commands: public text, shown as it is and never obeyed."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

from dpoptim.errors import LedgerError, PrivacyError
from dpoptim.printable import printable

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

console = Console()
errors = Console(stderr=True)


def say(text: object, *, style: str | None = None, to: Console | None = None) -> None:
    """Print foreign text (file names, labels): no markup, no control characters but newlines."""
    (to or console).print(cell(text), style=style, highlight=False, soft_wrap=True)


def cell(text: object) -> Text:
    """The same for a place in a table."""
    return Text("\n".join(printable(line) for line in str(text).split("\n")), overflow="fold")


class _Waits(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage(), style="dim", to=errors)


def show_waits() -> None:
    """Show what calibrations that take long say of themselves, on the stream for errors."""
    log = logging.getLogger("dpoptim.accounting.calibration")
    if not any(isinstance(handler, _Waits) for handler in log.handlers):
        log.addHandler(_Waits())
        log.setLevel(logging.INFO)


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turn what bad input raises into one clear message and exit code 2."""
    try:
        yield
    except (ValueError, TypeError, PrivacyError, LedgerError, OSError) as error:
        say(f"Error: {error}", style="red", to=errors)
        raise typer.Exit(EXIT_BAD_INPUT) from None
    except KeyboardInterrupt:
        message = (
            "Interrupted. If a training had begun, its whole run stays charged; the same command "
            "with --resume goes on from its last save."
        )
        say(message, style="red", to=errors)
        raise typer.Exit(EXIT_INTERRUPTED) from None
