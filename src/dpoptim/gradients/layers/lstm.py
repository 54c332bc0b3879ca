"""A run of LSTM steps with few operations to a step."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dpoptim.gradients.backward_pass import once_differentiable
from dpoptim.gradients.multiplication import linear


def shifted(x: Tensor, start: Tensor, reverse: bool) -> Tensor:
    """The value before each step: x (B, T, H) one step later, ``start`` (B, H) before the first."""
    pieces = [x[:, 1:], start[:, None]] if reverse else [start[:, None], x[:, :-1]]
    return torch.cat(pieces, 1)


class LSTMRun(torch.autograd.Function):
    """All steps of an LSTM layer in one direction.

    Inputs: what the gates get from the input (B, T, 4H), states h and c (B, H) to start from, the
    recurrent weight (4H, H), which gets no gradient, and the direction. Outputs: h of all steps (B,
    T, H), and c after the last step.

    Every step's numbers lie side by side, and nothing is made for all steps at once: so what a
    step reads and writes stays in cache.
    """

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, h: Tensor, c: Tensor, w_hh: Tensor, reverse: bool
    ) -> tuple[Tensor, Tensor]:
        B, T, H = *given.shape[:2], h.shape[1]
        gates = given.new_empty(T, B, 4 * H)
        cells, tanhs = given.new_empty(T, B, H), given.new_empty(T, B, H)
        outputs = given.new_empty(B, T, H)
        start = c
        of_input, of_output = given.unbind(1), outputs.unbind(1)
        each_gate, each_cell, each_tanh = of_steps(gates), cells.unbind(), tanhs.unbind()
        minus_one = given.new_tensor(-1.0)
        for t in steps(T, reverse):
            all_four, i, f, g, o = each_gate[t]
            torch.add(of_input[t], linear(h, w_hh), out=all_four)
            # tanh(x) = 2 sigmoid(2x) - 1: a third of the time, and errs by a rounding of 1
            g.mul_(2)
            all_four.sigmoid_()
            torch.add(minus_one, g, alpha=2, out=g)
            c = torch.mul(f, c, out=each_cell[t]).addcmul_(i, g)
            tanh = torch.mul(c, 2, out=each_tanh[t]).sigmoid_()
            h = torch.mul(o, torch.add(minus_one, tanh, alpha=2, out=tanh))
            of_output[t].copy_(h)
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
        (T, B, _), reverse = gates.shape, ctx.reverse
        deltas = gates.new_empty(B, T, gates.shape[2])
        of_output, all_deltas = from_outputs.unbind(1), deltas.unbind(1)
        order, w = [*steps(T, reverse)], w_hh.T
        each_gate, each_cell, each_tanh = of_steps(gates), cells.unbind(), tanhs.unbind()
        dh, dc, spare = torch.zeros_like(start), dc.clone(), torch.empty_like(start)
        # of one step after the other
        delta = gates.new_empty(B, gates.shape[2])
        di, df, dg, do = delta.chunk(4, 1)
        for t, before in reversed([*zip(order, [None, *order], strict=False)]):
            _, i, f, g, o = each_gate[t]
            dh = dh.add_(of_output[t])
            through_sigmoid(dh * each_tanh[t], o, out=do)
            dc.add_(through_tanh(dh.mul_(o), each_tanh[t], out=spare))
            through_sigmoid(dc * g, i, out=di)
            through_sigmoid(dc * (start if before is None else each_cell[before]), f, out=df)
            through_tanh(dc * i, g, out=dg)
            dc.mul_(f)
            dh = linear(delta, w)
            all_deltas[t].copy_(delta)
        return deltas, dh, dc, None, None


def of_steps(gates: Tensor) -> list[tuple[Tensor, ...]]:
    """Views of each step's gates (T, B, 4H): all of them, and i, f, g and o apart."""
    views = [each.unbind() for each in (gates, *gates.chunk(4, 2))]
    return [*zip(*views, strict=True)]


def steps(number: int, reverse: bool) -> Iterator[int]:
    return iter(reversed(range(number)) if reverse else range(number))


def through_sigmoid(slope: Tensor, value: Tensor, out: Tensor) -> Tensor:
    """``slope`` times the derivative of the sigmoid whose value is given."""
    return torch.mul(slope, value, out=out).addcmul_(out, value, value=-1)


def through_tanh(slope: Tensor, value: Tensor, out: Tensor) -> Tensor:
    """``slope`` times the derivative of the hyperbolic tangent whose value is given."""
    return torch.addcmul(slope, torch.mul(slope, value), value, value=-1, out=out)
