"""The small models that the command line trains. Any other module goes through `dpoptim.attach`."""

import math

import torch
from torch import nn

MODELS = ("softmax", "mlp", "cnn")


def build_model(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """A classifier for records of ``shape`` (channels, height, width for ``"cnn"``).

    Initialised from torch's global generator. Raises ValueError for an unknown name or a shape without an image in it.
    """
    features = math.prod(shape)
    if name == "softmax":
        linear = nn.Linear(features, classes)
        nn.init.zeros_(linear.weight)  # convex: any start will do, and zero spends nothing on undoing a random one
        nn.init.zeros_(linear.bias)
        return nn.Sequential(nn.Flatten(), linear)
    if name == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(features, 128), nn.Tanh(), nn.Linear(128, classes))
    if name == "cnn":
        if len(shape) != 3 or min(shape[1:]) < 4:
            raise ValueError(
                f"model 'cnn' takes images (channels, height, width) of at least 4 x 4, got records of shape {shape}; "
                "use --model mlp or softmax."
            )
        return small_cnn(shape, classes)
    raise ValueError(f"model must be one of {', '.join(MODELS)}, got {name!r}.")


def small_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two convolutions of stride 2, normalised record by record, with bounded activations.

    tanh suits clipped gradients (Papernot et al. 2021), and group normalisation evens out their norms.
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
    return nn.Sequential(*trunk, nn.Linear(features, 32), nn.Tanh(), nn.Linear(32, classes))
