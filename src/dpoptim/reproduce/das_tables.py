"""Accuracy at percentiles of the per-sample Lipschitz constants (Das et al. 2023, Tables 3 to 6).

Softmax regression. For each clip norm and epsilon the learning rate is the best of a grid on a
tenth of the training records that those runs do not train on; then all records train, with other
seeds. The papers' figures stand beside ours. The rows without a percentile of their own find the
clip norm privately, within the same budget.

On images the released gradients are smoothed over neighbouring pixels: neighbouring weights of a
good classifier are similar, while the noise of neighbouring pixels is independent. The filter knows
the shape of an image and no record, and acts on what the gate has released, so it is
post-processing: the charge, the clipping and the model are those of DP-SGD without it. It is a
preconditioner, positive definite, so it moves no minimum of the loss; what is rough about the
weights is learnt later. Its cut-off was chosen once, on the same tenth as the learning rates (the
data are public; on private data one pays for choices).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import torch

from dpoptim.methods.low_quantile import private_low_quantile
from dpoptim.reproduce.das_published import EPSILONS, PRIVATE, SOFTMAX, printed
from dpoptim.reproduce.kl_real import dp_sgd
from dpoptim.reproduce.real_cases import Case, lipschitz_constants, tweets
from dpoptim.reproduce.results import deviation, pyplot, write_rows
from dpoptim.solvers.linear_model import LinearModel

PERCENTILES = (0, 10, 20, 40, 80, 100)
SEARCH_EPSILON = 0.3  # of the budget, for the private quantile, as in Das et al.'s Table 3
SEARCH_QUANTILE = 0.05


@dataclass(frozen=True)
class Recipe:
    """Settings that all cells of a table share.

    Attributes:
        steps: learning rates times clip norm to choose from.
        smoothing: a public matrix on the released gradients; see `smooth_pixels`. None: none.
        epochs: expected passes over the data.
        below: clip norms below all constants.
    """

    steps: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)
    smoothing: torch.Tensor | None = None
    epochs: int = 40
    below: tuple[float, ...] = (0.1, 1.0)


# the paper's clip norms below all constants; more rates, since norms and classes are not known here
FEATURES = Recipe((0.05, 0.15, 0.5, 1.5, 5.0, 15.0), below=(0.1, 1.0, 5.0, 10.0))
BELOW_OF_EMNIST = (1.0, 3.0)


@dataclass(frozen=True)
class Row:
    """Hold-out percent at a clip norm and epsilon: mean and deviation over seeds; the paper's."""

    data: str
    clipped_at: str  # a number, or a percentile of the Lipschitz constants
    clip_norm: float
    epsilon: float
    learning_rate: float
    accuracy: float
    standard_deviation: float
    seeds: int
    paper: float


def smooth_pixels(side: int, cutoff: float) -> torch.Tensor:
    """A low-pass filter over ``side`` x ``side`` pixels, and an intercept left alone.

    In the basis of the two-dimensional cosine transform the frequency (i, j) is multiplied by
    ``1 / (1 + (i^2 + j^2) / cutoff^2)``. Float64, symmetric, positive definite, of shape (side^2 +
    1, side^2 + 1).
    """
    frequency = torch.arange(side, dtype=torch.float64)
    cosines = torch.cos(torch.pi / side * frequency[:, None] * (frequency + 0.5)) * math.sqrt(
        2 / side
    )
    cosines[0] /= math.sqrt(2)
    basis = torch.kron(cosines, cosines)  # a row for each pair of frequencies; orthonormal
    factors = 1 / (1 + (frequency[:, None].square() + frequency.square()).flatten() / cutoff**2)
    return torch.block_diag((basis.T * factors) @ basis, torch.ones(1, 1, dtype=torch.float64))


def das_table(
    out: Path, case: Case, recipe: Recipe, *, seeds: int = 3, epsilons: Sequence[float] = EPSILONS
) -> list[Row]:
    """Measure a public data set; write ``das_<data>.csv`` and ``.png`` into the folder ``out``."""
    stem = f"das_{case.name.lower().replace('-', '_')}"
    constants = lipschitz_constants(case.model, case.x)
    norms = {f"{norm:g}": norm for norm in recipe.below}
    norms |= {
        f"{percent} %": float(torch.quantile(thinned(constants), percent / 100))
        for percent in PERCENTILES
    }
    found = [
        private_low_quantile(
            constants,
            SEARCH_QUANTILE,
            epsilon=SEARCH_EPSILON,
            low=0.1,
            high=100.0,
            neighboring="zero-out",
            noise_seed=seed,
        )[0]
        for seed in range(1, seeds + 1)
    ]
    rows: list[Row] = []
    for epsilon in epsilons:
        chosen: dict[str, float] = {}
        for name, norm in norms.items():
            row, chosen[name] = measured(case, recipe, name, norm, epsilon, epsilon, seeds)
            rows.append(row)
            write_rows(out / f"{stem}.csv", Row, rows)
        # near enough: the constants' lowest percentiles lie together
        known = replace(recipe, steps=(chosen["0 %"],))
        each = [
            measured(
                case, known, PRIVATE, norm, epsilon, epsilon - SEARCH_EPSILON, 1, first_seed=seed
            )[0]
            for seed, norm in enumerate(found, 1)
        ]
        scores = [row.accuracy for row in each]
        rows.append(
            replace(
                each[0], accuracy=mean(scores), standard_deviation=deviation(scores), seeds=seeds
            )
        )
        write_rows(out / f"{stem}.csv", Row, rows)
    draw(out / f"{stem}.png", rows)
    return rows


def thinned(values: torch.Tensor) -> torch.Tensor:
    """torch.quantile takes 16 million numbers at most."""
    return values[:: max(1, len(values) >> 20)]


def measured(
    case: Case,
    recipe: Recipe,
    name: str,
    norm: float,
    epsilon: float,
    spent: float,
    seeds: int,
    first_seed: int = 1,
) -> tuple[Row, float]:
    """One cell, and its learning rate times clip norm."""

    def accuracy(case: Case, seed: int, step: float) -> float:
        settings = {
            "lipschitz": norm,
            "learning_rate": step / norm,
            "averaged": 0.25,
            "batch_size": 4096.0,
            "epochs": float(recipe.epochs),
        }
        return case.accuracy(dp_sgd(case, spent, seed, settings, recipe.smoothing))

    best = recipe.steps[0]
    if len(recipe.steps) > 1:
        choosing = case.held_out_tenth()
        scores = [accuracy(choosing, 0, step) for step in recipe.steps]
        best = recipe.steps[scores.index(max(scores))]
    found = [accuracy(case, first_seed + i, best) for i in range(seeds)]
    paper = printed(SOFTMAX, case.name, name, epsilon)
    return Row(
        case.name, name, norm, epsilon, best / norm, mean(found), deviation(found), seeds, paper
    ), best


def table4(out: Path, cases: Sequence[Case], *, seeds: int = 3) -> None:
    """Features that a network has made of images, as they are."""
    for case in cases:
        das_table(out, case, FEATURES, seeds=seeds)


def table6(
    out: Path, case: Case, *, seeds: int = 3, below: tuple[float, ...] = Recipe.below
) -> list[Row]:
    """Images of 28 x 28 pixels in [0, 1]."""
    recipe = Recipe(smoothing=smooth_pixels(28, cutoff=16.0), below=below)
    return das_table(out, without_penalty(case), recipe, seeds=seeds)


def table5(out: Path, tweets_directory: Path, *, seeds: int = 3) -> list[Row]:
    """A TweetEval task on sentence features of norm 10 (public), about as in the paper."""
    return das_table(out, tweets_of_norm_10(out, tweets_directory), Recipe(), seeds=seeds)


def without_penalty(case: Case) -> Case:
    return replace(case, l2=0.0)


def tweets_of_norm_10(out: Path, tweets_directory: Path) -> Case:
    """A TweetEval task; its features are kept in a folder below ``out``."""
    case = tweets(tweets_directory, out / "cache")
    scaled = replace(case, l2=0.0, x=case.x * 10, x_test=case.x_test * 10)
    model = LinearModel("softmax", features=case.model.features, outputs=case.model.outputs)
    return replace(scaled, model=model)


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Accuracy against the clip norm, a panel for each epsilon; the paper's in grey."""
    plt = pyplot()
    epsilons = list(dict.fromkeys(row.epsilon for row in rows))
    figure, axes = plt.subplots(
        1, len(epsilons), figsize=(4.2 * len(epsilons), 3.6), layout="constrained", squeeze=False
    )
    for axis, epsilon in zip(axes[0], epsilons, strict=True):
        mine = [row for row in rows if row.epsilon == epsilon]
        names = [row.clipped_at for row in mine]
        places = range(len(mine))
        axis.errorbar(
            places,
            [row.accuracy for row in mine],
            [row.standard_deviation for row in mine],
            fmt="o",
            label="ours",
        )
        axis.plot(places, [row.paper for row in mine], "s", color="#9ca3af", label="Das et al.")
        axis.set_xticks(places, names, rotation=60)
        axis.set(
            title=rf"$\epsilon$ = {epsilon:g}", xlabel="clip norm (% of the Lipschitz constants)"
        )
    figure.axes[0].set_ylabel("accuracy, %")
    figure.axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
