"""``dpoptim train`` under torchrun: one training; rank 0 has the run directory and ledger."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from dpoptim.distributed.ranks import Ranks
from dpoptim.distributed.wrapping import ranks_of


@contextmanager
def launched() -> Iterator[Ranks]:
    """The processes that torchrun started, on the CPU; without it, this one alone."""
    by_torchrun = dist.is_available() and dist.is_torchelastic_launched()
    several = by_torchrun and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if not several or dist.is_initialized():
        yield ranks_of(None, None)
        return
    dist.init_process_group("gloo")
    try:
        yield ranks_of(None, None)
    finally:
        dist.destroy_process_group()


@contextmanager
def refused_together(ranks: Ranks, what: str) -> Iterator[None]:
    """Let no rank go beyond what one of them refuses in here.

    Raises:
        RankError: another rank refused.
    """
    try:
        yield
    except BaseException:
        ranks.leave(0, failed=True)
        raise
    ranks.arrive(what)
