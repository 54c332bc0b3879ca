"""Signs that ranks give each other before each step, and the words for them."""

import pickle
from collections.abc import Sequence
from contextlib import suppress

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
