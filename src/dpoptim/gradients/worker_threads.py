"""Worker threads, for many short operations at once.

Threads divide a long operation well, and a short one badly: what takes a tenth of a millisecond is
not done sooner by two of them. Many short operations are done sooner where each is one thread's.
And what a single thread computes is rounded in the same way however many threads there are.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch

Run = Callable[[Sequence[Callable[[], None]]], None]


@contextmanager
def worker_threads(number: int) -> Iterator[Run]:
    """Yields what runs a few calls at once, each on one thread, without gradients.

    Args:
        number: of threads; with 1 where torch has no more, calls run on the caller's.
    """
    allowed = torch.get_num_threads()
    if allowed == 1:
        yield _in_turn
        return
    try:
        # For this time only: a forked child would find a lasting pool dead.
        with ThreadPoolExecutor(number, initializer=_compute_alone) as pool:
            yield partial(_at_once, pool)
    finally:
        torch.set_num_threads(allowed)  # of threads that others start from now on


def _in_turn(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _at_once(pool: ThreadPoolExecutor, calls: Sequence[Callable[[], None]]) -> None:
    for running in [pool.submit(call) for call in calls]:
        running.result()


def _compute_alone() -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
