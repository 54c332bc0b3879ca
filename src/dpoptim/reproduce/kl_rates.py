"""Menart et al. 2024: the rates of Theorems 1, 4, 5 by slopes on losses of known parameters.

The theorems speak of ``x = sqrt(d) / (n sqrt(rho))`` alone, so x is varied through rho at a small
n: the runs are real ones, clipping and noise included, but their budgets are no privacy anybody
would ask for. The experiments named after a rho keep that and vary n. Data are made up, hence
public.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpoptim.reproduce.kl_losses import network, power, sine, steep_valley, tilted
from dpoptim.reproduce.results import pyplot, write_rows
from dpoptim.solvers import Budget, Objective, Result, adaptive_gd, kl_spider

EXPONENTS = (1.25, 1.5, 2.0)
DELTA = 1e-6
PRACTICAL_RHO = 0.5  # epsilon 5.6 at delta 1e-6


@dataclass(frozen=True)
class Run:
    """One run of one solver."""

    experiment: str
    kappa: float
    x: float
    seed: int
    measured: float  # excess risk, or the number of steps
    releases: int


@dataclass(frozen=True)
class Slope:
    """A found slope of log measured against log x, least squares; and the theorem's."""

    experiment: str
    kappa: float
    slope: float
    expected: float

    @property
    def error(self) -> float:
        """Relative to what is expected."""
        return self.slope / self.expected - 1


@dataclass(frozen=True)
class Experiment:
    """A solver on a loss over a range of x."""

    name: str
    kappa: float
    expected: float  # the theorem's exponent of x
    objective: Callable[[int], Objective]  # over n records
    n: int
    solve: Callable[[Objective, Budget, int], Result]
    largest: float  # of x
    smallest: float
    counts_steps: bool = False
    rho: float | None = None  # None: varied; else n is varied, from two records on

    def runs(self, points: int, seeds: int) -> Iterator[Run]:
        for wanted in np.geomspace(self.largest, self.smallest, points):
            objective, rho = self.problem(float(wanted))
            x = math.sqrt(objective.dimension / rho) / objective.n
            for seed in range(seeds):
                result = self.solve(objective, Budget(delta=DELTA, rho=rho), seed)
                steps = sum(step.kind == "gradient" for step in result.trace)
                measured = (
                    steps
                    if self.counts_steps
                    else objective.risk(result.weights, data_is_public=True)
                )
                yield Run(self.name, self.kappa, x, seed, float(measured), len(result.trace))

    def problem(self, x: float) -> tuple[Objective, float]:
        """The records and the rho that make x; the number of records is even."""
        if self.rho is None:
            objective = self.objective(self.n)
            return objective, objective.dimension / (objective.n * x) ** 2
        dimension = self.objective(2).dimension
        return self.objective(2 * round(math.sqrt(dimension / self.rho) / (2 * x))), self.rho


def experiments() -> list[Experiment]:
    """All of them, with the parameters that their losses are known to have."""
    found = []
    for kappa, rho in itertools.product(EXPONENTS, (None, PRACTICAL_RHO)):
        tau = kappa / (kappa - 1)
        found.append(
            Experiment(
                "KL-Spider, |w|^tau" + ("" if rho is None else f", rho = {rho:g}"),
                kappa,
                kappa,
                lambda n, k=kappa: tilted(power(k, 20), n),  # type: ignore[misc]
                64,
                lambda o, b, s, k=kappa, t=tau: kl_spider(  # type: ignore[misc]
                    o,
                    None,
                    b,
                    lipschitz=1.5,
                    smoothness=4.0,
                    kl_gamma=t ** (-1 / k),
                    kl_exponent=k,
                    risk_bound=1 / t,
                    noise_seed=s,
                ),
                largest=3e-3,
                smallest=1e-5 if rho is None else 3e-4,
                rho=rho,
            )
        )
    for kappa, rho in itertools.product(EXPONENTS, (None, PRACTICAL_RHO)):
        large = 1_000_000 if kappa == 2 else 100_000
        found.append(
            Experiment(
                "adaptive GD, |w|^tau" + ("" if rho is None else f", rho = {rho:g}"),
                kappa,
                2 * kappa / (4 - kappa),
                lambda n, k=kappa, d=large if rho is None else 100: tilted(power(k, d), n),  # type: ignore[misc]
                2,
                lambda o, b, s: adaptive_gd(
                    o, None, b, lipschitz=1.5, smoothness=4.0, last_steps=0, noise_seed=s
                ),
                largest=0.03,
                smallest=3e-3 if kappa == 2 else 3e-4 if rho is None else 1e-3,
                rho=rho,
            )
        )
    found += [
        Experiment(
            "KL-Spider, |w|^tau, theorem's constants",
            1.5,
            1.5,
            lambda n: tilted(power(1.5, 20), n),
            64,
            lambda o, b, s: kl_spider(
                o,
                None,
                b,
                lipschitz=1.5,
                smoothness=2.0,
                kl_gamma=3 ** (-1 / 1.5),
                kl_exponent=1.5,
                risk_bound=1 / 3,
                constants="theorem",
                noise_seed=s,
            ),
            largest=1e-5,
            smallest=1e-7,
        ),
        Experiment(
            "adaptive GD, large gradients: steps",
            math.nan,
            -2.0,
            lambda n: tilted(steep_valley(100_000), n),
            2,
            lambda o, b, s: adaptive_gd(
                o, None, b, lipschitz=1.5, smoothness=1.0, last_steps=0, noise_seed=s
            ),
            largest=0.2,
            smallest=0.02,
            counts_steps=True,
        ),
        Experiment(
            "KL-Spider, w^2 + 3 sin^2 w",
            2.0,
            2.0,
            lambda n: tilted(sine(4), n),
            8,
            lambda o, b, s: kl_spider(
                o,
                None,
                b,
                lipschitz=17.0,
                smoothness=8.0,
                kl_gamma=1.7,
                kl_exponent=2,
                risk_bound=37.0,
                noise_seed=s,
            ),
            largest=1e-5,
            smallest=1e-8,
        ),
        Experiment(
            "KL-Spider, network",
            2.0,
            2.0,
            lambda n: network(),
            16,
            lambda o, b, s: kl_spider(
                o,
                None,
                b,
                lipschitz=12.0,
                smoothness=8.0,
                kl_gamma=2.6,
                kl_exponent=2,
                risk_bound=0.42,
                noise_seed=s,
            ),
            largest=1e-6,
            smallest=1e-8,
        ),
    ]
    return found


def kl_rates(out: Path, quick: bool) -> list[Slope]:
    """Measure slopes; write ``kl_rates.csv``, ``kl_slopes.csv``, ``kl_rates.png`` into ``out``.

    Args:
        out: a folder, made if it does not exist.
        quick: three values of x and one seed instead of six and three.
    """
    points, seeds = (3, 1) if quick else (6, 3)
    runs, slopes = [], []
    for experiment in experiments():
        these = list(experiment.runs(points, seeds))
        runs += these
        slope = float(
            np.polyfit(np.log([r.x for r in these]), np.log([r.measured for r in these]), 1)[0]
        )
        slopes.append(Slope(experiment.name, experiment.kappa, slope, experiment.expected))
    write_rows(out / "kl_rates.csv", Run, runs)
    write_rows(out / "kl_slopes.csv", Slope, slopes)
    draw(out / "kl_rates.png", runs, slopes)
    return slopes


def draw_slope(axis: Any, runs: Sequence[Run], slope: Slope) -> None:
    """Draw what an experiment measured at one kappa, and the theorem's line."""
    same = [r for r in runs if r.kappa == slope.kappa or math.isnan(r.kappa)]
    x, y = np.array([r.x for r in same]), np.array([r.measured for r in same])
    kappa = "" if math.isnan(slope.kappa) else f"$\\kappa$={slope.kappa:g}: "
    label = f"{kappa}{slope.slope:.2f} (theorem {slope.expected:.2f})"
    (points,) = axis.loglog(x, y, "o", markersize=4, label=label)
    centre = np.exp(np.log(y).mean() - slope.expected * np.log(x).mean())
    ends = np.array([x.min(), x.max()])
    axis.loglog(ends, centre * ends**slope.expected, "-", color=points.get_color(), linewidth=1)


def draw(path: Path, runs: Sequence[Run], slopes: Sequence[Slope]) -> None:
    """Measured points with their slopes, and lines of the theorems' slopes through the centre."""
    from matplotlib.ticker import NullFormatter

    plt = pyplot()

    names = list(dict.fromkeys(slope.experiment for slope in slopes))
    figure, axes = plt.subplots(
        2, math.ceil(len(names) / 2), figsize=(13, 6.5), layout="constrained"
    )
    for axis, name in zip(axes.flat, names, strict=False):
        for slope in (s for s in slopes if s.experiment == name):
            draw_slope(axis, [r for r in runs if r.experiment == name], slope)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel(r"$\sqrt{d} / (n \sqrt{\rho})$")
        axis.set_ylabel("steps" if name.endswith("steps") else "excess risk")
        axis.legend(fontsize=7)
        axis.xaxis.set_minor_formatter(NullFormatter())
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
