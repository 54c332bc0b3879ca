"""Before training, run the model on random inputs of a record's shape and see whether records see each other."""

from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from dpoptim.errors import PrivacyError, SamplesInteractError
from dpoptim.gradients.hook_manager import watch_batch_statistics
from dpoptim.gradients.layers.hugging_face import is_transposed_linear
from dpoptim.plan import Basis
from dpoptim.training.check import Comparison, odd_batch_size, quiet

PASSED = Basis("trusted", "the model treats records independently (it did on random inputs, against batches of one)")


def probe_model(model: nn.Module, train_set: Dataset[Any]) -> Basis:
    """Compare the model's per-record gradients on random inputs with micro-batches of one.

    **Guarantee.** Only the shapes and dtypes of record 0 are used, never its values.

    Returns:
        what to add to the list of what the guarantee rests on: taken on trust, since a test on some inputs is no proof;
        it says whether the test passed or why it could not be made (the input is not the record's first tensor).

    Raises:
        SamplesInteractError: the model mixes records.
        PrivacyError: a layer cannot be clipped record by record.
    """
    record = train_set[0]
    x = record[0] if isinstance(record, tuple | list) and len(record) else record
    if not isinstance(x, Tensor):
        return not_probed(f"records start with {type(x).__name__}, not with a tensor")
    watch_batch_statistics(model)
    rows = odd_batch_size(model, [x[None]])
    inputs = random_like(x, rows).to(next(model.parameters()).device)
    try:
        with torch.no_grad():
            outputs = tensors_of(model, inputs)
    except PrivacyError:
        raise
    except Exception as error:  # whatever the user's model raises on made-up input
        return not_probed(f"model(x) raised {type(error).__name__} on random input")
    if not outputs or any(out.dim() == 0 or out.shape[0] != rows for out in outputs):
        return not_probed("its outputs do not have the batch axis first")
    with quiet(model, lambda: tensors_of(model, inputs)):
        refuse_visible_neighbours(model, inputs)
        weights = [torch.randn_like(out) for out in outputs]

        def loss(model: nn.Module, batch: tuple[Tensor, list[Tensor]]) -> Tensor:
            terms = [(out * w).sum() for out, w in zip(tensors_of(model, batch[0]), batch[1], strict=True)]
            return torch.stack([term.to(inputs.device) for term in terms]).sum()

        alone = [(inputs[i : i + 1], [w[i : i + 1] for w in weights]) for i in range(rows)]
        Comparison(model, loss, alone, (inputs, weights), rows).reduction(("sum",))
    return PASSED


@torch.no_grad()
def positions_per_layer(model: nn.Module, train_set: Dataset[Any]) -> dict[str, int]:
    """How many positions a record has in each layer that multiplies by a matrix, by the layer's name; empty if that cannot
    be found out.

    **Guarantee.** Only the shapes and dtypes of record 0 are used, never its values.
    """
    record = train_set[0]
    x = record[0] if isinstance(record, tuple | list) and len(record) else record
    if not isinstance(x, Tensor):
        return {}
    rows, seen = 2, dict[str, int]()
    inputs = random_like(x, rows).to(next(model.parameters()).device)

    def note(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0] if args else None
        if isinstance(x, Tensor) and x.dim() > 1:
            time_first = x.dim() == 3 and not getattr(module, "batch_first", True)  # recurrent layers and attention
            if x.shape[1 if time_first else 0] == rows:
                seen[name] = max(seen.get(name, 1), x.numel() // (rows * x.shape[-1]))
                if isinstance(module, nn.MultiheadAttention):
                    seen[f"{name}.out_proj"] = seen[name]  # which it uses functionally

    hooks = [
        module.register_forward_pre_hook(partial(note, name or type(module).__name__))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.RNNBase | nn.MultiheadAttention) or is_transposed_linear(module)
    ]
    try:
        with quiet(model, lambda: tensors_of(model, inputs)), torch.no_grad():
            model(inputs)
    except Exception:  # whatever the user's model raises on made-up input
        return {}
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def show_the_batch_axis(model: nn.Module, train_set: Dataset[Any]) -> None:
    """Run the attached model on made-up records, of a number unlike every other axis: layers without a rule learn from it
    which of their tensors have the batch first, which a private batch as long as another axis could not tell them.

    **Guarantee.** Only the shapes and dtypes of record 0 are used, never its values.
    """
    record = train_set[0]
    x = record[0] if isinstance(record, tuple | list) and len(record) else record
    if not isinstance(x, Tensor):
        return
    rows = odd_batch_size(model, [x[None]])
    inputs = random_like(x, rows).to(next(model.parameters()).device)
    # Whatever the user's model raises on made-up input, it will tell on the first batch, or there is nothing to tell.
    with suppress(Exception), quiet(model, lambda: tensors_of(model, inputs)):
        model(inputs)


def tensors_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The floating-point tensors in the model's output."""
    leaves = pytree.tree_leaves(model(x))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


@torch.no_grad()
def refuse_visible_neighbours(model: nn.Module, inputs: Tensor) -> None:
    """Replace one record, also by an enormous one: the outputs of all others must stay as they are."""
    before = tensors_of(model, inputs)
    for size in (1.0, 1e6):
        changed = inputs.clone()
        changed[0] = torch.randn_like(inputs[0]) * size if inputs.is_floating_point() else 1 - inputs[0].clamp(0, 1)
        for a, b in zip(before, tensors_of(model, changed), strict=True):
            moved = (a[1:] - b[1:]).abs().max()
            if not float(moved) <= 1e-5 * float(a[1:].abs().max()):
                raise SamplesInteractError(
                    "records see each other in the forward pass: replacing one changed the outputs of others. Usual "
                    "causes: batch statistics, attention or sorting across the batch. Fix: let each record's output "
                    "depend on that record alone."
                )


def not_probed(reason: str) -> Basis:
    return Basis(
        "trusted",
        f"the model treats records independently, and every layer has them on its first axis (not tested on random inputs: "
        f"{reason}; see dpoptim.check)",
    )


def random_like(x: Tensor, rows: int) -> Tensor:
    """Random inputs of a record's shape and dtype; integers are 0 or 1, which every vocabulary has."""
    shape = (rows, *x.shape)
    if x.is_floating_point():
        return torch.randn(shape, dtype=x.dtype)
    return torch.randint(0, 2, shape).to(x.dtype)
