"""Facts about a model from made-up records: layers' positions, and where records are."""

from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.gradients.layers.geometry import Convolution
from dpoptim.gradients.layers.linear import is_transposed_linear
from dpoptim.gradients.watch.plain_values import PlainValues
from dpoptim.runtime.freed_memory import freed_memory_given_back
from dpoptim.training.trials.deterministic_runs import quiet, quiet_as_before
from dpoptim.training.trials.made_up_records import Sample


@freed_memory_given_back()
@torch.no_grad()
def positions_per_layer(model: nn.Module, sample: Sample | None) -> dict[str, int]:
    """Positions of a record in each layer with a product, by name; empty if unknown."""
    if sample is None:
        return {}
    sample, rows, seen = sample.records([0, 1]), 2, dict[str, int]()

    def note(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if (found := positions_in(module, args, output, rows)) is not None:
            seen[name] = max(seen.get(name, 1), found)
            if isinstance(module, nn.MultiheadAttention):
                seen[f"{name}.out_proj"] = seen[name]  # which it uses functionally

    hooks = [
        module.register_forward_hook(partial(note, name or type(module).__name__))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.RNNBase | nn.MultiheadAttention | Convolution)
        or is_transposed_linear(module)
    ]
    try:
        with quiet_on(model, sample), torch.no_grad():
            sample.call(model)
    except Exception:  # whatever the user's model raises on made-up input
        return {}
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def positions_in(module: nn.Module, args: tuple[Any, ...], output: Any, rows: int) -> int | None:
    """Positions of each of so many records in one use of a layer; None if it has none of them."""
    if isinstance(module, Convolution):
        found = isinstance(output, Tensor) and output.dim() == len(module.kernel_size) + 2
        return output[0, 0].numel() if found and len(output) == rows else None
    x = args[0] if args else None
    if not isinstance(x, Tensor) or x.dim() < 2:
        return None
    # recurrent layers and attention
    time_first = x.dim() == 3 and not getattr(module, "batch_first", True)
    return x.numel() // (rows * x.shape[-1]) if x.shape[1 if time_first else 0] == rows else None


def show_the_batch_axis(model: nn.Module, sample: Sample | None) -> None:
    """Show vectorised modules which tensors have records, by made-up ones of an odd number.

    Nothing of these stays in the model's plain attributes.
    """
    if sample is not None:
        values = PlainValues(model)
        # Whatever the user's model raises on made-up input, it will tell on the first batch, or
        # there is nothing to tell.
        with suppress(Exception), quiet_on(model, sample):
            sample.call(model)
        values.put(values.before)


def quiet_on(model: nn.Module, sample: Sample) -> AbstractContextManager[object]:
    """Make the model deterministic on a sample: `quiet`, or as that did before."""
    if sample.quieted is not None:
        return quiet_as_before(model, sample.quieted)
    return quiet(model, lambda: sample.outputs(model))
