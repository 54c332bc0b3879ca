"""The contract of layer rules: each record's own gradient, moving a clipped sum by C at most."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpoptim.audit.sensitivity import SensitivityResult, audit_sensitivity
from dpoptim.clipping import Clipping
from dpoptim.errors import PrivacyError
from dpoptim.gradients.engine import Reduction
from dpoptim.gradients.layers.custom_rules import registered_rule
from dpoptim.gradients.layers.registry import rule_for
from dpoptim.gradients.oracle import clipped_sums, engine_sums, gradients_alone, squared_norms
from dpoptim.noise.few_rows import FewRows

Batch = Sequence[Tensor]


class Between(nn.Module):
    """A layer whose inputs come from something trainable, so that their gradients count too."""

    def __init__(self, layer: nn.Module, count: int) -> None:
        super().__init__()
        self.layer = layer
        self.gains = nn.ParameterList(torch.ones((), dtype=torch.float64) for _ in range(count))

    def forward(self, *inputs: Tensor) -> Tensor:
        gains = iter(self.gains)
        return self.layer(*(x * next(gains) if x.is_floating_point() else x for x in inputs))


def check_layer_rule(layer: nn.Module, *inputs: Tensor) -> SensitivityResult:
    """Test a layer's rule: against records taken one at a time, and by the attack on the bound.

    Args:
        layer: of a kind that has a rule; a copy in float64 is tested, this one stays as it is.
        inputs: of its call, at least 3 records on the first axis of each, with different values.

    Returns:
        what the attack found: records added and removed, plain, huge, not finite, copied and
            flipped.

    Raises:
        PrivacyError: the rule gives other gradients than the record's own, or one record moved a
            clipped sum by more than C.
        ValueError: the layer has no rule, or there are fewer than 3 records.

    Examples:
        >>> import torch
        >>> from dpoptim.audit import check_layer_rule
        >>> check_layer_rule(torch.nn.Linear(3, 2), torch.randn(8, 3)).largest_ratio <= 1
        True
    """
    refuse_layer(layer, inputs)
    batch = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    count = sum(x.is_floating_point() for x in batch)
    model = Between(copy.deepcopy(layer).double(), count)
    norms = squared_norms(gradients_alone(model, summed, one_at_a_time(batch))).sqrt()
    tight, loose = float(norms.median()) / 2, 2 * float(norms.max())
    for bound in (tight, loose):
        for records in (1, 2, len(batch[0])):
            for reduction in ("mean", "sum"):
                compare(model, tuple(x[:records] for x in batch), Clipping(bound), reduction)
    found = audit_sensitivity(model, batch, summed, tight)
    if found.verdict != "consistent":
        raise PrivacyError(
            f"the rule of {type(layer).__name__} lets a record move the clipped sum too far: "
            f"{found}."
        )
    return found


def refuse_layer(layer: nn.Module, inputs: Batch) -> None:
    """Refuse layers without a rule, and too few records."""
    if registered_rule(layer) is None and rule_for(layer) is None:
        raise ValueError(
            f"{type(layer).__name__} has no rule of its own. Fix: "
            f"dpoptim.register_layer_rule({type(layer).__name__})."
        )
    if not inputs or len({len(x) for x in inputs}) != 1 or len(inputs[0]) < 3:
        raise ValueError(
            "inputs must be tensors of one common number of at least 3 records on their first axis."
        )


def compare(model: Between, batch: Batch, clipping: Clipping, reduction: Reduction) -> None:
    """Raise if the engine's sums are not those of the records taken one at a time."""
    loss = summed if reduction == "sum" else averaged
    truth = gradients_alone(model, loss, one_at_a_time(batch))
    expected = clipped_sums(truth, clipping, len(batch[0]), reduction)
    ours = engine_sums(model, loss, batch, len(batch[0]), clipping, reduction)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    for name, found, b in zip(names, ours, expected, strict=True):
        a = found.dense().view_as(b) if isinstance(found, FewRows) else found
        if not float((a - b).norm()) <= 1e-7 * clipping.norm * len(batch[0]):
            whose = (
                f"parameter {name.removeprefix('layer.')!r}"
                if name.startswith("layer.")
                else "its inputs"
            )
            raise PrivacyError(
                f"the rule of {type(model.layer).__name__} gives {whose} other gradients than "
                "those of the records taken one at a time. Fix: row i of what it returns must be "
                "made of row i of g and of the inputs alone."
            )


def one_at_a_time(batch: Batch) -> list[Batch]:
    return [tuple(x[i : i + 1] for x in batch) for i in range(len(batch[0]))]


def losses(model: nn.Module, batch: Batch) -> Tensor:
    """One smooth number per record, shape (B,)."""
    out = model(*batch).flatten(1)
    weights = torch.linspace(-1, 2, out.shape[1], dtype=out.dtype, device=out.device)
    return (out * weights).sum(1).tanh() + 0.1 * out.square().mean(1)


def summed(model: nn.Module, batch: Batch) -> Tensor:
    return losses(model, batch).sum()


def averaged(model: nn.Module, batch: Batch) -> Tensor:
    return losses(model, batch).mean()
