"""Worker threads, for many short operations at once.

Threads divide a long operation well, and a short one badly: what takes a tenth of a millisecond is
not done sooner by two of them. Many short operations are done sooner where each is one thread's.
And what a single thread computes is rounded in the same way however many threads there are.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial

import torch

Run = Callable[[Sequence[Callable[[], object]]], None]
Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@contextmanager
def worker_threads(number: int) -> Iterator[Run]:
    """Yields what runs a few calls at once, each on one thread, without gradients.

    The threads are PyTorch's own, where they are OpenMP's: these wait for work without sleeping,
    and others would wait for a core beside them.

    Args:
        number: of threads; with 1 where torch has no more, calls run on the caller's.
    """
    allowed = torch.get_num_threads()
    if allowed == 1:
        yield _in_turn
        return
    if parallel_region() is not None:
        yield partial(_by_team, max(2, number))  # in a team of one, an operation would be divided
        return
    try:
        # For this time only: a forked child would find a lasting pool dead.
        with ThreadPoolExecutor(number, initializer=_compute_alone) as pool:
            yield partial(_at_once, pool)
    finally:
        torch.set_num_threads(allowed)  # of threads that others start from now on


@cache
def parallel_region() -> Callable[..., None] | None:
    """``GOMP_parallel`` of the OpenMP that PyTorch uses; None where it uses another one."""
    if not torch.backends.openmp.is_available():
        return None
    try:
        region = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):  # TypeError: Windows
        return None
    region.argtypes, region.restype = [Body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return region


def _by_team(number: int, calls: Sequence[Callable[[], object]]) -> None:
    """Run the calls in a parallel region, inside of which no operation is divided any further."""
    region = parallel_region()
    assert region is not None
    waiting, failures = iter(calls), list[BaseException]()  # `next` is one thread's at a time

    def work(ignored: int | None) -> None:
        try:
            with torch.no_grad():
                for call in waiting:
                    call()
        except BaseException as error:  # raised below, on the thread that called
            failures.append(error)

    region(Body(work), None, number, 0)
    if failures:
        raise failures[0]


def _in_turn(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _at_once(pool: ThreadPoolExecutor, calls: Sequence[Callable[[], object]]) -> None:
    for running in [pool.submit(call) for call in calls]:
        running.result()


def _compute_alone() -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
