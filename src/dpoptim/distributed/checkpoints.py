"""State of several processes for a checkpoint, the same for any number of them.

What ranks keep in parts stays where it is: the checkpoint gets `Boxes` of it, by parameter, and
those that resume fill theirs. Only lists of records that were drawn ahead are joined.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from dpoptim.distributed.ranks import Ranks
from dpoptim.gradients.accumulation.boxes import Stored
from dpoptim.gradients.accumulation.summation_groups import Indices
from dpoptim.gradients.accumulation.totals import Totals

State = dict[str, Any]


def common_state(state: State, ranks: Ranks, totals: Totals, records: int | None) -> State:
    """From this rank's own state between two steps to one for any number of ranks.

    **Secret**, as its parts are. What is in no `Boxes` is right on rank 0.

    Args:
        state: what `Steps` keeps; as many batches drawn ahead on every rank.
        totals: which part of a step's sum is here.
        records: on this rank, where it has its own; None where all have the same.
    """
    memory, gate = state["memory"], state["gate"]
    if memory.get("error") is not None:
        memory = memory | {"error": totals.boxes(memory["error"])}
    if (noise := gate["correlated"]) is not None:
        count = len(totals.entries)
        # of a part without entries nothing is remembered
        none = torch.zeros(0, dtype=torch.float64)
        remembered = zip_longest(*noise["vectors"][:count], fillvalue=none)
        noise = noise | {
            "parameters": [totals.boxes([*vectors]) for vectors in remembered],
            # what follows the sums is rank 0's alone: counts, of which the others have none
            "vectors": noise["vectors"][count:],
            "sizes": noise["sizes"][count:],
        }
        gate = gate | {"correlated": noise}
    queue = common_queue(state["queue"], ranks, records)
    return state | {"queue": queue, "memory": memory, "gate": gate}


def parts_of_rank(totals: Totals, saved: Sequence[Tensor | Stored]) -> list[Tensor]:
    """This rank's parts of vectors that were saved by parameter."""
    vectors = [torch.empty(size, dtype=torch.float64) for size in totals.own_entries]
    for boxes, tensor in zip(totals.boxes(vectors), saved, strict=True):
        boxes.fill(tensor)
    return vectors


def common_queue(queue: State, ranks: Ranks, records: int | None) -> State:
    if records is not None:
        return queue | {"shards": ranks.all_gather(queue | {"records": records})}
    everyone = ranks.all_gather(queue["waiting"])
    return queue | {"waiting": [torch.cat(parts) for parts in zip(*everyone, strict=True)]}


def own_state(
    state: State,
    ranks: Ranks,
    totals: Totals,
    deal: Callable[[Indices], Indices],
    records: int | None,
) -> State:
    """From what `common_state` returned, in any number of ranks, to this rank's own state.

    Args:
        deal: this rank's part of each batch that was drawn ahead.
        records: as for `common_state`.

    Raises:
        ValueError: batches were drawn ahead, or orders are in force, of records that are not on
            the same ranks any more; or a rank's file is missing, or another one.
    """
    state = state | {"queue": own_queue(state["queue"], ranks, deal, records)}
    memory, gate = state["memory"], state["gate"]
    if memory.get("error") is not None:
        memory = memory | {"error": parts_of_rank(totals, memory["error"])}
    if (noise := gate["correlated"]) is not None:
        first = ranks.rank == 0
        remembered = [parts_of_rank(totals, saved) for saved in noise["parameters"]]
        vectors = [[each[place] for each in remembered] for place in range(len(totals.entries))]
        vectors += [[v if first else v[:0] for v in each] for each in noise["vectors"]]
        sizes = [*totals.own_entries, *(size if first else 0 for size in noise["sizes"])]
        own_noise = {key: value for key, value in noise.items() if key != "parameters"}
        gate = gate | {"correlated": own_noise | {"vectors": vectors, "sizes": sizes}}
    return state | {"memory": memory, "gate": gate}


def own_queue(
    queue: State, ranks: Ranks, deal: Callable[[Indices], Indices], records: int | None
) -> State:
    """Which batches this rank has before it. See `own_state`."""
    shards = queue.get("shards")
    if shards is None and records is None:
        waiting = [torch.from_numpy(deal(batch.numpy())) for batch in queue["waiting"]]
        return queue | {"waiting": waiting}
    saved = [queue] if shards is None else shards
    if shards is not None and records is not None:
        here = ranks.all_gather(records)
        if here == [shard["records"] for shard in shards]:
            mine: State = shards[ranks.rank]
            return mine
    if any(shard["waiting"] or shard["order"] is not None for shard in saved):
        raise ValueError(
            "resume: the checkpoint holds batches that were drawn ahead, or an order of the "
            "records, and records are spread over the processes in another way than when it was "
            "saved. Fix: resume with the same number of processes, the same records on each, and "
            "the same argument sharded."
        )
    return saved[0]
