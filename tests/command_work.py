"""``dpoptim``, and scripts, in the processes of `ranks.run_ranks`, which have imported PyTorch
already: a process of its own takes seconds for that.
"""

import contextlib
import io
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.distributed.run import parse_args
from typer.testing import CliRunner

from dpoptim.accounting.ledger_charge import Charge
from dpoptim.cli import app
from dpoptim.gate.planned import Gate
from dpoptim.runs import plans
from dpoptim.runs.interrupted import SavedRun
from ranks import run_ranks

MOMENTS: dict[str, tuple[type, str]] = {
    "the first file": (SavedRun, "_save"),
    "the charge": (Charge, "open"),
    "the first noisy sum": (Gate, "release_sum"),
}


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


def killed_command(rank: int, moment: str, arguments: list[str]) -> tuple[int, str, str]:
    """As `command`, killed by SIGKILL right after one of `MOMENTS`."""
    owner, name = MOMENTS[moment]
    original = getattr(owner, name)

    def act(*args: Any, **options: Any) -> None:
        original(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    with patch.object(owner, name, act):
        return command(rank, os.getcwd(), arguments)


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
            with patch("subprocess.run", partial(_run_as_fork, subprocess.run)):
                runpy.run_path(path, run_name="__main__")
        except ModuleNotFoundError as error:
            return "", error.name or "?"
        sys.stdout.flush()
        out.seek(0)
        return out.read().decode(), ""


def run_script(path: Path, folder: Path, ranks: int = 1) -> tuple[list[str], str]:
    """What a script prints that is run in a folder, by itself or in processes that are told what
    torchrun tells them: one text a process, and the name of a module that it lacks.
    """
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment |= told_by_torchrun(ranks) if ranks > 1 else {}
    answers = run_ranks(ranks, script, str(path), str(folder), environment, group=False)
    return [said for said, _ in answers], answers[0][1]


def told_by_torchrun(ranks: int) -> dict[str, str]:
    """What all of its processes are told; each is told its own RANK and LOCAL_RANK, too."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    size = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return size | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": port}


def fork_ranks(ranks: int, work: Callable[[], object]) -> None:
    """Do the work in forks of this process that are told what torchrun tells them: what has been
    imported is not imported again.

    Raises: ChildProcessError: a fork failed; it said why.
    """
    told, children = told_by_torchrun(ranks), []
    for rank in range(ranks):
        children.append(_fork(work, told | {"RANK": str(rank), "LOCAL_RANK": str(rank)}))
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise ChildProcessError(f"exit codes {codes}")


def _fork(work: Callable[[], object], environment: dict[str, str]) -> int:
    """Id of a fork of this process that does the work, and ends."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.environ |= environment
            work()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return child


def _run_as_fork(
    honest: Any, command: list[str], **options: Any
) -> subprocess.CompletedProcess[str]:
    """``python -m dpoptim``, and a script under torchrun, by forks of this process;
    ``subprocess.run`` for all else.
    """
    started, arguments = command[:3], command[3:]
    if started == [sys.executable, "-m", "dpoptim"] and options == {"check": True}:

        def work() -> None:
            sys.argv = command[2:]
            runpy.run_module("dpoptim", run_name="__main__", alter_sys=True)

        code = os.waitstatus_to_exitcode(os.waitpid(_fork(work, {}), 0)[1])
        if code:
            raise subprocess.CalledProcessError(code, command)
    elif started == [sys.executable, "-m", "torch.distributed.run"] and options == {"check": True}:
        given = parse_args(arguments)  # by torchrun itself
        assert given.standalone
        sys.argv = [given.training_script, *given.training_script_args]
        fork_ranks(
            int(given.nproc_per_node),
            partial(runpy.run_path, given.training_script, run_name="__main__"),
        )
    else:
        return honest(command, **options)
    return subprocess.CompletedProcess(command, 0)


def _stop_at(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
