"""LSTM and GRU layers by compiled functions: all steps of some records in one call.

`recurrent.c` runs them, on float32 on the CPU, where the package was built with it (see
`compiled`); elsewhere PyTorch's operations do, step by step, with other last bits.

**Guarantee.** What is made of a record, forward and back, is a function of its own rows to the last
bit, whoever else is in the batch and on however many threads: rows of records are computed side by
side, each number by one chain of operations, and nothing is added up over records.
"""

import ctypes
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpoptim.gradients.arithmetic.batch_invariant import with_dense_rows
from dpoptim.gradients.arithmetic.multiplication import plain
from dpoptim.gradients.backward_pass import once_differentiable
from dpoptim.gradients.layers.runner import Use, enter
from dpoptim.gradients.per_sample import native
from dpoptim.runtime.torch_internals import graph_task
from dpoptim.runtime.worker_threads import worker_threads

PANEL = 32  # outputs of a product that lie side by side
TOGETHER = 8  # records that a product computes side by side


class Run(ctypes.Structure):
    """As in `recurrent.c`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("records", "steps", "inputs", "states")),
        *((name, ctypes.c_int64) for name in ("reverse", "level")),
        *(("x", ctypes.c_void_p), ("x_stride", ctypes.c_int64), ("x_step", ctypes.c_int64)),
        *((name, ctypes.c_void_p) for name in ("weights", "bias", "third_of_x", "bias_of_x")),
        *((name, ctypes.c_void_p) for name in ("third_of_h", "bias_of_h")),
        *((name, ctypes.c_void_p) for name in ("to_states", "to_inputs")),
        *((name, ctypes.c_void_p) for name in ("gates", "outputs", "cells", "from_outputs")),
        *((name, ctypes.c_int64) for name in ("from_stride", "from_step")),
        *((name, ctypes.c_void_p) for name in ("dh", "dc", "deltas", "deltas_of_h", "dx")),
    )


def serves(*tensors: Tensor | None) -> bool:
    """Whether compiled functions can run a layer on tensors like these."""
    return all(each is None or (plain(each) and native.serves(each)) for each in tensors)


class CompiledLSTM(torch.autograd.Function):
    """All steps of an LSTM layer in one direction.

    Inputs: the use of its parameters, which is entered in the recorder on the way back; what is
    given the states before each step (B, T, H); x (B, T, d); states h and c (B, H) to start from;
    the weights (4H, d) and (4H, H), and the bias or None, which get no gradients; the direction;
    parameters (as graph edges). Outputs: h of all steps (B, T, H), and c after the last step.
    """

    @staticmethod
    def forward(
        ctx: Any,
        use: Use,
        keep: Callable[[Tensor], None],
        x: Tensor,
        h: Tensor,
        c: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        bias: Tensor | None,
        reverse: bool,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        x = with_dense_rows(x)
        outputs, cells = room_for_states(x, h, reverse), room_for_states(x, c, reverse)
        gates = x.new_empty(*x.shape[:2], 4 * h.shape[1])
        call_in_pieces(
            "dpoptim_lstm_forward",
            Run(inputs=x.shape[2], reverse=reverse, x_stride=x.stride(0), x_step=x.stride(1)),
            {"weights": laid_in_panels(torch.cat([w_ih, w_hh], 1)), "bias": bias},
            {"x": x, "gates": gates, "outputs": outputs, "cells": cells},
        )
        ctx.use, ctx.reverse, ctx.edges = use, reverse, len(parameters)
        ctx.forward_task = graph_task()
        ctx.save_for_backward(x, gates, cells, w_ih, w_hh)
        before, after = before_and_after(outputs, reverse)
        keep(before)
        return after, cells[:, 0 if reverse else -1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, from_outputs: Tensor, dc: Tensor) -> tuple[Tensor | None, ...]:
        x, gates, cells, w_ih, w_hh = ctx.saved_tensors
        from_outputs, dc = (
            with_dense_rows(from_outputs),
            dc.clone(memory_format=torch.contiguous_format),
        )
        dh, deltas = torch.zeros_like(dc), torch.empty_like(gates)
        dx = x.new_empty(x.shape) if ctx.needs_input_grad[2] else None
        strides = {"from_stride": from_outputs.stride(0), "from_step": from_outputs.stride(1)}
        call_in_pieces(
            "dpoptim_lstm_backward",
            Run(inputs=x.shape[2], reverse=ctx.reverse, **strides),
            {
                "to_states": laid_in_panels(w_hh.T),
                "to_inputs": None if dx is None else laid_in_panels(w_ih.T),
            },
            {"gates": gates, "cells": cells, "from_outputs": from_outputs}
            | {"dh": dh, "dc": dc, "deltas": deltas, "dx": dx},
        )
        enter(ctx.use, ctx.forward_task, (x,), deltas)
        return None, None, dx, dh, dc, *[None] * (4 + ctx.edges)


class CompiledGRU(torch.autograd.Function):
    """All steps of a GRU layer in one direction.

    Inputs as of `CompiledLSTM`, but for the use of what comes from the input and that of what comes
    from the state, which have gradients of their own; no cells; and each one's bias or None.
    Output: h of all steps (B, T, H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        uses: tuple[Use, Use],
        keep: Callable[[Tensor], None],
        x: Tensor,
        h: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
        reverse: bool,
        *parameters: Tensor,
    ) -> Tensor:
        (B, T, d), H = x.shape, h.shape[1]
        x = with_dense_rows(x)
        outputs, gates = room_for_states(x, h, reverse), x.new_empty(B, T, 4 * H)
        weights = {
            "weights": laid_in_panels(torch.cat([w_ih[: 2 * H], w_hh[: 2 * H]], 1)),
            "third_of_x": laid_in_panels(w_ih[2 * H :]),
            "third_of_h": laid_in_panels(w_hh[2 * H :]),
            "bias": None if b_ih is None or b_hh is None else (b_ih + b_hh)[: 2 * H],
            "bias_of_x": None if b_ih is None else b_ih[2 * H :],
            "bias_of_h": None if b_hh is None else b_hh[2 * H :],
        }
        call_in_pieces(
            "dpoptim_gru_forward",
            Run(inputs=d, reverse=reverse, x_stride=x.stride(0), x_step=x.stride(1)),
            weights,
            {"x": x, "gates": gates, "outputs": outputs},
        )
        ctx.uses, ctx.reverse, ctx.edges = uses, reverse, len(parameters)
        ctx.forward_task = graph_task()
        before, after = before_and_after(outputs, reverse)
        ctx.save_for_backward(x, gates, outputs, w_ih, w_hh)
        keep(before)
        return after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, from_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, gates, outputs, w_ih, w_hh = ctx.saved_tensors
        from_outputs = with_dense_rows(from_outputs)
        dh = x.new_zeros(len(x), w_hh.shape[1])
        deltas = x.new_empty(*x.shape[:2], w_hh.shape[0])
        deltas_of_h = torch.empty_like(deltas)
        dx = x.new_empty(x.shape) if ctx.needs_input_grad[2] else None
        strides = {"from_stride": from_outputs.stride(0), "from_step": from_outputs.stride(1)}
        call_in_pieces(
            "dpoptim_gru_backward",
            Run(inputs=x.shape[2], reverse=ctx.reverse, **strides),
            {
                "to_states": laid_in_panels(w_hh.T),
                "to_inputs": None if dx is None else laid_in_panels(w_ih.T),
            },
            {"gates": gates, "outputs": outputs, "from_outputs": from_outputs, "dh": dh}
            | {"deltas": deltas, "deltas_of_h": deltas_of_h, "dx": dx},
        )
        of_input, of_state = ctx.uses
        enter(of_input, ctx.forward_task, (x,), deltas)
        enter(of_state, ctx.forward_task, (), deltas_of_h)
        return None, None, dx, dh, *[None] * (5 + ctx.edges)


def room_for_states(x: Tensor, start: Tensor, reverse: bool) -> Tensor:
    """Room for states (B, T + 1, H): before the first step of ``x`` (B, T, d), and after each."""
    room = x.new_empty(x.shape[0], x.shape[1] + 1, start.shape[1])
    room[:, -1 if reverse else 0].copy_(start)
    return room


def before_and_after(states: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    """Views of the states (B, T + 1, H) before each step and after it."""
    return (states[:, 1:], states[:, :-1]) if reverse else (states[:, :-1], states[:, 1:])


def laid_in_panels(w: Tensor) -> Tensor:
    """Weights (n, k) as `recurrent.c` reads them, (panels, k, 32), filled up with zeros."""
    missing = -len(w) % PANEL
    filled = F.pad(w, (0, 0, 0, missing)) if missing else w
    return filled.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()


def call_in_pieces(
    function: str,
    run: Run,
    shared: Mapping[str, Tensor | None],
    apart: Mapping[str, Tensor | None],
) -> None:
    """Call a function for a few records at once on each thread.

    Args:
        run: with what is alike for all.
        shared: weights. apart: of each record, (B, ...); "gates" (B, T, 4H) among them.
    """
    found, gates = native.loaded(), apart["gates"]
    assert gates is not None
    records, run.steps, of_gates = gates.shape
    run.states, run.level = of_gates // 4, found.level
    held = [None if tensor is None else tensor.contiguous() for tensor in shared.values()]
    for name, tensor in zip(shared, held, strict=True):
        setattr(run, name, None if tensor is None else tensor.data_ptr())
    call = getattr(found.functions, function)
    each = -(-records // (torch.get_num_threads() * TOGETHER)) * TOGETHER
    calls: list[Callable[[], None]] = []
    for start in range(0, records, max(1, each)):
        piece = Run.from_buffer_copy(run)
        piece.records = min(each, records - start)
        for name, tensor in apart.items():
            setattr(piece, name, None if tensor is None else tensor[start:].data_ptr())
        calls.append(partial(call, ctypes.byref(piece)))
    if len(calls) <= 1:
        for call in calls:
            call()
        return
    with worker_threads(len(calls)) as on_threads:
        on_threads(calls)
