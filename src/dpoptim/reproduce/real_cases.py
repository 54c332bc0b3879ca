"""Real, public data sets as problems of the solvers, and bounds on their records' gradients.

Fashion-MNIST; TweetEval's emotion and emoji (Barbieri et al. 2020) as sentence features.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from dpoptim.data import Data, Labels, encode_text, hold_out_fifth, load_fashion_mnist
from dpoptim.solvers import LinearProblem, Objective
from dpoptim.solvers.linear_model import LinearModel


def load_tweets(
    directory: str | Path, *, cache: str | Path | None = None, most: int | None = None
) -> Data:
    """A folder of TweetEval: train and test texts as features of shape (n, 384), rows of norm 1.

    Args:
        directory: with ``train_text.txt``, ``train_labels.txt``, ``test_text.txt``,
            ``test_labels.txt``, ``mapping.txt``.
        cache: see `encode_text`.
        most: use the first so many records of each part; encoding takes 10 ms a text.

    Raises:
        FileNotFoundError: a file is missing. ValueError: texts and labels do not belong together.
    """
    folder = Path(directory)
    classes = [line.split("\t")[1] for line in lines(folder / "mapping.txt")]
    parts = []
    for part in ("train", "test"):
        texts = lines(folder / f"{part}_text.txt")
        labels: Labels = np.array(
            [int(line) for line in lines(folder / f"{part}_labels.txt")], dtype=np.int64
        )
        if len(texts) != len(labels) or not 0 <= labels.min() <= labels.max() < len(classes):
            raise ValueError(
                f"{folder}: {len(texts)} {part} texts and {len(labels)} labels of {len(classes)} "
                "classes."
            )
        parts.append((encode_text(texts[:most], cache=cache), labels[:most]))
    (x, y), (x_test, y_test) = parts
    return Data(folder.name, x, y, x_test, y_test, tuple(classes), public=True)


def tasks_in(directory: str | Path) -> list[Path]:
    """The folder of a task itself, or those of the tasks right below it, in order of names.

    Raises:
        FileNotFoundError: there is none.
    """
    folder = Path(directory)
    found = [
        each for each in (folder, *sorted(folder.glob("*"))) if (each / "train_text.txt").is_file()
    ]
    if not found:
        raise FileNotFoundError(
            f"{folder} holds no task of TweetEval: give one of its datasets, such as emotion, or "
            "a folder of several."
        )
    return found


def lines(path: Path) -> list[str]:
    """The lines of a file; tweets hold characters that other functions would split at."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: give a folder of TweetEval, such as its datasets/emotion."
        )
    text = path.read_text(encoding="utf-8")
    return text.removesuffix("\n").split("\n")


def tensors_of(data: Data) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, y and what tests, of a data set that has such a part."""
    assert data.x_test is not None
    assert data.y_test is not None
    x, y, x_test, y_test = map(torch.from_numpy, (data.x, data.y, data.x_test, data.y_test))
    return x, y, x_test, y_test


@dataclass(frozen=True)
class Case:
    """A linear model on a public data set, features scaled by public constants."""

    name: str
    model: LinearModel
    l2: float
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    @cached_property
    def problem(self) -> LinearProblem:
        return LinearProblem(self.model, capacity=len(self.x), l2=self.l2)

    @cached_property
    def objective(self) -> Objective:
        return Objective(self.problem, (self.x, self.y))

    @cached_property
    def least_risk(self) -> float:
        """min F, by L-BFGS without privacy."""

        def value_and_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
            w = torch.from_numpy(flat)
            gradient = self.objective.clipped_sum(
                [(1.0, w)], 1e9
            ) / self.objective.n + self.problem.penalty_gradient(w)
            return self.objective.risk(w, data_is_public=True), gradient.numpy()

        start = np.zeros(self.problem.dimension)
        found = minimize(
            value_and_gradient,
            start,
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 300, "gtol": 1e-6},
        )
        return float(found.fun)

    def excess_risk(self, w: Tensor) -> float:
        return self.objective.risk(w, data_is_public=True) - self.least_risk

    def held_out_tenth(self) -> "Case":
        """The last tenth of the training records held out from the others: to choose settings."""
        cut = len(self.x) - len(self.x) // 10
        return replace(
            self, x=self.x[:cut], y=self.y[:cut], x_test=self.x[cut:], y_test=self.y[cut:]
        )

    def accuracy(self, w: Tensor) -> float:
        """Percent of the hold-out."""
        scores = self.model.scores(w, self.x_test)
        predicted = scores.argmax(1) if self.model.loss == "softmax" else (scores[:, 0] > 0).long()
        return 100 * float((predicted == self.y_test).double().mean())


def breast_cancer() -> Case:
    """scikit-learn's 569 tumours, 30 features, standardised; one fifth held out."""
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0)
    data = hold_out_fifth(
        Data("breast cancer", x, y, None, None, ("malignant", "benign"), public=True), seed=0
    )
    return Case("breast cancer", LinearModel("logistic", features=30), 1e-3, *tensors_of(data))


def fashion(directory: Path, classes: Sequence[int] | None = None) -> Case:
    """Fashion-MNIST, or two of its classes; pixels in [0, 1]."""
    x, y, x_test, y_test = tensors_of(load_fashion_mnist(directory))
    parts = []
    for images, labels in ((x.flatten(1), y), (x_test.flatten(1), y_test)):
        if classes is None:
            parts += [images, labels]
        else:
            kept = (labels == classes[0]) | (labels == classes[1])
            parts += [images[kept], (labels[kept] == classes[1]).long()]
    if classes is None:
        return Case("Fashion-MNIST", LinearModel("softmax", features=784, outputs=10), 1e-4, *parts)
    return Case("t-shirt or shirt", LinearModel("logistic", features=784), 1e-4, *parts)


def tweets(directory: Path, cache: Path) -> Case:
    """A classification of TweetEval on sentence features; rows of norm 1."""
    data = load_tweets(directory, cache=cache)
    model = LinearModel("softmax", features=data.x.shape[1], outputs=data.classes)
    return Case(data.name, model, 1e-4, *tensors_of(data))


def lipschitz_constants(
    model: LinearModel, x: Tensor, *, radius: float = math.inf, target_bound: float = math.inf
) -> Tensor:
    """G_i of each record: float64, shape (B,). Private.

    It bounds the norm of record i's gradient over all parameters (Das et al. 2023, Sec. 5, who
    advise to look for the clip norm below the smallest of them).

    * softmax: ``sqrt(2) |(x, 1)|``, since ``|p - e_y| <= sqrt(2)``; reached as p tends to another
      class;
    * logistic: ``|(x, 1)|``, since ``|sigmoid(s) - y| <= 1``: smaller by sqrt(2) than softmax with
      two classes;
    * huber: ``delta sqrt(p) |(x, 1)|``;
    * squared: ``(radius |(x, 1)| + target_bound) |(x, 1)|`` where ``|w| <= radius`` and ``|y| <=
      target_bound``.

    Args:
        x: shape (B, features).
        radius, target_bound: of the squared loss's domain, which has no constant without them.

    Raises:
        ValueError: squared loss without a bounded domain.
    """
    norms = model.squared_row_norms(x).sqrt()
    if model.loss != "squared":
        return norms * model.lipschitz(1.0)
    if not (0 <= radius < math.inf and 0 <= target_bound < math.inf):
        raise ValueError(
            "squared loss has no Lipschitz constant on an unbounded domain: give a finite radius "
            f"and target_bound, got radius={radius!r} and target_bound={target_bound!r}."
        )
    return (norms * radius + target_bound) * norms
