"""Models on scattering features, chosen on images that are neither trained nor tested on.

    python benchmarks/choose_scattering.py --pictures FOLDER --font FILE --out benchmarks/results

writes choose_scattering.csv, a line a run of `TRIALS`, as runs end, and goes on where it was
interrupted. Grey images are those of choose_cnn.py: Fashion-MNIST's training images, and digits
that lie about. Colour images are made up: FOLDER holds ten or more photographs (*.jpg) and FILE is
Noto Color Emoji; Debian's packages mate-backgrounds (its folder "nature") and
fonts-noto-color-emoji hold both. See colour_images.py for what is made of them.

Each step has the noise of a whole run on `RECORDS` images at `EPSILON`, as in choose_cnn.py: a
simulation, for comparing settings. No image is one of CIFAR-10's, and none tests.
"""

import argparse
import csv
import math
import time
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import choose_cnn
import colour_images
from accuracy_tasks import Arrays, cross_entropy, percent
from colour_images import Bytes
from dpoptim.data import FASHION_MNIST_DIRECTORY, load_fashion_mnist
from dpoptim.data.preparation import OpponentColours, Scatter, SquareRoot, Whiten
from dpoptim.methods import DPSGD
from dpoptim.recipes import recipe, steady_rate
from dpoptim.training.attach import attach
from dpoptim.training.tail_average import TailAverage

RECORDS, EPSILON, DELTA = 50_000, 3.0, 1e-5
TRAINING, CHOOSING = 10_000, 4_000
ROWS = {"linear": 512, "cnn": 192}  # images a step
BY_RECIPE = 0.0


@dataclass(frozen=True)
class Trial:
    """Settings of a run. The learning rate is for a clip norm of 1, `BY_RECIPE` the recipe's.

    Attributes:
        colours: "opponent": as `OpponentColours` has them; "opponent, unscaled"; "RGB"; or "grey".
        whitening: what is ``shared`` and ``detail`` of `Whiten`; "": none.
        width: planes that the CNN mixes those of scattering to; 0: a linear model.
        seed: of the noise, and of the order of images.
    """

    images: str
    colours: str = "opponent"
    whitening: str = ""
    width: int = 0
    learning_rate: float = BY_RECIPE
    clip_norm: float = 1.0
    batch_size: int = 0  # 0: the recipe's
    epochs: int = 0
    seed: int = 0


OPPONENT = {"opponent": OpponentColours(), "opponent, unscaled": OpponentColours(scale=1)}
COLOURED = [Trial("objects"), Trial("textures")]
GREY = [Trial(name, "grey", "0.3 0.25") for name in ("Fashion-MNIST", "moved digits")]
SEEDS = (0, 1, 2)
BEFORE = {"colours": "RGB", "whitening": "0.3 0.25", "learning_rate": 1.2}
OF_LITERATURE = {"learning_rate": 0.4, "clip_norm": 0.1, "batch_size": 8192, "epochs": 60}
SHORT = {"batch_size": 3_333, "epochs": 30}  # as long as CNNs of pixels
FAST = {"learning_rate": 1.0, **SHORT}  # the CNN's settings before
TRIALS = [
    trial
    for base in COLOURED
    for trial in (
        base,
        *(replace(base, width=width, **FAST) for width in (32, 64)),
        replace(base, **BEFORE),
        replace(base, whitening="0.3 0.25"),
        replace(base, colours="opponent, unscaled"),
        replace(base, **OF_LITERATURE),
        replace(base, colours="RGB"),
        replace(base, colours="RGB", **OF_LITERATURE),
        replace(base, colours="RGB", width=32, **FAST),
        replace(base, learning_rate=0.62),
    )
]
TRIALS += [
    replace(base, learning_rate=rate, seed=seed, **settings)
    for base in GREY
    for settings, rates in (
        ({}, (0.5, 0.75, 1.0, 1.5, 3.0)),
        ({"width": 32, **SHORT}, (0.5, 1.0, 2.0)),
    )
    for rate in rates
    for seed in SEEDS
]
# The CNN at less than its rate before, and in larger batches for longer, as the literature has it;
# the linear classifier at other rates and as in the literature.
GARMENTS = Trial("garments")
SLOW = {"learning_rate": 0.5}
LONG = {"batch_size": 7_142, "epochs": 60}
TRIALS += [
    replace(base, seed=seed, **settings)
    for base, seeds, kinds in (
        (
            GARMENTS,
            SEEDS[:2],
            ({}, OF_LITERATURE, {"learning_rate": 0.19}, {"learning_rate": 0.76}),
        ),
        (
            replace(GARMENTS, width=64),
            SEEDS[:2],
            (SLOW | LONG, {"learning_rate": 1.0, **LONG}, SLOW | SHORT, FAST),
        ),
        *((replace(base, width=64), SEEDS[:1], (SLOW | LONG, SLOW | SHORT)) for base in COLOURED),
    )
    for settings in kinds
    for seed in seeds
]


@cache
def images(name: str, pictures: Path, font: Path) -> tuple[Arrays, Arrays]:
    """Images to train on and to choose on, pixels as `dpoptim train` has them."""
    if name in {base.images for base in GREY}:
        training, choosing = choose_cnn.images(name, FASHION_MNIST_DIRECTORY)
        (x, y), (x_choosing, y_choosing) = training, choosing
        return (x[:TRAINING], y[:TRAINING]), (x_choosing[:CHOOSING], y_choosing[:CHOOSING])
    if name == "garments":
        x, y = garments(pictures)
    elif name == "objects":
        x, y = colour_images.objects(pictures, font, TRAINING + CHOOSING, 0)
    else:
        parts = (
            colour_images.textures(pictures, TRAINING, 0, held_out=False),
            colour_images.textures(pictures, CHOOSING, 1, held_out=True),
        )
        x, y = (np.concatenate(each) for each in zip(*parts, strict=True))
    pixels = torch.from_numpy(SquareRoot()(x.astype(np.float32) / 255))
    labels = torch.from_numpy(y)
    return (pixels[:TRAINING], labels[:TRAINING]), (pixels[TRAINING:], labels[TRAINING:])


def garments(pictures: Path) -> tuple[Bytes, NDArray[np.int64]]:
    """Training images of Fashion-MNIST in colours; those to choose on show the fifth held out."""
    data = load_fashion_mnist(FASHION_MNIST_DIRECTORY)
    grey = (255 * data.x[: TRAINING + CHOOSING, 0]).round().astype(np.uint8)
    parts = (
        colour_images.garments(pictures, grey[:TRAINING], 0, (0.0, 0.8)),
        colour_images.garments(pictures, grey[TRAINING:], 1, (0.8, 1.0)),
    )
    return np.concatenate(parts), data.y[: TRAINING + CHOOSING]


@cache
def scattered(name: str, colours: str, *sources: Path) -> tuple[Arrays, Arrays]:
    def features(part: Arrays) -> Arrays:
        x = part[0].numpy()
        x = OPPONENT[colours](x) if colours in OPPONENT else x
        return torch.from_numpy(np.array(Scatter()(x))), part[1]

    training, choosing = images(name, *sources)
    return features(training), features(choosing)


def whitened(part: Arrays, whitening: str) -> Arrays:
    if not whitening:
        return part
    shared, detail = (float(word) for word in whitening.split())
    return torch.from_numpy(np.array(Whiten(shared, detail)(part[0].numpy()))), part[1]


def build(width: int, shape: tuple[int, ...]) -> nn.Module:
    layers: list[nn.Module] = []
    if width:
        layers = [nn.Conv2d(shape[0], width, 1), nn.GroupNorm(4, width), nn.ReLU()]
        shape = (width, *shape[1:])
    last = nn.Linear(math.prod(shape), 10)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, nn.Flatten(), last)


def run(trial: Trial, *sources: Path, most_steps: int | None = None) -> dict[str, float]:
    """Scores on the choosing images, of the last iterate and of the mean of the last ones."""
    parts = scattered(trial.images, trial.colours, *sources)
    (x, y), choosing = (whitened(part, trial.whitening) for part in parts)
    model_name = "cnn" if trial.width else "linear"
    shape = tuple(x.shape[1:])
    by = recipe("cnn" if trial.width else "softmax", RECORDS, "scattering", size=math.prod(shape))
    batch_size = trial.batch_size or by.batch_size
    whole = DPSGD(clip_norm=1.0).plan(
        n=RECORDS,
        batch_size=batch_size,
        epochs=trial.epochs or by.epochs,
        epsilon=EPSILON,
        delta=DELTA,
        neighboring="zero-out",
    )
    rate = (trial.learning_rate or steady_rate(by, whole)) / trial.clip_norm
    rows = ROWS[model_name]
    steps = whole.steps if most_steps is None else most_steps
    plan = DPSGD(clip_norm=trial.clip_norm).plan(
        n=len(x),
        batch_size=rows,
        steps=steps,
        noise_multiplier=whole.noise_multiplier * rows / batch_size,
        delta=DELTA,
        neighboring="zero-out",
    )
    torch.manual_seed(0)
    model = build(trial.width, shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=by.momentum)
    average = TailAverage(model, int((1 - by.averaged) * steps))
    started = time.process_time()
    with attach(plan, model, optimizer, TensorDataset(x, y), noise_seed=trial.seed) as private:
        for records, labels in private.batches(physical_batch_size=256):
            private.backward(cross_entropy(model(records), labels))
            optimizer.step()
            if private.finished_step:
                average.update(private.steps_done)
    seconds = time.process_time() - started
    model.eval()
    last = score(model, *choosing)
    average.swap()
    return {
        "rate": rate,
        "steps": steps,
        "weights": sum(parameter.numel() for parameter in model.parameters()),
        "norm": round(float(x[:1_000].flatten(1).norm(dim=1).mean()), 1),
        "last": last,
        "average": score(model, *choosing),
        "seconds": round(seconds, 1),
    }


def score(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return round(percent(model, x, y), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the CSV")
    parser.add_argument("--pictures", type=Path, required=True, help="folder of photographs")
    parser.add_argument("--font", type=Path, required=True, help="Noto Color Emoji, .ttf")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "choose_scattering.csv"
    known: list[dict[str, str]] = []
    if path.exists():
        with path.open(newline="") as file:
            known = list(csv.DictReader(file))
    done = [tuple(row[name] for name in asdict(TRIALS[0])) for row in known]
    for trial in TRIALS:
        if tuple(str(value) for value in asdict(trial).values()) in done:
            continue
        row = {**asdict(trial), **run(trial, options.pictures, options.font)}
        known.append({name: str(value) for name, value in row.items()})
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            writer.writeheader()
            writer.writerows(known)
        print(", ".join(known[-1].values()), flush=True)


if __name__ == "__main__":
    main()
