"""Checkpoints of runs in several processes: what ranks keep in parts is joined for the file, and
cut for those that resume.

The file is the one that a single process would write, so a run goes on in any number of processes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dpoptim.distributed.ranks import Ranks, part_sizes
from dpoptim.gradients.summation_groups import Indices

State = dict[str, Any]


def joined(state: State, ranks: Ranks, entries: Sequence[int]) -> State:
    """From each rank's own state between two steps to that of one process; on rank 0. **Secret**,
    as its parts are.

    Args:
        state: what `Steps` keeps; as many batches drawn ahead on every rank.
        entries: of the whole vectors of a step's sum, one a device.
    """
    if ranks.size == 1:
        return state
    side, gate = state["side"], state["gate"]
    everyone = ranks.gathered(state["queue"]["waiting"])
    waiting = [torch.cat(parts) for parts in zip(*everyone, strict=True)]
    if side is not None and side["error"] is not None:
        error = [
            ranks.join_parts(part, whole)
            for part, whole in zip(side["error"], entries, strict=True)
        ]
        side = side | {"error": error}
    if (noise := gate["correlated"]) is not None:
        # What follows the sums is rank 0's alone: counts, of which the others have empty tensors.
        vectors = [*map(list, noise["vectors"])]
        for place, whole in enumerate(entries):
            own = vectors[place]
            # of a part without entries
            own += [torch.zeros(0, dtype=torch.float64)] * (ranks.most(len(own)) - len(own))
            vectors[place] = [ranks.join_parts(part, whole) for part in own]
        sizes = [*entries, *noise["sizes"][len(entries) :]]
        gate = gate | {"correlated": noise | {"vectors": vectors, "sizes": sizes}}
    return state | {"queue": state["queue"] | {"waiting": waiting}, "side": side, "gate": gate}


def cut(
    state: State, ranks: Ranks, entries: Sequence[int], deal: Callable[[Indices], Indices]
) -> State:
    """From the state of one process to this rank's own.

    Args:
        deal: this rank's part of each batch that was drawn ahead.
    """
    if ranks.size == 1:
        return state
    side, gate = state["side"], state["gate"]

    def own(vector: Tensor) -> Tensor:
        sizes = part_sizes(len(vector), ranks.size)
        start = sum(sizes[: ranks.rank])
        return vector[start : start + sizes[ranks.rank]].clone()

    if side is not None and side["error"] is not None:
        side = side | {"error": [own(whole) for whole in side["error"]]}
    if (noise := gate["correlated"]) is not None:
        count = len(entries)
        first = ranks.rank == 0
        vectors = [[own(vector) for vector in each] for each in noise["vectors"][:count]]
        vectors += [
            [vector if first else vector[:0] for vector in each]
            for each in noise["vectors"][count:]
        ]
        sizes = [part_sizes(whole, ranks.size)[ranks.rank] for whole in entries]
        sizes += [size if first else 0 for size in noise["sizes"][count:]]
        gate = gate | {"correlated": noise | {"vectors": vectors, "sizes": sizes}}
    waiting = [torch.from_numpy(deal(batch.numpy())) for batch in state["queue"]["waiting"]]
    return state | {"queue": state["queue"] | {"waiting": waiting}, "side": side, "gate": gate}
