"""The CNN of `dpoptim train`, chosen on images that are neither trained nor tested on.

    python benchmarks/choose_cnn.py --out benchmarks/results

writes choose_cnn.csv, a line a run of `TRIALS`, as runs end, and goes on where it was interrupted.
Each step has the noise of a whole run on `RECORDS` images at `EPSILON`, relative to the mean
gradient, but a mean over few images, whose own spread is small beside that noise: a simulation
in a tenth of the time, for comparing settings; not what a private run scores. One seed.

Images are Fashion-MNIST (garments lie in the middle) and scikit-learn's digits, enlarged, turned,
sheared and moved at random, as handwriting is.
"""

import argparse
import csv
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from accuracy import TAILS
from accuracy_tasks import Arrays, cross_entropy, percent
from dpoptim.data import FASHION_MNIST_DIRECTORY, load_digits, load_fashion_mnist
from dpoptim.data.preparation import Scatter, SquareRoot
from dpoptim.data.views import moved_images
from dpoptim.methods import DPSGD
from dpoptim.training.attach import attach
from dpoptim.training.tail_average import TailAverage

RECORDS, EPSILON, DELTA = 60_000, 2.93, 1e-5
CHOOSING = 5_000
FROM_SCATTERING = 20_000  # images to train on, where they are scattered
PLANES = {"J=1": Scatter(scales=1, groups=9), "J=2": Scatter()}
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"tanh": nn.Tanh, "ReLU": nn.ReLU}
# Each convolution's channels, size, stride, padding, and pooling after it: kind, size, stride.
Pooling = tuple[type[nn.Module], int, int] | None
Convolution = tuple[int, int, int, int, Pooling]
AVERAGE, LARGEST = nn.AvgPool2d, nn.MaxPool2d
TWO = ((16, 5, 2, 2, None), (32, 3, 2, 1, None))


def of_papernot(pool: type[nn.Module]) -> tuple[Convolution, ...]:
    """As Papernot et al. (2021)."""
    return (16, 8, 2, 3, (pool, 2, 1)), (32, 4, 2, 0, (pool, 2, 1))


# convolutions, groups of GroupNorm (0: none), hidden layer (0: none; the last then starts at zero)
NETWORKS: dict[str, tuple[tuple[Convolution, ...], int, int]] = {
    "two convolutions, hidden layer": (TWO, 4, 32),
    "two convolutions": (TWO, 4, 0),
    "two convolutions, pooled": (
        ((16, 5, 2, 2, (AVERAGE, 2, 2)), (32, 3, 1, 1, (AVERAGE, 2, 2))),
        4,
        0,
    ),
    "Papernot et al.": (of_papernot(LARGEST), 0, 32),
    "Papernot et al., normalised": (of_papernot(LARGEST), 4, 32),
    "Papernot et al., normalised, averages": (of_papernot(AVERAGE), 4, 32),
    "3 x 3, stride 2": (((32, 3, 2, 1, None),), 4, 0),
    "1 x 1": (((32, 1, 1, 0, None),), 4, 0),
    "linear": ((), 0, 0),
}


@dataclass(frozen=True)
class Trial:
    """Settings of a run. The learning rate is for a clip norm of 1."""

    images: str
    features: str
    network: str
    activation: str
    learning_rate: float = 1.0
    clip_norm: float = 1.0
    views: int = 1
    shift: int = 0
    rows: int = 256  # images a step
    batch_size: int = 4_000  # that the noise is of
    epochs: int = 20


GARMENTS = Trial("Fashion-MNIST", "pixels", "two convolutions", "tanh")
DIGITS = replace(GARMENTS, images="moved digits")
MOVED = {"views": 4, "shift": 1, "rows": 128}
RECTIFIED = [replace(base, activation="ReLU") for base in (GARMENTS, DIGITS)]
TRIALS = [
    *(replace(GARMENTS, network=name) for name in NETWORKS if name.startswith(("two", "Papernot"))),
    replace(GARMENTS, learning_rate=2.0),
    replace(GARMENTS, activation="ReLU"),
    replace(GARMENTS, **MOVED),
    *(replace(DIGITS, network=name) for name in NETWORKS if name.startswith("two")),
    replace(DIGITS, learning_rate=2.0),
    replace(DIGITS, activation="ReLU"),
    replace(DIGITS, activation="ReLU", clip_norm=0.3),
    replace(DIGITS, **MOVED),
    *(
        replace(
            base, features="J=1", network="3 x 3, stride 2", activation=name, learning_rate=rate
        )
        for base in (GARMENTS, DIGITS)
        for name, rate in (("tanh", 1.0), ("ReLU", 1.0), ("ReLU", 2.0))
    ),
    replace(DIGITS, features="J=1", network="3 x 3, stride 2", activation="ReLU", clip_norm=0.3),
    *(
        replace(base, features="J=2", network="1 x 1", activation="ReLU")
        for base in (GARMENTS, DIGITS)
    ),
    replace(GARMENTS, features="J=2", network="linear"),
    *(
        replace(base, batch_size=batch_size, epochs=epochs)
        for base in RECTIFIED
        for batch_size, epochs in ((4_000, 40), (8_000, 40), (8_000, 80), (16_000, 80))
    ),
    *(
        replace(base, views=views, shift=shift, rows=128)
        for base in RECTIFIED
        for views, shift in ((1, 1), (4, 1), (4, 2))
    ),
    *(replace(base, **MOVED, batch_size=8_000, epochs=80) for base in RECTIFIED),
    *(
        replace(RECTIFIED[1], **MOVED, batch_size=batch_size, epochs=40, learning_rate=rate)
        for batch_size, rate in ((4_000, 1.0), (8_000, 1.0), (8_000, 2.0))
    ),
    # as many rows, or fewer, spread otherwise over views and epochs
    *(
        replace(RECTIFIED[1], views=views, shift=1, rows=128, epochs=epochs, batch_size=batch_size)
        for views, epochs, batch_size in (
            (1, 40, 4_000),
            (2, 40, 4_000),
            (2, 60, 4_000),
            (4, 30, 4_000),
            (4, 30, 3_000),
        )
    ),
]


def build(trial: Trial, shape: tuple[int, ...]) -> nn.Module:
    convolutions, groups, hidden = NETWORKS[trial.network]
    activation = ACTIVATIONS[trial.activation]
    layers: list[nn.Module] = []
    channels = shape[0]
    for out, size, stride, padding, pooling in convolutions:
        layers.append(nn.Conv2d(channels, out, size, stride=stride, padding=padding))
        layers += [nn.GroupNorm(groups, out)] if groups else []
        layers.append(activation())
        if pooling is not None:
            kind, *window = pooling
            layers.append(kind(*window))
        channels = out
    layers.append(nn.Flatten())
    with torch.no_grad():
        features = nn.Sequential(*layers)(torch.zeros(1, *shape)).shape[1]
    if hidden:
        layers += [nn.Linear(features, hidden), activation()]
        features = hidden
    last = nn.Linear(features, 10)
    if not hidden:
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)


def bent(x: Tensor, y: Tensor, count: int, generator: torch.Generator) -> Arrays:
    """Images drawn from ``x``, each turned, stretched, sheared, moved and bent by itself."""

    def between(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=generator)

    which = torch.randint(len(x), (count,), generator=generator)
    angle, across, down = between(-0.3, 0.3), between(0.8, 1.25), between(0.8, 1.25)
    shear, right, below = between(-0.3, 0.3), between(-0.12, 0.12), between(-0.12, 0.12)
    first = torch.stack([across * angle.cos(), -angle.sin() + shear, right], 1)
    second = torch.stack([angle.sin(), down * angle.cos(), below], 1)
    chosen = x[which]
    grid = F.affine_grid(torch.stack([first, second], 1), chosen.shape, align_corners=False)
    bends = 0.06 * torch.randn(count, 2, 4, 4, generator=generator)
    bends = F.interpolate(bends, size=(28, 28), mode="bicubic").permute(0, 2, 3, 1)
    low = chosen.min()
    return F.grid_sample(chosen - low, grid + bends, align_corners=False) + low, y[which]


def enlarged(x: Tensor, low: float) -> Tensor:
    """Digits of 8 x 8 pixels, none below ``low``, in the middle of 28 x 28."""
    x = F.interpolate(x, size=(20, 20), mode="bicubic", align_corners=False)
    return F.pad(x, (4,) * 4, value=low).clamp(min=low)


@cache
def images(name: str, folder: Path) -> tuple[Arrays, Arrays]:
    """Images to train on, and others to choose on, of 28 x 28 pixels."""
    if name == "Fashion-MNIST":
        data = load_fashion_mnist(folder, (SquareRoot(),))
        x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
        return (x[:50_000], y[:50_000]), (x[50_000:], y[50_000:])
    data = load_digits(0, (SquareRoot(),))
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    x = enlarged(x, float(x.min()))
    generator = torch.Generator().manual_seed(5)
    training = bent(x[:1_100], y[:1_100], 20_000, generator)
    return training, bent(x[1_100:], y[1_100:], CHOOSING, generator)


@cache
def records(name: str, features: str, folder: Path) -> tuple[Arrays, Arrays]:
    (x, y), (x_choosing, y_choosing) = images(name, folder)
    choosing = x_choosing[:CHOOSING], y_choosing[:CHOOSING]
    if features == "pixels":
        return (x, y), choosing

    def scattered(part: Arrays) -> Arrays:
        return torch.from_numpy(np.array(PLANES[features](part[0].numpy()))), part[1]

    return scattered((x[:FROM_SCATTERING], y[:FROM_SCATTERING])), scattered(choosing)


def run(trial: Trial, folder: Path, most_steps: int | None = None) -> dict[str, float]:
    """Scores on the choosing images, by the share of last iterates averaged, and seconds."""
    whole = DPSGD(clip_norm=1.0).plan(
        n=RECORDS,
        batch_size=trial.batch_size,
        epochs=trial.epochs,
        epsilon=EPSILON,
        delta=DELTA,
        neighboring="zero-out",
    )
    (x, y), choosing = records(trial.images, trial.features, folder)
    steps = whole.steps if most_steps is None else most_steps
    plan = DPSGD(clip_norm=trial.clip_norm).plan(
        n=len(x),
        batch_size=trial.rows,
        steps=steps,
        noise_multiplier=whole.noise_multiplier * trial.rows / trial.batch_size,
        delta=DELTA,
        neighboring="zero-out",
    )
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = build(trial, tuple(x.shape[1:]))
    rate = trial.learning_rate / trial.clip_norm
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    averages = {name: TailAverage(model, int((1 - share) * steps)) for name, share in TAILS.items()}
    if trial.views > 1:
        x = x[:, None].expand(-1, trial.views, *x.shape[1:])
        y = y[:, None].expand(-1, trial.views)
    started = time.process_time()
    with attach(
        plan, model, optimizer, TensorDataset(x, y), noise_seed=0, rows_per_record=trial.views
    ) as private:
        for rows, labels in private.batches(physical_batch_size=256):
            seen = moved_images(rows, trial.shift, generator) if trial.shift else rows
            private.backward(cross_entropy(model(seen), labels))
            optimizer.step()
            if private.finished_step:
                for average in averages.values():
                    average.update(private.steps_done)
    seconds = time.process_time() - started
    model.eval()
    scores = {}
    for name, average in averages.items():
        average.swap()
        scores[name] = round(percent(model, *choosing), 2)
        average.swap()
    weights = sum(parameter.numel() for parameter in model.parameters())
    return {**scores, "weights": weights, "seconds": round(seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the CSV")
    parser.add_argument("--data", type=Path, default=Path(FASHION_MNIST_DIRECTORY))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "choose_cnn.csv"
    known: list[dict[str, str]] = []
    if path.exists():
        with path.open(newline="") as file:
            known = list(csv.DictReader(file))
    done = [tuple(row[name] for name in asdict(GARMENTS)) for row in known]
    for trial in TRIALS:
        if tuple(str(value) for value in asdict(trial).values()) in done:
            continue
        row = {**asdict(trial), **run(trial, options.data)}
        known.append({name: str(value) for name, value in row.items()})
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            writer.writeheader()
            writer.writerows(known)
        print(", ".join(known[-1].values()), flush=True)


if __name__ == "__main__":
    main()
