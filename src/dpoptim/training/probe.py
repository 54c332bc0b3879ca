"""Before training, run the model on random inputs of a record's shape and see whether records see each other."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from dpoptim.errors import PrivacyError
from dpoptim.plan import Basis
from dpoptim.training.check import Comparison, odd_batch_size, quiet

PASSED = Basis("enforced", "the model treats records independently (compared with batches of one on random inputs)")


def probe_model(model: nn.Module, train_set: Dataset[Any]) -> Basis:
    """Compare the model's per-record gradients on random inputs with micro-batches of one.

    Only the shapes and dtypes of record 0 are used, never its values.

    Returns:
        what to add to the list of what the guarantee rests on: enforced, or trusted where the model could not be run
        this way (its input is not the record's first tensor).

    Raises:
        SamplesInteractError: the model mixes records.
        PrivacyError: a layer cannot be clipped record by record.
    """
    record = train_set[0]
    x = record[0] if isinstance(record, tuple | list) and len(record) else record
    if not isinstance(x, Tensor):
        return not_probed(f"records start with {type(x).__name__}, not with a tensor")
    device = next(model.parameters()).device
    with quiet(model):
        rows = odd_batch_size(model, [x[None]])
        inputs = random_like(x, rows).to(device)
        try:
            with torch.no_grad():
                outputs = [out for out in pytree.tree_leaves(model(inputs)) if isinstance(out, Tensor)]
        except PrivacyError:
            raise
        except Exception as error:  # whatever the user's model raises on made-up input
            return not_probed(f"model(x) raised {type(error).__name__} on random input")
        floating = [i for i, out in enumerate(outputs) if out.is_floating_point()]
        if not floating or any(outputs[i].dim() == 0 or outputs[i].shape[0] != rows for i in floating):
            return not_probed("its outputs do not have the batch axis first")
        weights = [torch.randn_like(outputs[i]) for i in floating]

        def loss(model: nn.Module, batch: tuple[Tensor, list[Tensor]]) -> Tensor:
            x, cotangents = batch
            leaves = [out for out in pytree.tree_leaves(model(x)) if isinstance(out, Tensor)]
            terms = [(leaves[i] * w).sum() for i, w in zip(floating, cotangents, strict=True)]
            return torch.stack(terms).sum()

        alone = [(inputs[i : i + 1], [w[i : i + 1] for w in weights]) for i in range(rows)]
        Comparison(model, loss, alone, (inputs, weights), rows).reduction(("sum",))
    return PASSED


def not_probed(reason: str) -> Basis:
    return Basis(
        "trusted",
        f"the model treats records independently (not tested on random inputs: {reason}; see dpoptim.check)",
    )


def random_like(x: Tensor, rows: int) -> Tensor:
    """Random inputs of a record's shape and dtype; integers are 0 or 1, which every vocabulary has."""
    shape = (rows, *x.shape)
    if x.is_floating_point():
        return torch.randn(shape, dtype=x.dtype)
    return torch.randint(0, 2, shape).to(x.dtype)
