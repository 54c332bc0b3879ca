"""Whether the same records lie at the same places of the ranks' data sets.

Ranks that list the same files in another order would deal one record to two of them.
"""

import hashlib
import hmac
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from dpoptim.distributed.agreement import leaves_of
from dpoptim.distributed.rank_signals import rank_names
from dpoptim.distributed.ranks import Ranks
from dpoptim.errors import RankError
from dpoptim.runtime.torch_internals import pytree
from dpoptim.training.randomness.generators import generators_in
from dpoptim.training.randomness.secret_randomness import same_randomness

COMPARED = 16


def refuse_another_order(ranks: Ranks, train_set: Dataset[Any]) -> None:
    """Refuse data sets that hold other records at the same places, though equally many.

    Some places are compared, chosen by coins that the ranks have in common. What a data set reads
    differently from one time to the next, under the same random numbers, is not.

    Raises:
        RankError: on all ranks; which records differ is not said.

    **Guarantee.** Digests, by a key that the ranks alone have, stay among the ranks; whether all
    agree is a fact about the program.
    """
    if ranks.size == 1:
        return
    words = np.zeros(COMPARED + 4, dtype=np.uint64)
    ranks.common_stream(None, "records that are compared").words(words)
    count = len(train_set)  # type: ignore[arg-type]
    places = [int(word % np.uint64(max(count, 1))) for word in words[4:]] if count else []
    key = words[:4].tobytes()
    everyone = ranks.all_gather([digest_of(train_set, place, key) for place in places])
    for found in zip(*everyone, strict=True):
        known = [digest for digest in found if digest]
        if len(known) == ranks.size and len(set(known)) > 1:
            others = [rank for rank, digest in enumerate(found) if digest != found[0]]
            raise RankError(
                f"{rank_names(others)} found other records than rank 0 at some places of train_set "
                "(data set): a record would be drawn at two places. Fix: the same order on every "
                "rank, as of sorted(glob.glob(...)), since operating systems list files in any; "
                "sharded=True if each rank has records of its own; or, where records hold what "
                "differs by process (names of its files, random numbers that were drawn once), "
                "leave that out of them."
            )


def digest_of(train_set: Dataset[Any], place: int, key: bytes) -> str:
    """A keyed digest of a record; "" where it is another one when it is read again. Private.

    Of a path its last part: folders may differ by machine.
    """
    own = generators_in(train_set)
    found = set()
    for _ in range(2):
        digest = hmac.new(key, digestmod=hashlib.sha256)
        try:
            with same_randomness(own):
                item = pytree.tree_map_only(str, without_folder, train_set[place])
                for leaf in leaves_of(item):
                    digest.update(leaf)
        except Exception:  # whatever the user's code raises: the loop will, too
            return ""
        found.add(digest.hexdigest())
    return found.pop() if len(found) == 1 else ""


def without_folder(text: str) -> str:
    """The last part of a path; other text, which has blanks in it, as it is."""
    return text if any(map(str.isspace, text)) else text.replace("\\", "/").rpartition("/")[2]
