"""How a layer's gradients are best measured. By public numbers alone, so that no record's factor
depends on the others.
"""

from dataclasses import replace

import torch

from dpoptim.gradients.per_sample_grads import MEMORY_CAP, Lazy
from dpoptim.gradients.sequence_outer import SequenceOuter

# entries of a layer's per-record gradients up to which forming and keeping them is choose_formula
KEPT_GRADIENTS = 1 << 20
# multiplications for one record's gradient that take longer than asking for them
WORTH_A_CALL = 1 << 19
# up to which claimed norms are cheaper still, as for the rows of a record in a linear layer
FEW_POSITIONS = 8
# entries of a convolution's kernel that make as much work, by whatever products
LARGE_KERNEL = 1 << 15


def choose_formula(
    per_sample_grad: Lazy | SequenceOuter, positions: int | None, capacity: int, parameters: int
) -> Lazy | SequenceOuter:
    """A parameter's gradients, told to be formed record by record or to have ghost norms,
    whichever is cheaper.

    Args:
        positions: of each record in this layer, None where unknown.
        capacity: records in a batch.
        parameters: trainable ones of the model; a record's gradients must fit into memory.

    **Guarantee.** All of these are public, and no number of the per_sample_grad is read: only its
    shape, device and dtype.
    """
    if capacity * per_sample_grad.entries <= KEPT_GRADIENTS:
        return per_sample_grad
    room = parameters <= MEMORY_CAP
    if isinstance(per_sample_grad, Lazy):
        return replace(
            per_sample_grad,
            alone=room
            and per_sample_grad.singly is not None
            and per_sample_grad.entries >= LARGE_KERNEL,
        )
    if positions is None:
        return per_sample_grad
    p, d = per_sample_grad.g.shape[2], per_sample_grad.a.shape[2]
    usual = per_sample_grad.g.device.type == "cpu" and per_sample_grad.dtype == torch.float32
    if usual and room and positions > FEW_POSITIONS and positions * p * d >= WORTH_A_CALL:
        return replace(per_sample_grad, alone=True)
    return replace(per_sample_grad, claims=positions * (p + d) < 0.8 * p * d)
