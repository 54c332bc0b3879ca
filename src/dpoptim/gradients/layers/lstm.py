"""A run of LSTM steps with few operations to a step."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dpoptim.gradients.backward_pass import once_differentiable
from dpoptim.gradients.multiplication import linear_by

AT_ONCE = 1 << 18  # entries whose derivatives are made together: they stay in cache


def shifted(x: Tensor, start: Tensor, reverse: bool) -> Tensor:
    """The value before each step: x (B, T, H) one step later, ``start`` (B, H) before the first."""
    pieces = [x[:, 1:], start[:, None]] if reverse else [start[:, None], x[:, :-1]]
    return torch.cat(pieces, 1)


class LSTMRun(torch.autograd.Function):
    """All steps of an LSTM layer in one direction.

    Inputs: what the gates get from the input (B, T, 4H), states h and c (B, H) to start from, the
    recurrent weight (4H, H), which gets no gradient, and the direction. Outputs: h of all steps (B,
    T, H), and c after the last step.

    Every step's numbers lie side by side, and are made in the step; derivatives for a few steps at
    once. So what is read and written stays in cache, and a step back is one product and a few
    operations that only multiply and add.
    """

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, h: Tensor, c: Tensor, w_hh: Tensor, reverse: bool
    ) -> tuple[Tensor, Tensor]:
        B, T, H = *given.shape[:2], h.shape[1]
        gates, tanhs = given.new_empty(T, B, 4 * H), given.new_empty(T, B, H)
        room, outputs = given.new_empty(T + 1, B, H), given.new_empty(B, T, H)
        before, after = before_and_after(room, reverse)
        before[-1 if reverse else 0].copy_(c)
        of_input, of_output = given.unbind(1), outputs.unbind(1)
        each_gate, each_cell, each_tanh = of_steps(gates), after.unbind(), tanhs.unbind()
        minus_one, from_state = given.new_tensor(-1.0), linear_by(w_hh, h)
        for t in steps(T, reverse):
            all_four, i, f, g, o = each_gate[t]
            torch.add(of_input[t], from_state(h), out=all_four)
            # tanh(x) = 2 sigmoid(2x) - 1: a third of the time, and errs by a rounding of 1
            g.mul_(2)
            all_four.sigmoid_()
            torch.add(minus_one, g, alpha=2, out=g)
            c = torch.mul(f, c, out=each_cell[t]).addcmul_(i, g)
            tanh = torch.mul(c, 2, out=each_tanh[t]).sigmoid_()
            h = torch.mul(o, torch.add(minus_one, tanh, alpha=2, out=tanh))
            of_output[t].copy_(h)
        ctx.reverse = reverse
        ctx.save_for_backward(gates, room, tanhs, w_hh)
        return outputs, c.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, from_outputs: Tensor, dc: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(dc.device.type, enabled=False):
            return LSTMRun._backward(ctx, from_outputs, dc)

    @staticmethod
    def _backward(ctx: Any, from_outputs: Tensor, dc: Tensor) -> tuple[Tensor | None, ...]:
        gates, room, tanhs, w_hh = ctx.saved_tensors
        (T, B, width), H, reverse = gates.shape, room.shape[2], ctx.reverse
        before, _ = before_and_after(room, reverse)
        deltas = gates.new_empty(B, T, width)
        of_output, all_deltas = from_outputs.unbind(1), deltas.unbind(1)
        each_forget, to_state = gates[:, :, H : 2 * H].unbind(), linear_by(w_hh.T, gates[0])
        dh, dc = torch.zeros_like(dc), dc.clone()
        size = max(1, AT_ONCE // max(1, B * width))
        by_gates, to_cell = gates.new_empty(size, B, width), gates.new_empty(size, B, H)
        # a step's derivatives, and then its gradients, in their place
        views = [
            (all_four, all_four.view(B, 4, H)[:, :3], all_four[:, 3 * H :], cell)
            for all_four, cell in zip(by_gates.unbind(), to_cell.unbind(), strict=True)
        ]
        made = slice(0, 0)
        for t in steps(T, not reverse):
            if not made.start <= t < made.stop:
                made = slice(t, t + size) if reverse else slice(max(0, t + 1 - size), t + 1)
                here = gates[made]
                derivatives(here, before[made], tanhs[made], by_gates[: len(here)], to_cell)
            delta, of_cell, of_output_gate, through_output = views[t - made.start]
            dh = dh.add_(of_output[t])
            dc.addcmul_(dh, through_output)
            of_output_gate.mul_(dh)
            of_cell.mul_(dc[:, None])
            dc.mul_(each_forget[t])
            dh = to_state(delta)
            all_deltas[t].copy_(delta)
        return deltas, dh, dc, None, None


def derivatives(
    gates: Tensor, before: Tensor, tanhs: Tensor, by_gates: Tensor, to_cell: Tensor
) -> None:
    """Derivatives of some steps, which lie side by side.

    Args:
        gates, before, tanhs: values (k, B, 4H), cells before the steps and bent ones after them.
        by_gates: for those of the cell by what i, f and g are made of, and of the output by what o
            is, (k, B, 4H).
        to_cell: for those of the output by the cell, at least (k, B, H).
    """
    i, _, g, o = gates.chunk(4, 2)
    of_i, of_f, of_g, of_o = by_gates.chunk(4, 2)
    spare = to_cell[: len(gates)]
    torch.addcmul(gates, gates, gates, value=-1, out=by_gates)  # of a sigmoid
    of_i.mul_(g)
    of_f.mul_(before)
    of_o.mul_(tanhs)
    torch.addcmul(i, torch.mul(i, g, out=spare), g, value=-1, out=of_g)
    torch.addcmul(o, torch.mul(o, tanhs, out=spare), tanhs, value=-1, out=spare)


def before_and_after(room: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    """Views of the cells (T + 1, B, H) before each step and after it."""
    return (room[1:], room[:-1]) if reverse else (room[:-1], room[1:])


def of_steps(gates: Tensor) -> list[tuple[Tensor, ...]]:
    """Views of each step's gates (T, B, 4H): all of them, and i, f, g and o apart."""
    views = [each.unbind() for each in (gates, *gates.chunk(4, 2))]
    return [*zip(*views, strict=True)]


def steps(number: int, reverse: bool) -> Iterator[int]:
    return iter(reversed(range(number)) if reverse else range(number))
