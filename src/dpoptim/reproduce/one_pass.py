"""Fashion-MNIST in one pass: softmax regression in batches from 64 to 4,096."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpoptim.data import FASHION_MNIST_DIRECTORY, load_fashion_mnist
from dpoptim.noise.correlated import BufferedToeplitz
from dpoptim.reproduce.private_runs import Arrays
from dpoptim.reproduce.real_cases import tensors_of
from dpoptim.reproduce.results import write_rows
from dpoptim.reproduce.srgd_rates import METHODS, settings_for, tuned
from dpoptim.solvers.accelerated_srgd import accelerated_srgd
from dpoptim.solvers.budget import Budget
from dpoptim.solvers.linear_model import LinearModel
from dpoptim.solvers.problem import LinearProblem
from dpoptim.solvers.srgd_settings import SRGD

DELTA = 1e-5
TRAINING = 50_000  # the other 10,000 of the 60,000 choose clip norm and step size
SCALE = 10.0  # public: about the norm of an image
BATCH_SIZES = (64, 256, 1024, 4096)
EPSILONS = (1.0, 2.0, 8.0)
CLIP_NORMS = (0.5, 1.0, 2.0)
BETAS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
MODEL = LinearModel("softmax", 784, 10)


@dataclass(frozen=True)
class Row:
    """Test accuracy over seeds of a method at its best settings; ``averaged``: mean iterate."""

    method: str
    batch_size: int
    epsilon: float
    steps: int
    clip_norm: float
    beta: float
    averaged: bool
    accuracy: float
    standard_deviation: float
    seeds: int


def load_split(directory: str | Path) -> tuple[Arrays, Arrays, Arrays]:
    """(training, choice of settings, test): rows divided by `SCALE`, and labels."""
    x, y, x_test, y_test = tensors_of(load_fashion_mnist(directory))
    x, x_test = x.flatten(1) / SCALE, x_test.flatten(1) / SCALE
    return (x[:TRAINING], y[:TRAINING]), (x[TRAINING:], y[TRAINING:]), (x_test, y_test)


def accuracy(w: Tensor, arrays: Arrays) -> float:
    x, y = arrays
    return float((MODEL.scores(w, x).argmax(1) == y).double().mean())


def train(settings: SRGD, data: Arrays, epsilon: float, seed: int) -> tuple[Tensor, Tensor]:
    """Last weights and mean iterate after one pass, in an order drawn from ``seed``."""
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(data[0])))
    problem = LinearProblem(MODEL, capacity=settings.batch_size)
    shuffled = data[0][order], data[1][order]
    result = accelerated_srgd(
        problem, shuffled, settings, budget=Budget(DELTA, epsilon=epsilon), noise_seed=seed
    )
    return result.weights, result.average


def one_pass(
    out: Path,
    *,
    data_directory: str | Path = FASHION_MNIST_DIRECTORY,
    seeds: int = 3,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    epsilons: Sequence[float] = EPSILONS,
) -> Path:
    """Measure all methods, write ``one_pass.csv`` into ``out``; half an hour on one core.

    Clip norm, step size, and whether to average the iterates, are the best of a grid for each
    method, batch size and epsilon, on records that are neither trained nor tested on, with noise
    of their own. Returns the table's path.
    """
    training, choosing, test = load_split(data_directory)
    rows: list[Row] = []
    for batch_size, epsilon, (name, method) in itertools.product(
        batch_sizes, epsilons, METHODS.items()
    ):
        # Few vectors of memory: here are up to 781 steps of 7,850 parameters.
        mine = (
            replace(method, mechanism=BufferedToeplitz())
            if method.gradient == "recursive"
            else method
        )
        rows.append(measure(name, mine, batch_size, epsilon, training, choosing, test, seeds))
        write_rows(out / "one_pass.csv", Row, rows)
    return out / "one_pass.csv"


def measure(
    name: str,
    method: SRGD,
    batch_size: int,
    epsilon: float,
    training: Arrays,
    choosing: Arrays,
    test: Arrays,
    seeds: int,
) -> Row:
    """One row of the table."""
    steps = len(training[0]) // batch_size

    def errors(clip_norm: float, beta: float) -> list[float]:
        settings = settings_for(method, steps, batch_size, clip_norm, beta)
        return [1 - accuracy(w, choosing) for w in train(settings, training, epsilon, 0)]

    clip_norm, beta = tuned(lambda *tried: min(errors(*tried)), CLIP_NORMS, BETAS)
    last, mean = errors(clip_norm, beta)
    best = settings_for(method, steps, batch_size, clip_norm, beta)
    found = [
        accuracy(train(best, training, epsilon, seed)[mean < last], test)
        for seed in range(1, seeds + 1)
    ]
    spread = float(np.std(found, ddof=1)) if seeds > 1 else math.nan
    return Row(
        name,
        batch_size,
        epsilon,
        steps,
        clip_norm,
        beta,
        mean < last,
        float(np.mean(found)),
        spread,
        seeds,
    )
