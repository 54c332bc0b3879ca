"""What a training's guarantee rests on beside its plan: what is enforced, and what is taken on trust."""

from collections.abc import Mapping

from dpoptim.gradients.engine import Reduction
from dpoptim.plan import Basis

ESCAPES = Basis("enforced", "whatever would escape clipping is refused: other uses of a weight, batch statistics")
MEAN = "nobody exploits how the factor of a mean, one over the batch, rounds gradients (a summed loss needs no such trust)"


def basis_of_loss(stated: Reduction, differentiated: Reduction) -> tuple[Basis, ...]:
    """Of the loss as the user states it, and as it is differentiated (value clipping shows a mean and sums)."""
    loss = f"the loss is the {stated} over the batch of one term per record (dpoptim.check tests it)"
    items = (
        Basis("trusted", loss),
        Basis("trusted", "the shape of a record is public, and so is which layers run on a batch, and how often"),
        Basis("trusted", "nothing trainable outside the model takes part in the loss; records keep their order in it"),
    )
    return (*items, Basis("trusted", MEAN)) if differentiated == "mean" else items


def basis_of_ledger(durable: bool) -> Basis:
    if durable:
        return Basis("enforced", "the whole run was charged to a ledger on disk before its first noisy sum")
    return Basis("trusted", "other runs on this data are added up elsewhere: the ledger was in memory")


def basis_of_caveats(caveats: Mapping[str, bool], *, resumed: bool) -> tuple[Basis, ...]:
    """Of what the user allowed.

    Args:
        caveats: ``"partial_backward"``, ``"rounded"`` (under torch.autocast) and ``"seeded"``, of all parts of the run.
        resumed: whether it was taken up from a checkpoint.
    """
    items = []
    if caveats["partial_backward"]:
        items.append(Basis("trusted", "several backward passes over a batch cover disjoint records"))
    if caveats["rounded"]:
        shared = "under torch.autocast, records are rounded alike whatever other records share their batch"
        items.append(Basis("trusted", shared))
    if resumed:
        again = "nothing that was released after the checkpoint had been looked at when the run was taken up again"
        items.append(Basis("trusted", again))
    if caveats["seeded"]:
        items.append(Basis("unproven", "noise and sampling were seeded: whoever knows the seed sees the data"))
    return tuple(items)
