"""The small models of the command line; any other module goes through `dpoptim.attach`."""

import math

import torch
from torch import nn

MODELS = ("softmax", "mlp", "cnn")
GREY_PLANES = 81  # of scattering, of an image of one channel
MOST_COLOURS = 4  # channels of an image; more are planes of features


def build_model(name: str, shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A model for records of ``shape`` (C, H, W for ``"cnn"``), one output a class, or a number.

    More than `MOST_COLOURS` channels are planes of features, as of scattering. Records of shape
    (features,) may come several to a person, in an axis before the last. Initialised from torch's
    global generator. Raises ValueError for an unknown name or a shape without an image in it.
    """
    features = math.prod(shape)
    flat = [nn.Flatten()] if len(shape) > 1 else []
    if name == "softmax":
        return nn.Sequential(*flat, linear(features, outputs))
    if name == "mlp":
        return nn.Sequential(*flat, nn.Linear(features, 128), nn.Tanh(), nn.Linear(128, outputs))
    if name == "cnn":
        if len(shape) != 3 or (shape[0] <= MOST_COLOURS and min(shape[1:]) < 4):
            raise ValueError(
                "model 'cnn' takes images (channels, height, width) of at least 4 x 4, got records "
                f"of shape {shape}; use --model mlp or softmax."
            )
        return small_cnn(shape, outputs)
    raise ValueError(f"model must be one of {', '.join(MODELS)}, got {name!r}.")


def linear(features: int, outputs: int) -> nn.Linear:
    """A last layer that starts at zero, so that nothing is spent on undoing a random start."""
    layer = nn.Linear(features, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def small_cnn(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Convolutions normalised record by record, and a linear classifier.

    Noise on a weight is as large whatever the weight is for, so there are few of them. Group
    normalisation evens out the norms of gradients, and ReLU then does better than bounded
    activations.
    """
    trunk = nn.Sequential(*convolutions(shape[0]), nn.Flatten())
    with torch.no_grad():
        features = trunk(torch.zeros(1, *shape)).shape[1]
    return nn.Sequential(*trunk, linear(features, outputs))


def convolutions(channels: int) -> list[nn.Module]:
    """Two of stride 2 for pixels; for planes of features, a mix of planes at each place."""
    if channels > MOST_COLOURS:
        mixes = 32 if channels <= GREY_PLANES else 64
        return [nn.Conv2d(channels, mixes, 1), nn.GroupNorm(4, mixes), nn.ReLU()]
    return [
        nn.Conv2d(channels, 16, 5, stride=2, padding=2),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
    ]
