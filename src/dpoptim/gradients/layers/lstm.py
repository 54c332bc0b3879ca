"""LSTM steps with few operations each: what depends on one step is computed for all at once."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dpoptim.gradients.multiplication import linear


def shifted(x: Tensor, start: Tensor, reverse: bool) -> Tensor:
    """The value before each step: x (B, T, H) one step later, ``start`` (B, H) before the first."""
    pieces = [x[:, 1:], start[:, None]] if reverse else [start[:, None], x[:, :-1]]
    return torch.cat(pieces, 1)


class LSTMRun(torch.autograd.Function):
    """Inputs: what the gates get from the input (B, T, 4H), states h and c (B, H) to start from,
    the recurrent weight (4H, H), which gets no gradient, and the direction. Outputs: h of all
    steps (B, T, H), and c after the last step."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, h: Tensor, c: Tensor, w_hh: Tensor, reverse: bool
    ) -> tuple[Tensor, Tensor]:
        B, T, H = *given.shape[:2], h.shape[1]
        gates = given.new_empty(given.shape)
        by_step = [x.unbind(1) for x in (given, gates, gates[..., : 2 * H], *gates.chunk(4, 2))]
        cells, outputs = (given.new_empty(B, T, H) for _ in range(2))
        tanhs = torch.empty_like(cells)
        states = [x.unbind(1) for x in (cells, tanhs, outputs)]
        start = c
        for t in reversed(range(T)) if reverse else range(T):
            of_input, all_gates, i_and_f, i, f, g, o = (x[t] for x in by_step)
            cell, tanh, output = (x[t] for x in states)
            torch.add(of_input, linear(h, w_hh), out=all_gates)
            i_and_f.sigmoid_()
            g.tanh_()
            o.sigmoid_()
            torch.mul(f, c, out=cell).addcmul_(i, g)
            h, c = torch.mul(o, torch.tanh(cell, out=tanh), out=output), cell
        ctx.reverse = reverse
        ctx.save_for_backward(gates, cells, tanhs, w_hh, start)
        return outputs, c.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, from_outputs: Tensor, dc: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(dc.device.type, enabled=False):
            return LSTMRun._backward(ctx, from_outputs, dc)

    @staticmethod
    def _backward(ctx: Any, from_outputs: Tensor, dc: Tensor) -> tuple[Tensor | None, ...]:
        gates, cells, tanhs, w_hh, start = ctx.saved_tensors
        T, reverse = gates.shape[1], ctx.reverse
        i, f, g, o = gates.chunk(4, 2)
        # Derivatives of the gates by dc (i, f, g) and by dh (o), and of the cell by dh.
        factors = torch.cat(
            [g * i * (1 - i), shifted(cells, start, reverse) * f * (1 - f), i * (1 - g * g)], 2
        )
        of_o, of_cell = tanhs * o * (1 - o), o * (1 - tanhs * tanhs)
        deltas = torch.empty_like(gates)
        three = (
            factors.unflatten(2, (3, -1)).unbind(1),
            deltas[..., : factors.shape[2]].unflatten(2, (3, -1)).unbind(1),
        )
        last, all_deltas = deltas.chunk(4, 2)[3].unbind(1), deltas.unbind(1)
        by_step = [x.unbind(1) for x in (from_outputs, of_o, of_cell, f)]
        dh: Tensor | None = None
        for t in range(T) if reverse else reversed(range(T)):
            from_output, o_t, cell_t, f_t = (x[t] for x in by_step)
            dh = from_output if dh is None else dh.add_(from_output)
            dc = torch.addcmul(dc, dh, cell_t)
            torch.mul(dc[:, None], three[0][t], out=three[1][t])
            torch.mul(dh, o_t, out=last[t])
            dc = dc * f_t
            dh = linear(all_deltas[t], w_hh.T)
        return deltas, dh, dc, None, None
