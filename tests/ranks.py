"""Run a function on several ranks: processes that are forked, ready to go, from one that has
imported everything.
"""

import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import light_seeds  # noqa: F401

# Deadlines only end what hangs: far above what a loaded machine needs.
SECONDS = 900.0  # for everything
TIME_OUT = 300.0  # of a process group
spent = [0.0]  # processor time of ranks that have answered: they are not this process' children
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "ranks",
        "apart_work",
        "command_work",
        "distributed_work",
        "evaluation_work",
        "fixed_shape_work",
        "loss_ways_work",
        "shard_work",
        "persons_work",
        "fully_sharded_work",
        "tables_work",
        "units_work",
    ]
)


def start_server() -> None:
    """Once: the process that imports everything, and that ranks are forked from. It finds modules
    by PYTHONPATH alone.
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        os.environ |= {} if before is None else {"PYTHONPATH": before}


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    time_out: float = TIME_OUT,
    group: bool = True,
    seconds: float = SECONDS,
) -> list[Any]:
    """What ``function(rank, *arguments)`` returns on each rank, on gloo. Raises AssertionError
    with a rank's traceback.

    Args:
        function: of a module that a fresh process can import: `distributed_work`.
        time_out: of the process group, in seconds.
        seconds: for everything.
        group: whether to make one; otherwise, the processes know nothing of each other.
    """
    start_server()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store") if group else None
        ranks = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(theirs, rank, size, store, time_out, function, arguments)
            )
            process.start()
            theirs.close()
            ranks.append((process, ours))
        try:
            answers = [_answer(rank, ours, seconds) for rank, (_, ours) in enumerate(ranks)]
        finally:
            for process, ours in ranks:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()
                ours.close()
    failures = [text for good, text in answers if not good]
    assert not failures, "\n".join(failures)
    return [answer for _, answer in answers]


def _answer(rank: int, connection: Connection, seconds: float) -> tuple[bool, Any]:
    try:
        if connection.poll(seconds):
            seconds_spent, good, data = pickle.loads(connection.recv_bytes())
            spent[0] += seconds_spent
            return good, pickle.loads(data)  # tensors by value: their process is about to end
    except EOFError:
        return True, "died"
    return False, f"rank {rank} did not answer within {seconds} s"


def _work(
    answer: Connection,
    rank: int,
    size: int,
    store: str | None,
    time_out: float,
    function: Callable[..., Any],
    arguments: Any,
) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # the collector would look through, and so copy, all that was imported
    try:
        limit = timedelta(seconds=time_out)
        if store is not None:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit
            )
        good, found = True, function(rank, *arguments)
        data = pickle.dumps(found)
    except BaseException:
        good, data = False, pickle.dumps(f"--- rank {rank} ---\n{traceback.format_exc()}")
    times = os.times()
    seconds = times.user + times.system + times.children_user + times.children_system
    answer.send_bytes(pickle.dumps((seconds, good, data)))
    answer.close()
    # what is left of a process group that lost a rank must not keep this process alive
    os._exit(0)
