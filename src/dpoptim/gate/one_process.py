"""One process releases what one reservation pays for."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.distributed as dist

from dpoptim.accounting.ledger import Ledger
from dpoptim.errors import PrivacyError, RankError

_alone: ContextVar[bool] = ContextVar("alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Make everything in this ``with`` what one process does, whatever others there are.

    What it releases is this rank's own: whoever hands it on, or chooses among ranks', charges for
    all of it.
    """
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def is_alone() -> bool:
    """Whether the others are left out."""
    return _alone.get()


def refuse_fork(process: int) -> None:
    """Refuse to release in a forked process: it would release more on the same charge."""
    if os.getpid() != process:
        raise PrivacyError(
            "a run was taken over by a forked process: both would release its sums, on one "
            "charge. Fix: start it in the "
            "process that trains."
        )


def rank_of_several() -> int | None:
    """This process's rank under `torch.distributed`; None where it is the only one, or alone."""
    if is_alone():
        return None
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return dist.get_rank() if several else None


def refuse_other_ranks(what: str, ledger: Ledger | None) -> None:
    """Refuse a release that every rank would make, and charge, anew.

    Args:
        what: public text. ledger: one that the ranks have in common is charged once.

    Raises:
        RankError: on all ranks but the first.
    """
    rank = rank_of_several()
    if rank and (ledger is None or not ledger.of_all_ranks):
        raise RankError(
            f"{what} was called on rank {rank}: each rank would draw noise, and charge, of its "
            "own. Fix: call it on rank 0 alone, and hand what it returned, or was fitted, on to "
            "the others: torch.distributed.broadcast_object_list."
        )
