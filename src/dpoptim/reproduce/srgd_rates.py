"""Excess population risk of one-pass methods by n (Choquette-Choo et al. 2024, Theorem 4.2).

The claim: with T of order n^(1/4) batches only, accelerated recursive gradients reach, in units of
L R, ``1 / sqrt(n) + sqrt(p) / (epsilon n)`` for every convex loss with gradients up to L and its
minimiser within R. This bounds the worst case. Most single problems are easier and fall faster, so
the problem decides what is measured: see `srgd_problem`, whose problems are the same for all n.
"""

import csv
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares
from torch import Tensor

from dpoptim.noise.correlated import BufferedToeplitz, Independent, ToeplitzSquareRoot
from dpoptim.reproduce.results import pyplot, write_rows
from dpoptim.reproduce.srgd_problem import Floats, Task
from dpoptim.solvers.accelerated_srgd import accelerated_srgd
from dpoptim.solvers.budget import Budget
from dpoptim.solvers.srgd_settings import SRGD

DELTA = 1e-7
DRAWS = 200  # of the bootstrap

# Every method sees each record once, takes the same steps and makes the same promise.
METHODS = {
    "accelerated SRGD": SRGD(1, 1, 1, 1, mechanism=ToeplitzSquareRoot(normalised=True)),
    "independent gradients": SRGD(1, 1, 1, 1, gradient="independent"),
    "unaccelerated SRGD": SRGD(
        1, 1, 1, 1, accelerated=False, mechanism=ToeplitzSquareRoot(normalised=True)
    ),
    "DP-SGD": SRGD(1, 1, 1, 1, gradient="independent", accelerated=False, mechanism=Independent()),
    "DP-FTRL": SRGD(
        1, 1, 1, 1, gradient="independent", accelerated=False, mechanism=BufferedToeplitz()
    ),
}
CLIP_NORMS = (0.3, 0.6, 1.0, 2.0)
BETAS = (1.0, 2.0, 4.0, 8.0, 16.0)  # times M; the theorem asks for 1 or more


@dataclass(frozen=True)
class Cell:
    """A method's excess risk at one n and epsilon (inf: no noise), at its best settings."""

    loss: str
    p: int
    n: int
    epsilon: float
    method: str
    steps: int
    clip_norm: float
    beta: float
    excess: float
    standard_error: float


def number_of_steps(n: int) -> int:
    """T = 2 n^(1/4), rounded up."""
    return math.ceil(2 * n**0.25)


def excess_of(
    task: Task, data: tuple[Tensor, Tensor], settings: SRGD, epsilon: float, seed: int
) -> float:
    budget = Budget(DELTA, epsilon=epsilon) if math.isfinite(epsilon) else None
    problem = task.problem(settings.batch_size)
    return task.excess(
        accelerated_srgd(problem, data, settings, budget=budget, noise_seed=seed).weights
    )


def settings_for(method: SRGD, steps: int, batch_size: int, clip_norm: float, beta: float) -> SRGD:
    """One of `METHODS` with numbers."""
    return replace(method, steps=steps, batch_size=batch_size, clip_norm=clip_norm, beta=beta)


def tuned(
    score: Callable[[float, float], float], clip_norms: Sequence[float], betas: Sequence[float]
) -> tuple[float, float]:
    """(clip norm, beta) of a low ``score(clip_norm, beta)``.

    Beta at the middle clip norm, then the clip norm, then beta again among its neighbours.
    """
    score = cache(score)
    middle = clip_norms[len(clip_norms) // 2]
    beta = min(betas, key=lambda tried: score(middle, tried))
    clip_norm = min(clip_norms, key=lambda tried: score(tried, beta))
    return clip_norm, min((beta / 2, beta, beta * 2), key=lambda tried: score(clip_norm, tried))


def measure(task: Task, n: int, epsilons: Sequence[float], seeds: int) -> list[Cell]:
    """All methods on one problem.

    Clip norm and step size are the best of a grid for each method and epsilon, chosen on data and
    noise of their own (seed 0); what is reported comes from seeds 1, 2, ...
    """
    steps = number_of_steps(n)
    chosen: dict[tuple[str, float], SRGD] = {}
    tuning = task.sample(n, 0)
    for (name, method), epsilon in itertools.product(METHODS.items(), epsilons):

        def score(
            clip_norm: float, beta: float, method: SRGD = method, epsilon: float = epsilon
        ) -> float:
            if beta < 1:
                return math.inf
            noises = (0, 100, 200, 300) if math.isfinite(epsilon) else (0,)
            tried = settings_for(method, steps, n // steps, clip_norm, beta * task.smoothness)
            return float(
                np.mean([excess_of(task, tuning, tried, epsilon, seed) for seed in noises])
            )

        clip_norm, beta = tuned(score, CLIP_NORMS, BETAS)
        chosen[name, epsilon] = settings_for(
            method, steps, n // steps, clip_norm, beta * task.smoothness
        )
    results: dict[tuple[str, float], list[float]] = {key: [] for key in chosen}
    for seed in range(1, seeds + 1):
        data = task.sample(n, seed)
        for (name, epsilon), best in chosen.items():
            results[name, epsilon].append(excess_of(task, data, best, epsilon, seed))
    return [
        Cell(
            task.kind,
            task.p,
            n,
            epsilon,
            name,
            steps,
            chosen[name, epsilon].clip_norm,
            chosen[name, epsilon].beta,
            float(np.mean(found)),
            float(np.std(found, ddof=1) / math.sqrt(len(found))),
        )
        for (name, epsilon), found in results.items()
    ]


def slope(cells: Iterable[Cell]) -> float:
    """Exponent of n in a least-squares line through log excess against log n."""
    cells = list(cells)
    return float(np.polyfit(np.log([c.n for c in cells]), np.log([c.excess for c in cells]), 1)[0])


def exponents(cells: Sequence[Cell], power: float = 1.0) -> tuple[float, float]:
    """(alpha, gamma) of ``excess = a_p n^-alpha + b (sqrt(p) / (epsilon n))^gamma``, in logarithms.

    ``cells`` are of one loss and one method; a_p is free for each p, b is common. With ``power`` 2
    the squares of the two terms add instead, as they do once privacy's part is the smaller (see
    the module).
    """
    dimensions = sorted({c.p for c in cells})
    n = np.array([c.n for c in cells], dtype=np.float64)
    which = np.array([dimensions.index(c.p) for c in cells])
    private = np.array([math.sqrt(c.p) / (c.epsilon * c.n) for c in cells])
    target = np.log([c.excess for c in cells])

    def residuals(parameters: Floats) -> Floats:
        alpha, gamma, b, *a = parameters
        terms = np.exp(np.array(a)[which]) * n**-alpha, np.exp(b) * private**gamma
        return np.log(terms[0] ** power + terms[1] ** power) / power - target

    free = len(dimensions)
    bounds = ([0.05, 0.05, -20.0, *[-20.0] * free], [3.0, 3.0, 20.0, *[20.0] * free])
    starts = [
        np.array([0.5, gamma, b, *[0.0] * free]) for gamma in (0.7, 1.0, 1.5) for b in (-2.0, 1.0)
    ]
    best = min(
        (least_squares(residuals, start, bounds=bounds) for start in starts),
        key=lambda found: float(found.cost),
    )
    return float(best.x[0]), float(best.x[1])


def intervals(cells: Sequence[Cell]) -> Floats:
    """95 % bootstrap intervals of `exponents`, shape (2, 2): a row for alpha, one for gamma.

    Drawn are pairs (n, p) with all their cells, which share their data, so that what the model does
    not fit widens the intervals too.
    """
    rng = np.random.default_rng(0)
    groups = [
        [c for c in cells if (c.n, c.p) == key] for key in sorted({(c.n, c.p) for c in cells})
    ]
    found = [
        exponents([c for i in rng.integers(len(groups), size=len(groups)) for c in groups[i]])
        for _ in range(DRAWS)
    ]
    return np.quantile(np.array(found), (0.025, 0.975), axis=0).T


def srgd_rates(out: Path, *, quick: bool = False, seeds: int = 10) -> Path:
    """Measure; write ``srgd_rates.csv``, ``.png`` and ``srgd_exponents.csv`` into ``out``.

    Args:
        out: made if it does not exist.
        quick: n up to 1e4 and two seeds, in about two minutes; else n up to 1e6, in about a
            quarter of an hour on one core.
        seeds: repetitions, at least 2.

    Returns the path of the table.
    """
    sizes = (
        (1000, 3162, 10_000) if quick else (1000, 3162, 10_000, 31_623, 100_000, 316_228, 1_000_000)
    )
    table = out / "srgd_rates.csv"
    cells: list[Cell] = []
    for n, p, kind in itertools.product(sizes, (10, 100), ("squared", "logistic")):
        cells += measure(Task(kind, p), n, (0.5, 2.0, math.inf), 2 if quick else seeds)
        # after every cell: a long run may be cut short
        write_rows(table, Cell, cells)
    write_dicts(out / "srgd_exponents.csv", fitted_exponents(cells))
    draw(cells, out / "srgd_rates.png")
    return table


def fitted_exponents(cells: Sequence[Cell]) -> list[dict[str, object]]:
    """For each loss and method: the exponents of both fits, and the plain slopes in n."""
    rows: list[dict[str, object]] = []
    for kind, method in itertools.product(sorted({c.loss for c in cells}), METHODS):
        mine = [c for c in cells if c.loss == kind and c.method == method]
        row: dict[str, object] = {"loss": kind, "method": method}
        for name, found, (low, high) in zip(
            ("alpha", "gamma"), exponents(mine), intervals(mine), strict=True
        ):
            row |= {
                name: round(found, 3),
                f"{name} low": round(low, 3),
                f"{name} high": round(high, 3),
            }
        for name, found in zip(("alpha", "gamma"), exponents(mine, 2), strict=True):
            row[f"{name}, squares added"] = round(found, 3)
        for p, epsilon in itertools.product((10, 100), (0.5, 2.0, math.inf)):
            row[f"slope p={p} epsilon={epsilon:g}"] = round(
                slope(c for c in mine if c.p == p and c.epsilon == epsilon), 3
            )
        rows.append(row)
    return rows


def write_dicts(path: Path, rows: Sequence[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Excess risk against n, a panel for each loss, dimension and epsilon."""
    plt = pyplot()
    colours = dict(
        zip(METHODS, ("#0060a8", "#6cb6f2", "#b04a00", "#6b7280", "#c9a227"), strict=True)
    )
    panels = list(itertools.product(("squared", "logistic"), (10, 100)))
    figure, axes = plt.subplots(
        2, len(panels), figsize=(13, 6.4), sharex=True, sharey="col", layout="constrained"
    )
    for row, epsilon in enumerate((0.5, 2.0)):
        for column, (kind, p) in enumerate(panels):
            axis = axes[row][column]
            for method, colour in colours.items():
                mine = [
                    c
                    for c in cells
                    if (c.loss, c.p, c.epsilon, c.method) == (kind, p, epsilon, method)
                ]
                axis.errorbar(
                    [c.n for c in mine],
                    [c.excess for c in mine],
                    yerr=[c.standard_error for c in mine],
                    color=colour,
                    marker="o",
                    markersize=3.5,
                    linewidth=2 if method == "accelerated SRGD" else 1.2,
                    label=method,
                )
            first = next(
                c
                for c in cells
                if (c.loss, c.p, c.epsilon, c.method) == (kind, p, epsilon, "accelerated SRGD")
            )
            n = np.array(sorted({c.n for c in cells}), dtype=np.float64)
            rate = 1 / np.sqrt(n) + math.sqrt(p) / (epsilon * n)
            axis.plot(
                n,
                0.6 * first.excess * rate / rate[0],
                color="#1a2431",
                linestyle=":",
                linewidth=1.2,
                label="rate",
            )
            axis.set(xscale="log", yscale="log", title=f"{kind}, p = {p}, ε = {epsilon:g}")
            if row == 1:
                axis.set_xlabel("records n (each seen once)")
        axes[row][0].set_ylabel("excess population risk")
    axes[0][0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
