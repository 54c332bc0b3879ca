"""Replace layers that mix the records of a batch."""

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from dpoptim.arguments import whole_number
from dpoptim.errors import PrivacyError

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
TENSORS = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
BATCH_NORM = nn.modules.batchnorm._BatchNorm


SINGLE = (
    ", which makes zero of a record's only value: put nn.Identity there, unless it gets several of "
    "each record"
)


@dataclass(frozen=True)
class Replaced:
    """Result of `replace_batchnorm`.

    Attributes:
        model: the model, changed in place (or the new layer, if the model was a batch norm itself).
        layers: name -> what normalises there now, for each layer that was replaced.
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
            + (SINGLE if layer.num_channels == 1 else "")
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

    A batch normalisation that goes on through layers of its own, as timm's ``BatchNormAct2d``
    through its activation, becomes an ``nn.Sequential`` of the new ``norm`` and these layers.

    Args:
        model: changed in place.
        max_groups: at most so many groups (1 or more); the largest number that divides the
            channels is taken that leaves at least two channels to a group, since a single value
            without positions would be normalised to zero.

    Returns:
        the model and the names of what was replaced; print it to read the list.

    Raises:
        ValueError: max_groups below 1.
        PrivacyError: a batch normalisation that computes something else besides, or a lazy one
            that has not seen data yet, by name; nothing is changed then.

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
    follow = {layer: what_follows(name, layer) for name, layer in found}
    # a layer that stands in several places stays one layer
    norms = {layer: group_norm(layer, max_groups) for layer in follow}
    new: dict[nn.Module, nn.Module] = {
        layer: with_layers(norms[layer], layers) for layer, layers in follow.items()
    }
    for name, layer in found:
        parent, _, key = name.rpartition(".")
        if name:
            setattr(model.get_submodule(parent), key, new[layer])
    places = {f"{name}.norm".lstrip(".") if follow[m] else name: norms[m] for name, m in found}
    return Replaced(new.get(model, model), places)


def with_layers(norm: nn.GroupNorm, layers: dict[str, nn.Module]) -> nn.Module:
    return nn.Sequential(OrderedDict(norm=norm, **layers)) if layers else norm


def what_follows(name: str, layer: Any) -> dict[str, nn.Module]:
    """Layers inside a batch normalisation that its forward pass goes on through, by their names.

    Raises:
        PrivacyError: it does something else.
    """
    if any(isinstance(p, nn.UninitializedParameter) for p in layer.parameters()):
        raise own_kind(name, layer, "run the model once, so that it gets its size.")
    kind = next((kind for kind in KINDS if isinstance(layer, kind)), None)
    layers = dict(layer.named_children())
    if kind is not None and type(layer).forward is kind.forward and not layers:
        return {}
    if kind is None or "norm" in layers or not goes_on_through_its_layers(layer):
        raise own_kind(
            name,
            layer,
            "replace it by hand, e.g. by nn.GroupNorm and what else its forward pass does.",
        )
    return layers


def own_kind(name: str, layer: nn.Module, fix: str) -> PrivacyError:
    return PrivacyError(
        f"layer {name!r} ({type(layer).__name__}) is a batch normalisation of its own kind. "
        f"Fix: {fix}"
    )


@torch.no_grad()
def goes_on_through_its_layers(layer: Any) -> bool:
    """Whether a batch normalisation's output is that of PyTorch's, sent through those inside it.

    Tried with statistics, weights and biases that tell what is done before from what is done after,
    in evaluation and in training. One with parameters or buffers of its own would lose them.
    """
    if {*layer._parameters, *layer._buffers} - TENSORS:
        return False
    # PyTorch's synchronised one has no training without a GPU
    modes = (False,) if isinstance(layer, nn.SyncBatchNorm) else (False, True)
    return all(is_norm_and_layers(layer, training=mode) for mode in modes)


def is_norm_and_layers(layer: Any, *, training: bool) -> bool:
    tried = copy.deepcopy(layer).cpu().double().eval()
    tried.training = training  # those inside, such as dropout, do not draw
    values = torch.linspace(-0.7, 1.1, tried.num_features, dtype=torch.float64)
    for tensor, made in (
        (tried.running_mean, values),
        (tried.running_var, values.square() + 0.5),
        (tried.weight, values - 0.3),
        (tried.bias, 0.4 - values),
    ):
        if tensor is not None:
            tensor.copy_(made)
    axes = next((n for n, kind in enumerate(KINDS[:3]) if isinstance(layer, kind)), 1)
    x = torch.linspace(-3, 3, 2 * len(values) * 4 ** (axes + 1), dtype=torch.float64)
    x = x.sin().reshape(2, len(values), *[4] * (axes + 1))
    own_statistics = training or tried.running_mean is None
    expected = nn.functional.batch_norm(
        x,
        None if own_statistics else tried.running_mean,
        None if own_statistics else tried.running_var,
        tried.weight,
        tried.bias,
        training=own_statistics,
        eps=tried.eps,
    )
    try:
        for following in tried.children():
            expected = following(expected)
        return torch.allclose(tried(x), expected)
    except Exception:  # whatever somebody's own forward pass raises on this input
        return False


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
