"""Processes of a benchmark, one a rank, and the answer of the first."""

import os
import tempfile
from collections.abc import Callable
from queue import Empty
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp


def answered(main: Callable[..., None], size: int, *given: Any) -> Any:
    """Run ``main(rank, size, store, *given, answer)`` on every rank; return what rank 0 answers."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answer = context.Queue()
        arguments = (size, f"{folder}/store", *given, answer)
        ranks = [
            context.Process(target=main, args=(rank, *arguments), daemon=True)
            for rank in range(size)
        ]
        for rank in ranks:
            rank.start()
        found = None
        while found is None:
            over = all(rank.exitcode is not None for rank in ranks)  # before the queue is asked
            try:
                found = answer.get(timeout=2)
            except Empty:
                if over or any(rank.exitcode for rank in ranks):
                    raise RuntimeError("a rank ended without an answer; see above") from None
        for rank in ranks:
            rank.join()
    return found


def leave(rank: int, answer: Any, found: Any) -> None:
    """Answer if this is rank 0, and end the process; attached trainings are left as they are."""
    if rank == 0:
        answer.put(found)
        answer.close()
        answer.join_thread()  # a thread sends it, and would end with this process
    dist.barrier()
    os._exit(0)
