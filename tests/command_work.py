"""``dpoptim``, and scripts, in the processes of `ranks.run_ranks`, which have imported PyTorch
already.
"""

import contextlib
import io
import os
import re
import runpy
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest.mock import patch

from typer.testing import CliRunner

from dpoptim.cli import app
from dpoptim.runs import plans


def run(*args: object, code: int = 0, columns: int = 400) -> str:
    """What the command line prints, its white space joined."""
    # A wide terminal, so that no message is wrapped in the middle of a word that a test looks for.
    runner = CliRunner(env={"COLUMNS": str(columns), "TERM": "dumb"})
    result = runner.invoke(app, [str(arg) for arg in args])
    assert result.exit_code == code, (result.output, result.exception)
    return re.sub(r"\s+", " ", result.output)


def command(
    rank: int, folder: str, arguments: list[str], stop_at: str | None = None
) -> tuple[int, str, str]:
    """Exit code, output and errors of a command that is run in a folder.

    Args:
        stop_at: the process is told to end (SIGTERM) once this file is there.
    """
    os.chdir(folder)
    os.environ["COLUMNS"] = "200"
    if stop_at is not None:
        threading.Thread(target=_stop_at, args=(Path(stop_at),), daemon=True).start()
    out, errors, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            app(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), errors.getvalue()


def ledgers_read(rank: int, folder: str, arguments: list[str]) -> tuple[int, int]:
    """Exit code of a command, and how often this process opens the ledger to plan by it."""
    with patch.object(plans, "Ledger", wraps=plans.Ledger) as opened:
        code, _, _ = command(rank, folder, arguments)
    return code, opened.call_count


def script(rank: int, path: str, folder: str, environment: dict[str, str]) -> tuple[str, str]:
    """What a script prints that is run by itself in a folder, and the name of a module that it
    lacks.
    """
    os.chdir(folder)
    os.environ |= environment
    if "WORLD_SIZE" in environment:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    with tempfile.TemporaryFile() as out:
        os.dup2(out.fileno(), sys.stdout.fileno())  # what its own processes say, too
        try:
            runpy.run_path(path, run_name="__main__")
        except ModuleNotFoundError as error:
            return "", error.name or "?"
        sys.stdout.flush()
        out.seek(0)
        return out.read().decode(), ""


def _stop_at(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
