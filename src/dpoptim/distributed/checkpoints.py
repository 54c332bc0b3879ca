"""Checkpoints of runs in several processes.

What ranks keep in parts is joined for the file, and cut for those that resume.

The file is the one that a single process would write, so a run goes on in any number of processes.
"""

from collections.abc import Callable
from typing import Any

import torch

from dpoptim.distributed.ranks import Ranks
from dpoptim.gradients.summation_groups import Indices
from dpoptim.gradients.totals import Totals

State = dict[str, Any]


def joined(state: State, ranks: Ranks, totals: Totals, records: int | None) -> State:
    """Join the ranks' states between two steps to that of one process; on rank 0.

    **Secret**, as its parts are.

    Args:
        state: what `Steps` keeps; as many batches drawn ahead on every rank.
        totals: which part of a step's sum is here.
        records: on this rank, where it has its own; None where all have the same.
    """
    side, gate, queue = state["side"], state["gate"], state["queue"]
    if records is not None:
        queue = queue | {"shards": ranks.gathered(queue | {"records": records})}
    if ranks.size == 1:
        return state | {"queue": queue}
    if records is None:
        everyone = ranks.gathered(queue["waiting"])
        queue = queue | {"waiting": [torch.cat(parts) for parts in zip(*everyone, strict=True)]}
    if side is not None and side["error"] is not None:
        error = [totals.joined(place, part) for place, part in enumerate(side["error"])]
        side = side | {"error": error}
    if (noise := gate["correlated"]) is not None:
        # What follows the sums is rank 0's alone: counts, of which the others have empty tensors.
        vectors = [*map(list, noise["vectors"])]
        for place in range(len(totals.entries)):
            own = vectors[place]
            # of a part without entries
            own += [torch.zeros(0, dtype=torch.float64)] * (ranks.most(len(own)) - len(own))
            vectors[place] = [totals.joined(place, part) for part in own]
        sizes = [*totals.entries, *noise["sizes"][len(totals.entries) :]]
        gate = gate | {"correlated": noise | {"vectors": vectors, "sizes": sizes}}
    return state | {"queue": queue, "side": side, "gate": gate}


def cut(
    state: State,
    ranks: Ranks,
    totals: Totals,
    deal: Callable[[Indices], Indices],
    records: int | None,
) -> State:
    """From the state of one process to this rank's own.

    Args:
        deal: this rank's part of each batch that was drawn ahead.
        records: as for `joined`.

    Raises:
        ValueError: batches were drawn ahead, or orders are in force, of records that are not on
            the same ranks any more.
    """
    state = state | {"queue": own_queue(state["queue"], ranks, deal, records)}
    if ranks.size == 1:
        return state
    side, gate = state["side"], state["gate"]

    if side is not None and side["error"] is not None:
        side = side | {
            "error": [totals.own(place, whole) for place, whole in enumerate(side["error"])]
        }
    if (noise := gate["correlated"]) is not None:
        count = len(totals.entries)
        first = ranks.rank == 0
        vectors = [
            [totals.own(place, vector) for vector in each]
            for place, each in enumerate(noise["vectors"][:count])
        ]
        vectors += [
            [vector if first else vector[:0] for vector in each]
            for each in noise["vectors"][count:]
        ]
        sizes = [*totals.own_entries]
        sizes += [size if first else 0 for size in noise["sizes"][count:]]
        gate = gate | {"correlated": noise | {"vectors": vectors, "sizes": sizes}}
    return state | {"side": side, "gate": gate}


def own_queue(
    queue: State, ranks: Ranks, deal: Callable[[Indices], Indices], records: int | None
) -> State:
    """Which batches this rank has before it. See `cut`."""
    shards = queue.get("shards")
    if shards is None and records is None:
        waiting = [torch.from_numpy(deal(batch.numpy())) for batch in queue["waiting"]]
        return queue | {"waiting": waiting}
    saved = [queue] if shards is None else shards
    if shards is not None and records is not None:
        here = ranks.gathered(records)
        if here == [shard["records"] for shard in shards]:
            own: State = shards[ranks.rank]
            return own
    if any(shard["waiting"] or shard["order"] is not None for shard in saved):
        raise ValueError(
            "resume: the checkpoint holds batches that were drawn ahead, or an order of the "
            "records, and records are spread over the processes in another way than when it was "
            "saved. Fix: resume with the same number of processes, the same records on each, and "
            "the same argument sharded."
        )
    return saved[0]
