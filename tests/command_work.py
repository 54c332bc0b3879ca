"""``dpoptim`` in the ranks of `ranks.run_ranks`, which have imported everything already."""

import contextlib
import io
import os
import signal
import threading
import time
from pathlib import Path

from dpoptim.cli import app


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


def _stop_at(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
