"""nn.LSTMCell, nn.GRUCell and nn.RNNCell: products with weights, and elementwise operations.

Written out, so that the weights meet data in functions that have rules (see `shared`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.gradients.backward_pass import BackwardRecorder
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.layers.bare import BareParameters
from dpoptim.gradients.layers.recurrent import is_as_in_torch
from dpoptim.gradients.layers.shared import SharedParameter
from dpoptim.runtime.torch_internals import pytree

KINDS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)


def is_cell(module: nn.Module) -> bool:
    return is_as_in_torch(module, KINDS)


class CellLayer(BareParameters):
    """Runs a recurrent cell by its formulas."""

    def __init__(
        self, recorder: BackwardRecorder, module: nn.Module, label: str, isolation: Isolation
    ) -> None:
        trainable = [name for name, p in module.named_parameters() if p.requires_grad]
        super().__init__(recorder, module, label, trainable, isolation)
        self.original = self._step

    def _step(self, input: Tensor, hx: Any = None) -> Any:
        cell: Any = self.module
        input, hx = pytree.tree_map(each_with_its_own, (input, hx))
        if hx is None:
            zeros = input.new_zeros(*input.shape[:-1], cell.hidden_size)
            hx = (zeros, zeros) if isinstance(cell, nn.LSTMCell) else zeros
        h = hx[0] if isinstance(cell, nn.LSTMCell) else hx
        of_input = F.linear(input, cell.weight_ih, cell.bias_ih)
        of_state = F.linear(h, cell.weight_hh, cell.bias_hh)
        if isinstance(cell, nn.LSTMCell):
            return lstm(of_input + of_state, hx[1])
        if isinstance(cell, nn.GRUCell):
            return gru(of_input, of_state, h)
        bend = torch.tanh if cell.nonlinearity == "tanh" else F.relu
        return bend(of_input + of_state)


def each_with_its_own(x: Any) -> Any:
    """``x``; where it is copies of a learnt first input or state, a row of it for each record."""
    copies = isinstance(x, SharedParameter) and x.dim() > 1 and len(x) > 1
    return x.per_record(len(x), x.dim()) if copies and x.fits(len(x), x.dim()) else x


def lstm(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The next state and memory."""
    enter, keep, value, show = gates.chunk(4, -1)
    c = keep.sigmoid() * c + enter.sigmoid() * value.tanh()
    return show.sigmoid() * c.tanh(), c


def gru(of_input: Tensor, of_state: Tensor, h: Tensor) -> Tensor:
    """The next state."""
    (r, z, n), (r_state, z_state, n_state) = of_input.chunk(3, -1), of_state.chunk(3, -1)
    n = torch.tanh(n + torch.sigmoid(r + r_state) * n_state)
    return n + torch.sigmoid(z + z_state) * (h - n)
