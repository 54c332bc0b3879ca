"""A run of LSTM steps with few operations to a step."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dpoptim.gradients.arithmetic.multiplication import linear, linear_by
from dpoptim.gradients.backward_pass import once_differentiable
from dpoptim.gradients.layers.runner import Use, enter
from dpoptim.runtime.torch_internals import graph_task

AT_ONCE = 1 << 18  # entries of gates that are made together: they stay in cache


def shifted(x: Tensor, start: Tensor, reverse: bool) -> Tensor:
    """The value before each step: x (B, T, H) one step later, ``start`` (B, H) before the first."""
    pieces = [x[:, 1:], start[:, None]] if reverse else [start[:, None], x[:, :-1]]
    return torch.cat(pieces, 1)


class LSTMRun(torch.autograd.Function):
    """All steps of an LSTM layer in one direction.

    Inputs: the use of its parameters, which is entered in the recorder on the way back; x (B, T,
    d); states h and c (B, H) to start from; the weights (4H, d) and (4H, H), and the bias or None,
    which get no gradients; the direction; parameters (as graph edges). Outputs: h of all steps (B,
    T, H), and c after the last step.

    What the gates get from the input, and derivatives, are made for a few steps at once, in which
    numbers lie side by side; all else in the step. So what is read and written stays in cache, and
    a step back is one product and a few operations that only multiply and add.
    """

    @staticmethod
    def forward(
        ctx: Any,
        use: Use,
        x: Tensor,
        h: Tensor,
        c: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        bias: Tensor | None,
        reverse: bool,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        B, T, H = *x.shape[:2], h.shape[1]
        tanhs, outputs = x.new_empty(T, B, H), x.new_empty(B, T, H)
        room = x.new_empty(T + 1, B, H)
        before, after = before_and_after(room, reverse)
        before[-1 if reverse else 0].copy_(c)
        of_output, each_cell, each_tanh = outputs.unbind(1), after.unbind(), tanhs.unbind()
        minus_one, from_state = x.new_tensor(-1.0), linear_by(w_hh, h)
        inputs, gates = x.transpose(0, 1).contiguous(), list[Tensor]()
        for part in stretches(T, B * 4 * H, reverse):
            gates.append(linear(inputs[part], w_ih, bias))
            each_gate = of_steps(gates[-1])
            for t in steps_in_order(part, reverse):
                all_four, i, f, g, o = each_gate[t - part.start]
                all_four.add_(from_state(h))
                # tanh(x) = 2 sigmoid(2x) - 1: a third of the time, and errs by a rounding of 1
                g.mul_(2)
                all_four.sigmoid_()
                torch.add(minus_one, g, alpha=2, out=g)
                c = torch.mul(f, c, out=each_cell[t]).addcmul_(i, g)
                tanh = torch.mul(c, 2, out=each_tanh[t]).sigmoid_()
                h = torch.mul(o, torch.add(minus_one, tanh, alpha=2, out=tanh))
                of_output[t].copy_(h)
        ctx.use, ctx.reverse, ctx.edges = use, reverse, len(parameters)
        ctx.forward_task = graph_task()
        ctx.save_for_backward(x, room, tanhs, w_ih, w_hh, *gates)
        return outputs, c.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, from_outputs: Tensor, dc: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(dc.device.type, enabled=False):
            return LSTMRun._backward(ctx, from_outputs, dc)

    @staticmethod
    def _backward(ctx: Any, from_outputs: Tensor, dc: Tensor) -> tuple[Tensor | None, ...]:
        x, room, tanhs, w_ih, w_hh, *gates = ctx.saved_tensors
        (T, B, H), reverse = tanhs.shape, ctx.reverse
        before, _ = before_and_after(room, reverse)
        deltas = x.new_empty(B, T, 4 * H)
        of_output, all_deltas = from_outputs.unbind(1), deltas.unbind(1)
        dh, dc = torch.zeros_like(dc), dc.clone()
        size = max(map(len, gates))
        by_gates, to_cell = x.new_empty(size, B, 4 * H), x.new_empty(size, B, H)
        to_state = linear_by(w_hh.T, by_gates[0])
        # a step's derivatives, and then its gradients, in their place
        views = [
            (all_four, all_four.view(B, 4, H)[:, :3], all_four[:, 3 * H :], cell)
            for all_four, cell in zip(by_gates.unbind(), to_cell.unbind(), strict=True)
        ]
        for part, here in reversed([*zip(stretches(T, B * 4 * H, reverse), gates, strict=True)]):
            derivatives(here, before[part], tanhs[part], by_gates[: len(here)], to_cell)
            each_forget = here[:, :, H : 2 * H].unbind()
            for t in steps_in_order(part, not reverse):
                delta, of_cell, of_output_gate, through_output = views[t - part.start]
                dh = dh.add_(of_output[t])
                dc.addcmul_(dh, through_output)
                of_output_gate.mul_(dh)
                of_cell.mul_(dc[:, None])
                dc.mul_(each_forget[t - part.start])
                dh = to_state(delta)
                all_deltas[t].copy_(delta)
        enter(ctx.use, ctx.forward_task, (x.detach(),), deltas)
        dx = linear(deltas, w_ih.T) if ctx.needs_input_grad[1] else None
        return None, dx, dh, dc, *[None] * (4 + ctx.edges)


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


def stretches(number: int, entries: int, reverse: bool) -> list[slice]:
    """Few steps each, in the order in which they are run; ``entries`` of each step's gates."""
    size = max(1, AT_ONCE // max(1, entries))
    found = [slice(start, min(start + size, number)) for start in range(0, number, size)]
    return found[::-1] if reverse else found


def steps_in_order(part: slice, reverse: bool) -> Iterator[int]:
    each = range(part.start, part.stop)
    return iter(reversed(each) if reverse else each)
