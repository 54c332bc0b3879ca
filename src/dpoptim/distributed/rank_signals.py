"""Signs of ranks: what each is about to do, and whether it lives, with the words for it."""

import pickle
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from dpoptim.distributed.c10d_internals import rendezvous_store
from dpoptim.errors import RankError

# what a rank is about to do
ARRIVED, RELEASE, LEFT, FAILED, MICROBATCH, COUNT, SAVE, FINISH = 1, 2, 3, 4, 5, 6, 7, 8
EXCHANGE, OTHER_RUN = 9, 10  # asks all ranks something; does something of another run of theirs
TRIAL = 11  # runs the model on made-up records
EVALUATE = 12
ABOUT = {
    RELEASE: "release step {}",
    SAVE: "save step {}",
    FINISH: "end the run after step {}",
    EVALUATE: "score the model after step {}",
}
MOST_MICROBATCHES = 1 << 20  # of a step, at most
ROLL_CALL = timedelta(seconds=5)  # how long ranks that are asked whether they live may take


def rank_names(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def sign_in_words(kind: int, at: int) -> str:
    """Words for a rank's sign, without counts that are private."""
    if kind in (MICROBATCH, COUNT):
        return "is about to run a part of " + (
            f"step {at // MOST_MICROBATCHES}" if kind == MICROBATCH else "a step"
        )
    if kind in (EXCHANGE, OTHER_RUN):
        return "asks the other ranks" if kind == EXCHANGE else "goes on with, or left, another run"
    if kind == TRIAL:
        return "tries the model"
    said = {
        LEFT: "left the run",
        FAILED: "left it with an error, and says why itself",
        SAVE: "calls private.save",
        FINISH: "calls private.finish",
        EVALUATE: "calls private.evaluate",
    }
    return f"{said.get(kind, 'releases')} (step {at})"


def signs_in_words(signs: Sequence[tuple[int, int] | None]) -> str:
    """Words for those ranks of all that have a sign here."""
    return "; ".join(
        f"rank {rank} {sign_in_words(*sign)}" for rank, sign in enumerate(signs) if sign is not None
    )


def portable_error(error: BaseException) -> BaseException:
    """The error as another process can raise it; an interrupt is of one process alone."""
    if isinstance(error, Exception):
        with suppress(Exception):
            return pickle.loads(pickle.dumps(error))
    return RankError("rank 0 failed, and says why itself.")


def tell_failure(group: dist.ProcessGroup, *, failed: bool) -> None:
    """Leave word for `missing_ranks` that this process failed, or take it back."""
    word = word_of(group, dist.get_rank(group))
    with suppress(Exception):  # stores raise what they like; the others then hear less
        if failed:
            rendezvous_store().set(word, "1")
        else:
            rendezvous_store().delete_key(word)


def word_of(group: dist.ProcessGroup, rank: int) -> str:
    """The key under which a rank leaves word that it failed."""
    return f"dpoptim/{group.group_name}/failed/{rank}"


def missing_ranks(group: dist.ProcessGroup) -> str:
    """Name who does not answer a roll-call through the store, with which the processes met."""
    calls = f"dpoptim/{group.group_name}/alive"
    ranks = range(dist.get_world_size(group))
    try:
        store = rendezvous_store()
        store.set(f"{calls}/{dist.get_rank(group)}", "1")
        failed = [rank for rank in ranks if store.check([word_of(group, rank)])]
    except Exception:  # stores raise what they like
        return "the process that held the rendezvous (rank 0, unless torchrun does) is gone"
    if failed:
        return f"{rank_names(failed)} failed, and says why itself"
    gone: list[int] = []
    for rank in ranks:
        try:
            store.wait([f"{calls}/{rank}"], ROLL_CALL if not gone else timedelta(milliseconds=100))
        except Exception:
            gone.append(rank)
    if not gone:
        return "all ranks live, but one was late"
    return (
        f"{rank_names(gone)} gave no sign of life for {ROLL_CALL.seconds} s (dead, or waiting for "
        "one that is)"
    )
