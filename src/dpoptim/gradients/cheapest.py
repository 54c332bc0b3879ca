"""How a layer's gradients are best measured. By public numbers alone, so that no record's factor depends on the others."""

from dataclasses import replace

import torch

from dpoptim.gradients.contributions import MEMORY_CAP, Formed
from dpoptim.gradients.positions import Positions

KEPT_GRADIENTS = 1 << 20  # entries of a layer's per-record gradients up to which forming and keeping them is cheapest
WORTH_A_CALL = 1 << 19  # multiplications for one record's gradient that take longer than asking for them
LARGE_KERNEL = 1 << 15  # entries of a convolution's kernel that make as much work, by whatever products


def cheapest(contribution: Formed | Positions, positions: int | None, capacity: int, parameters: int) -> Formed | Positions:
    """The contribution, told to form its gradients record by record or to claim their norms where that is cheapest.

    Args:
        positions: of each record in this layer, None where unknown.
        capacity: records in a batch.
        parameters: trainable ones of the model; a record's gradients must fit into memory.

    **Guarantee.** All of these are public, and no number of the contribution is read: only its shape, device and dtype.
    """
    if capacity * contribution.entries <= KEPT_GRADIENTS:
        return contribution
    room = parameters <= MEMORY_CAP
    if isinstance(contribution, Formed):
        return replace(contribution, alone=room and contribution.singly is not None and contribution.entries >= LARGE_KERNEL)
    if positions is None:
        return contribution
    p, d = contribution.g.shape[2], contribution.a.shape[2]
    usual = contribution.g.device.type == "cpu" and contribution.dtype == torch.float32
    if usual and room and positions * p * d >= WORTH_A_CALL:
        return replace(contribution, alone=True)
    return replace(contribution, claims=positions * (p + d) < 0.8 * p * d)
