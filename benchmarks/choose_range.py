"""How well few records are predicted, and averaged, in bounds far wider than they are.

Made-up tables of seven shapes (normal, log-normal, heavy-tailed, with many zeros, uniform, two
clusters, nearly exact), with bounds 8 to a million times as wide as targets scatter, 200 to 5,000
records of 1 to 50 columns, epsilon 0.3 to 4. On other seeds of these the constants of
``estimators/target_quantiles.py`` and ``target_prices.py`` were chosen.

Run: ``python benchmarks/choose_range.py --seed 100`` prints a line for each width; two minutes.
"""

import argparse
import warnings
from typing import Any, NamedTuple

import numpy as np

import dpoptim
from dpoptim.estimators import DPLinearRegression

SHAPES = ("normal", "lognormal", "student", "zeros", "uniform", "clusters", "steep")
WIDTHS = (8.0, 80.0, 3e3, 1e6)  # of the bounds, where targets scatter by about 1
NEW_ROWS = 3_000
Floats = np.ndarray[Any, np.dtype[np.float64]]


class Case(NamedTuple):
    """A table, and how it is fitted."""

    shape: str
    n: int
    columns: int
    epsilon: float
    width: float
    place: str
    seed: int

    @classmethod
    def drawn(cls, rng: np.random.Generator, seed: int) -> "Case":
        return cls(
            str(rng.choice(SHAPES)),
            int(rng.choice([200, 500, 1_000, 2_000, 5_000])),
            int(rng.choice([1, 3, 10, 50], p=[0.2, 0.35, 0.3, 0.15])),
            float(rng.choice([0.3, 0.5, 1, 2, 4])),
            float(rng.choice(WIDTHS)),
            str(rng.choice(["end", "middle", "far"])),
            seed,
        )

    @property
    def bounds(self) -> tuple[float, float]:
        high = self.width + 40 * (self.place == "far")
        return -high if self.place == "middle" else 0.0, high

    def table(self) -> tuple[Floats, Floats]:
        """Columns in [-1, 1], and targets near an end of the bounds, their middle, or neither."""
        rng, rows = np.random.default_rng(self.seed), self.n + NEW_ROWS
        x = rng.uniform(-1, 1, (rows, self.columns))
        weights, used = np.zeros(self.columns), min(self.columns, 5)
        weights[:used] = rng.normal(size=used)
        signal, noise = x @ weights / np.sqrt(used / 3), rng.normal(size=rows)
        y = {
            "normal": 3 + signal + 0.6 * noise,
            "lognormal": np.exp(0.6 * signal + 0.4 * noise),
            "student": 3 + signal + 0.5 * rng.standard_t(3, rows),
            "zeros": np.where(signal + noise > 0.6, np.exp(0.5 * signal + 0.5 * noise), 0.0),
            "uniform": 3 + signal + rng.uniform(-1, 1, rows),
            "clusters": np.where(signal + 0.5 * noise > 0, 1.0, 6.0) + 0.2 * noise,
            "steep": 3 + 2 * signal + 0.05 * noise,
        }[self.shape]
        return x, y + {"end": 0.0, "middle": -3.0, "far": 30.0}[self.place]

    def r2(self) -> float:
        """Of a linear regression on new rows."""
        x, y = self.table()
        model = DPLinearRegression(
            self.epsilon, target_bound=self.bounds, noise_seed=self.seed
        ).fit(x[: self.n], y[: self.n])
        return float(model.score(x[self.n :], y[self.n :]))

    def error_of_mean(self) -> float:
        """Of the records' mean, in standard deviations of theirs."""
        y = self.table()[1][: self.n]
        found = dpoptim.private_mean(y, *self.bounds, epsilon=self.epsilon, noise_seed=self.seed)
        return abs(float(found.value) - float(y.clip(*self.bounds).mean())) / float(y.std())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--tables", type=int, default=200)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    rng = np.random.default_rng(given.seed)
    cases = [Case.drawn(rng, given.seed * 10_000 + number) for number in range(given.tables)]
    scores = np.array([(case.r2(), case.error_of_mean()) for case in cases])
    for title, chosen in (
        ("all", [True] * len(cases)),
        ("n epsilon >= 500", [case.n * case.epsilon >= 500 for case in cases]),
        *((f"bounds {width:g}", [case.width == width for case in cases]) for width in WIDTHS),
    ):
        r2, error = scores[chosen].T
        print(
            f"{title:18} {sum(chosen):4} tables: R2 {np.median(r2):.4g} (median), below -0.05 in "
            f"{(r2 < -0.05).mean():.0%}; error of the mean {np.median(error):.3g} (median), above "
            f"0.2 in {(error > 0.2).mean():.0%}"
        )


if __name__ == "__main__":
    main()
