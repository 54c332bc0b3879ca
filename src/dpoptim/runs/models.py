"""The small models of the command line; any other module goes through `dpoptim.attach`."""

import math

import torch
from torch import nn

MODELS = ("softmax", "mlp", "cnn")


def build_model(name: str, shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A model for records of ``shape`` (C, H, W for ``"cnn"``), one output a class, or a number.

    Records of shape (features,) may come several to a person, in an axis before the last.
    Initialised from torch's global generator. Raises ValueError for an unknown name or a shape
    without an image in it.
    """
    features = math.prod(shape)
    flat = [nn.Flatten()] if len(shape) > 1 else []
    if name == "softmax":
        linear = nn.Linear(features, outputs)
        # convex: any start will do, and zero spends nothing on undoing a random one
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
        return nn.Sequential(*flat, linear)
    if name == "mlp":
        return nn.Sequential(*flat, nn.Linear(features, 128), nn.Tanh(), nn.Linear(128, outputs))
    if name == "cnn":
        if len(shape) != 3 or min(shape[1:]) < 4:
            raise ValueError(
                "model 'cnn' takes images (channels, height, width) of at least 4 x 4, got records "
                f"of shape {shape}; use --model mlp or softmax."
            )
        return small_cnn(shape, outputs)
    raise ValueError(f"model must be one of {', '.join(MODELS)}, got {name!r}.")


def small_cnn(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Two convolutions of stride 2, normalised record by record, with bounded activations.

    tanh suits clipped gradients (Papernot et al. 2021), and group normalisation evens out their
    norms.
    """
    trunk = nn.Sequential(
        nn.Conv2d(shape[0], 16, 5, stride=2, padding=2),
        nn.GroupNorm(4, 16),
        nn.Tanh(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.GroupNorm(4, 32),
        nn.Tanh(),
        nn.Flatten(),
    )
    with torch.no_grad():
        features = trunk(torch.zeros(1, *shape)).shape[1]
    return nn.Sequential(*trunk, nn.Linear(features, 32), nn.Tanh(), nn.Linear(32, outputs))
