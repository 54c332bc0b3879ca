"""Replace layers that mix the records of a batch."""

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from dpoptim.arguments import whole_number
from dpoptim.errors import PrivacyError

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
BATCH_NORM = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True)
class Replaced:
    """Result of `replace_batchnorm`.

    Attributes:
        model: the model, changed in place (or the new layer, if the model was a batch norm itself).
        layers: name -> what stands there now, for each layer that was replaced.
    """

    model: nn.Module
    layers: dict[str, nn.GroupNorm]

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"Replaced has no attribute {name!r}: it is not the model. Fix: model = "
            "dpoptim.replace_batchnorm(model).model; a model that holds the layers has changed in "
            "place, too."
        )

    def __str__(self) -> str:
        if not self.layers:
            return "no batch normalisation found; nothing was replaced"
        lines = [
            f"{name or 'the model itself'}: now GroupNorm({layer.num_groups} groups of "
            f"{layer.num_channels // layer.num_groups} channels)"
            for name, layer in self.layers.items()
        ]
        return "\n".join(
            [f"{len(lines)} batch normalisation layers replaced; weights and biases kept:", *lines]
        )


def replace_batchnorm(model: nn.Module, max_groups: int = 32) -> Replaced:
    """Replace batch normalisations by group normalisations of the same weight and bias.

    Batch normalisation computes each record's output from the others, and keeps running statistics
    of all: neither can be clipped. Group normalisation looks at one record only. It computes
    something else, so train on, or start afresh; running statistics are dropped. Do it before
    making the optimizer (weight and bias stay the same ``nn.Parameter``).

    Args:
        model: changed in place.
        max_groups: at most so many groups (1 or more); the largest number that divides the
            channels is taken that leaves at least two channels to a group, since a single value
            without positions would be normalised to zero.

    Returns:
        the model and the names of what was replaced; print it to read the list.

    Raises:
        ValueError: max_groups below 1.
        PrivacyError: a batch normalisation of another kind, or a lazy one that has not seen data
            yet, by name; nothing is changed then.

    Examples:
        >>> from torch import nn
        >>> import dpoptim
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> type(dpoptim.replace_batchnorm(model).model[1]).__name__
        'GroupNorm'
    """
    max_groups = whole_number("max_groups", max_groups, least=1)
    found = [
        (name, m)
        for name, m in model.named_modules(remove_duplicate=False)
        if isinstance(m, BATCH_NORM)
    ]
    for name, layer in found:
        refuse_other_kinds(name, layer)
    # a layer that stands in several places stays one layer
    new: dict[nn.Module, nn.GroupNorm] = {}
    for name, layer in found:
        if layer not in new:
            new[layer] = group_norm(layer, max_groups)
        parent, _, key = name.rpartition(".")
        if name:
            setattr(model.get_submodule(parent), key, new[layer])
    return Replaced(new.get(model, model), {name: new[layer] for name, layer in found})


def refuse_other_kinds(name: str, layer: Any) -> None:
    lazy = any(isinstance(p, nn.UninitializedParameter) for p in layer.parameters())
    kind = next((kind for kind in KINDS if isinstance(layer, kind)), None)
    if (
        lazy
        or kind is None
        or type(layer).forward is not kind.forward
        or any(True for _ in layer.children())
    ):
        raise PrivacyError(
            f"layer {name!r} ({type(layer).__name__}) is a batch normalisation of its own kind. "
            "Fix: "
            + (
                "run the model once, so that it gets its size."
                if lazy
                else "replace it by hand, e.g. by nn.GroupNorm."
            )
        )


def group_norm(layer: Any, max_groups: int) -> nn.GroupNorm:
    channels = layer.num_features
    groups = max(
        g for g in range(1, min(max_groups, max(channels // 2, 1)) + 1) if channels % g == 0
    )
    with torch.device("meta"):
        new = nn.GroupNorm(groups, channels, layer.eps, layer.affine)
    if layer.affine:
        new.weight, new.bias = layer.weight, layer.bias
    return new.train(layer.training)
