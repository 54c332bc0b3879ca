"""nn.LSTM, nn.GRU and nn.RNN, step by step with detached weights; hooks see all steps at once.

Every weight of a recurrent layer is a linear map that is used in each step. Its per-record
gradient is the sum over steps of (gradient of the map's output) x (its input), so it needs one tap
on the outputs of all steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from dpoptim.errors import PrivacyError, axes_of
from dpoptim.gradients.arithmetic.multiplication import linear_of_constants
from dpoptim.gradients.arithmetic.position_sums import sum_positions
from dpoptim.gradients.backward_pass import BackwardRecorder, full_precision
from dpoptim.gradients.layers.lstm import LSTMRun, shifted
from dpoptim.gradients.layers.recurrent_steps import CompiledGRU, CompiledLSTM, serves
from dpoptim.gradients.layers.runner import Use, holder, tap
from dpoptim.gradients.per_sample.per_sample_grads import Dense, PerSampleGrad
from dpoptim.gradients.per_sample.sequence_outer import SequenceOuter

States = tuple[Tensor, Tensor | None]
# from a place in the sequence and the states before it to those after it
Step = Callable[[int, Tensor, Tensor | None], States]
KINDS = (nn.LSTM, nn.GRU, nn.RNN)


def is_recurrent(module: nn.Module) -> bool:
    return is_as_in_torch(module, KINDS)


def is_as_in_torch(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether the module is one of torch's, with its forward pass and parameters alone."""
    kind = next((kind for kind in kinds if isinstance(module, kind)), None)
    return kind is not None and type(module).forward is kind.forward and not list(module.children())


class Direction:
    """One layer in one direction: its weights, and how it runs over a sequence."""

    def __init__(
        self, recorder: BackwardRecorder, module: nn.RNNBase, label: str, suffix: str
    ) -> None:
        self.recorder, self.module, self.label, self.suffix = recorder, module, label, suffix
        self.reverse = suffix.endswith("_reverse")
        self.names = {
            key: name
            for key in ("w_ih", "w_hh", "b_ih", "b_hh", "w_hr")
            if (name := self._name(key)) in module._parameters
        }
        # An LSTM or RNN adds what comes from the input and from its state: one gradient serves
        # both.
        together = ("w_ih", "b_ih", "w_hh", "b_hh")
        self.gates_of_input = together[:2] if isinstance(module, nn.GRU) else together
        self.gates_of_hidden = together[2:]
        self.held: dict[tuple[str, ...], nn.Module] = {
            keys: self._holder(keys)
            for keys in (self.gates_of_input, self.gates_of_hidden, ("w_hr",))
        }

    def _name(self, key: str) -> str:
        kind = {"w": "weight", "b": "bias"}[key[0]]
        return f"{kind}_{key[2:]}_{self.suffix}"

    def _holder(self, keys: tuple[str, ...]) -> nn.Module:
        return holder(
            {key: self.module._parameters[self.names[key]] for key in keys if key in self.names}
        )

    def run(
        self, x: Tensor, h: Tensor, c: Tensor | None, valid: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run over ``x`` (B, T, d) from the states (B, ...); ``valid`` (B, T): steps that exist.

        Returns:
            outputs (B, T, p), and the states after the last step.
        """
        module = self.module
        # Detached: their gradients are the hooks' affair.
        weights = {
            key: p.detach()
            for key, name in self.names.items()
            if (p := module._parameters[name]) is not None
        }
        steps = Steps(h.detach(), self.reverse)
        whole = valid is None and "w_hr" not in weights
        if whole and isinstance(module, nn.GRU) and serves(x, h, *weights.values()):
            output = self._whole_gru(x, h, weights, steps)
        elif whole and c is not None:
            output, c = self._whole_lstm(x, h, c, weights, steps)
        else:
            return self._step_by_step(x, h, c, valid, weights, steps)
        output = output.clone()  # the caller may change it in place
        return output, output[:, 0 if self.reverse else -1], c

    def _whole_gru(
        self, x: Tensor, h: Tensor, weights: Mapping[str, Tensor], steps: "Steps"
    ) -> Tensor:
        """Outputs of all steps at once, by compiled functions."""
        uses = tuple(self._use(k, steps) for k in (self.gates_of_input, self.gates_of_hidden))
        given = (x, h, *(weights.get(key) for key in ("w_ih", "w_hh", "b_ih", "b_hh")))
        edges = [p for use in uses for p in use.held.parameters()]
        output: Tensor = CompiledGRU.apply(uses, steps.keep, *given, self.reverse, *edges)
        return output

    def _whole_lstm(
        self, x: Tensor, h: Tensor, c: Tensor, weights: Mapping[str, Tensor], steps: "Steps"
    ) -> tuple[Tensor, Tensor]:
        """Outputs of all steps and the last cells, by compiled functions where they serve."""
        use = self._use(self.gates_of_input, steps)
        given = (x, h, c, weights["w_ih"], weights["w_hh"], self._bias(weights))
        rest = (*given, self.reverse, *use.held.parameters())
        if serves(*given):
            output, c = CompiledLSTM.apply(use, steps.keep, *rest)
        else:
            output, c = LSTMRun.apply(use, *rest)
            steps.outputs = output.detach()
        return output, c

    def _bias(self, weights: Mapping[str, Tensor]) -> Tensor | None:
        """The bias of the gates, added to their products with the inputs."""
        bias = weights.get("b_ih")
        if bias is not None and "b_hh" in self.gates_of_input:
            bias = bias + weights["b_hh"]
        return bias

    def _step_by_step(
        self,
        x: Tensor,
        h: Tensor,
        c: Tensor | None,
        valid: Tensor | None,
        weights: Mapping[str, Tensor],
        steps: "Steps",
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        use = self._use(self.gates_of_input, steps)
        z = tap(use, linear_of_constants(x, weights["w_ih"], self._bias(weights)), x)
        step = self._step(z, weights, steps)
        outputs: list[Tensor] = []
        for t in reversed(range(x.shape[1])) if self.reverse else range(x.shape[1]):
            before = h, c
            h, c = step(t, h, c)
            if valid is not None:
                h, c = states_where(valid[:, t, None], (h, c), before)
            outputs.append(h)
        output = torch.stack(outputs[::-1] if self.reverse else outputs, 1)
        steps.outputs = output.detach()
        return output.clone(), h, c  # the caller may change it in place

    def _step(self, z: Tensor, weights: Mapping[str, Tensor], steps: "Steps") -> Step:
        """States after one step.

        Args:
            z: what comes from the inputs, (B, T, gates).
            weights: detached, by their short names.
        """
        module, gates, w_hh = self.module, z.unbind(1), weights["w_hh"].T
        B, T = z.shape[:2]
        if isinstance(module, nn.GRU):
            bias = weights.get("b_hh", z.new_zeros(3 * module.hidden_size))
            hidden = tap(self._use(self.gates_of_hidden, steps), bias.expand(B, T, -1)).unbind(1)
            return lambda t, h, c: (gru_step(gates[t], torch.addmm(hidden[t], h, w_hh), h), None)
        if isinstance(module, nn.RNN):
            bend = torch.relu if module.mode == "RNN_RELU" else torch.tanh
            return lambda t, h, c: (bend(torch.addmm(gates[t], h, w_hh)), None)
        if "w_hr" not in weights:
            return lambda t, h, c: lstm_step(torch.addmm(gates[t], h, w_hh), c)
        zeros = z.new_zeros(()).expand(B, T, module.proj_size)
        projected = tap(self._use(("w_hr",), steps), zeros).unbind(1)

        def projecting(t: int, h: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor | None]:
            inner, c = lstm_step(torch.addmm(gates[t], h, w_hh), c)
            steps.cells.append(inner.detach())
            return torch.addmm(projected[t], inner, weights["w_hr"].T), c

        return projecting

    def _use(self, keys: tuple[str, ...], steps: "Steps") -> Use:
        def per_sample_grads(saved: tuple[Tensor, ...], g: Tensor) -> Mapping[str, PerSampleGrad]:
            keys_here = set(keys) & self.names.keys()
            found: dict[str, PerSampleGrad] = {}
            for key in keys_here & {"w_ih", "w_hh", "w_hr"}:
                inputs = {
                    "w_ih": lambda: saved[0],
                    "w_hh": steps.previous,
                    "w_hr": steps.inner,
                }[key]()
                found[key] = SequenceOuter(g, inputs)
            if keys_here - found.keys():
                found |= dict.fromkeys(keys_here - found.keys(), Dense(sum_positions(g)))
            return found

        return Use(self.recorder, self.label, self.held[keys], per_sample_grads)


class Steps:
    """Inputs of a recurrence's weights, known when the forward pass is over."""

    def __init__(self, start: Tensor, reverse: bool) -> None:
        self.start, self.reverse = start, reverse
        self.cells: list[Tensor] = []
        self.outputs: Tensor | None = None
        self._before: Tensor | None = None

    def keep(self, before: Tensor) -> None:
        """Take the state before each step, (B, T, p), where the forward pass has it."""
        self._before = before

    def previous(self) -> Tensor:
        """The state before each step, shape (B, T, p)."""
        if self._before is not None:
            return self._before
        assert self.outputs is not None
        return shifted(self.outputs, self.start, self.reverse)

    def inner(self) -> Tensor:
        """Each state before its projection (LSTM with proj_size), shape (B, T, hidden)."""
        return torch.stack(self.cells[::-1] if self.reverse else self.cells, 1)


def states_where(mask: Tensor, after: States, before: States) -> States:
    """The states after a step where it exists, those before it elsewhere."""
    (h, c), (h_before, c_before) = after, before
    cells = None if c is None or c_before is None else torch.where(mask, c, c_before)
    return torch.where(mask, h, h_before), cells


def lstm_step(gates: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor]:
    assert c is not None
    i, f, g, o = gates.chunk(4, 1)
    c = torch.addcmul(f.sigmoid() * c, i.sigmoid(), g.tanh())
    return o.sigmoid() * c.tanh(), c


def gru_step(from_input: Tensor, from_hidden: Tensor, h: Tensor) -> Tensor:
    H = h.shape[1]
    r, z = (from_input[:, : 2 * H] + from_hidden[:, : 2 * H]).sigmoid().chunk(2, 1)
    n = torch.addcmul(from_input[:, 2 * H :], r, from_hidden[:, 2 * H :]).tanh()
    return torch.lerp(n, h, z)


@dataclass(frozen=True)
class Sequence:
    """A recurrent layer's input, records first, padded to one length; and the way back."""

    x: Tensor  # (B, T, d)
    valid: Tensor | None  # (B, T); None: every step of every record exists
    packed: PackedSequence | None
    batch_first: bool

    def restore(self, output: Tensor) -> Tensor | PackedSequence:
        if self.packed is None:
            return output if self.batch_first else output.transpose(0, 1)
        assert self.valid is not None
        order, lengths = self.packed.sorted_indices, self.valid.sum(1)
        if order is not None:
            output, lengths = output[order], lengths[order]
        data = pack_padded_sequence(output, lengths.cpu(), batch_first=True).data
        return PackedSequence(data, self.packed.batch_sizes, order, self.packed.unsorted_indices)


def padded_sequence(x: Any, batch_first: bool, label: str) -> Sequence:
    if isinstance(x, PackedSequence):
        padded, lengths = pad_packed_sequence(x, batch_first=True)
        steps = torch.arange(padded.shape[1], device=padded.device)
        return Sequence(padded, steps < lengths.to(padded.device)[:, None], x, batch_first)
    if x.dim() != 3:
        raise PrivacyError(
            f"layer {label!r} got an input of {axes_of(x)}; recurrent layers need three axes. Fix: "
            "keep the batch axis, e.g. x[None] for a single record."
        )
    return Sequence(x if batch_first else x.transpose(0, 1), None, None, batch_first)


class RecurrentLayer:
    """Runs torch's recurrent layers: packed sequences, projections, directions, dropout too."""

    hooks_children = False

    def __init__(self, recorder: BackwardRecorder, module: nn.RNNBase, label: str) -> None:
        self.recorder, self.module, self.label = recorder, module, label
        ways = ("", "_reverse") if module.bidirectional else ("",)
        self.layers = [
            [Direction(recorder, module, label, f"l{layer}{way}") for way in ways]
            for layer in range(module.num_layers)
        ]

    def __call__(self, rows: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module, given = self.module, dict(zip(("input", "hx"), args, strict=False)) | kwargs
        taken = padded_sequence(given["input"], module.batch_first, self.label)
        with full_precision(self.recorder, self.label, taken.x.device) as widen:
            x = taken.x.float() if widen else taken.x
            starts, cells = self._states(x, given.get("hx"))
            x, last, last_cells = self._run(x, starts, cells, taken.valid)
        h_n = torch.stack(last)
        states = (
            h_n if cells is None else (h_n, torch.stack([c for c in last_cells if c is not None]))
        )
        return taken.restore(x), states

    def _run(
        self, x: Tensor, starts: Tensor, cells: Tensor | None, valid: Tensor | None
    ) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
        """All layers: outputs of the last one (B, T, p), and the last states of all."""
        module = self.module
        last: list[Tensor] = []
        last_cells: list[Tensor | None] = []
        place = 0
        for number, directions in enumerate(self.layers):
            outputs = []
            for direction in directions:
                output, h, c = direction.run(
                    x, starts[place], None if cells is None else cells[place], valid
                )
                outputs.append(output)
                last.append(h)
                last_cells.append(c)
                place += 1
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
            if number + 1 < len(self.layers):
                x = F.dropout(x, module.dropout, module.training)
        return x, last, last_cells

    def _states(self, x: Tensor, given: Any) -> tuple[Tensor, Tensor | None]:
        """The states to start from: each of shape (layers x directions, B, size)."""
        module = self.module
        count, records = sum(map(len, self.layers)), x.shape[0]
        shape = (count, records, module.proj_size or module.hidden_size)
        lstm = isinstance(module, nn.LSTM)
        if given is None:
            return x.new_zeros(shape), x.new_zeros(
                count, records, module.hidden_size
            ) if lstm else None
        h, c = given if lstm else (given, None)
        h, c = h.to(x.dtype), None if c is None else c.to(x.dtype)
        if tuple(h.shape) != shape:
            raise PrivacyError(
                f"layer {self.label!r} got an initial state that is not (layers, records, units). "
                "Fix: give each record a row of its own on the second axis."
            )
        return h, c
