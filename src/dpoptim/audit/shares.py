"""Exact audit of linear estimators: weights of classes and rows, persons, entries in pieces.

With one release, and a person taken out of the table, how far the released sum moves over the
noise's deviation is the mu that the fit really has.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import coo_array

from dpoptim.accounting import gdp_epsilon
from dpoptim.audit.finding import Finding, finding, refuted_by
from dpoptim.audit.statistics import DELTA, MU, shifts_seen
from dpoptim.data.sparse_rows import WIDE
from dpoptim.estimators import DPLinearRegression, DPLogisticRegression

OWNERS = np.array([0, 1, 1, 2, 2, 2, 3, 4, 4, 5, 5, 5, 5, 5])
LAST = OWNERS == 5
NEARLY = 1 - 1e-5  # of the claim, at least: some is lost to rounding
BUDGET: Any = {"epsilon": gdp_epsilon(MU, DELTA), "delta": DELTA, "data_norm": 1.0, "noise_seed": 0}


def logistic(**settings: Any) -> DPLogisticRegression:
    """A first gradient, clipped, is all that is released."""
    return DPLogisticRegression(**BUDGET, classes=[0, 1], solver="momentum-gd", steps=1, **settings)


def sums(**settings: Any) -> DPLinearRegression:
    return DPLinearRegression(
        **BUDGET, target_bound=1.0, solver="sufficient-statistics", fit_intercept=False, **settings
    )


class Fit(NamedTuple):
    """A fit that is attacked.

    Attributes:
        make: makes the estimator.
        weight: of the last person's rows, where others have 1; None: no weights.
        pieces: in which each entry of a wide sparse table is stored; its rows are records.
    """

    make: Callable[[], Any]
    weight: float | None = None
    pieces: int = 0

    def moved(self, x: Any, y: Any, there: Any) -> None:
        """Fit the rows that are there."""
        weights = None if self.weight is None else np.where(LAST, self.weight, 1.0)[there]
        model = self.make().set_params(rows_per_person=3)
        if self.pieces:
            model.fit(in_pieces(x[there], self.pieces), y[there], weights)
        else:
            model.fit(x[there], y[there], weights, persons=OWNERS[there])


FITS: dict[str, Fit] = {
    "logistic": Fit(logistic),
    "logistic, weighted classes": Fit(lambda: logistic(class_weight={0: 1.0, 1: 4.0})),
    "logistic, weighted rows": Fit(logistic, weight=1e6),
    "logistic, sparse": Fit(logistic, weight=1e6, pieces=4),
    "regression sums": Fit(sums),
    "regression sums, weighted rows": Fit(lambda: sums(weight_bound=2.0), weight=1e6),
}


def in_pieces(x: Any, pieces: int) -> coo_array:
    """A sparse table that `SparseProblem` goes through, each entry stored so often, in parts."""
    row, column = x.nonzero()
    entries = np.tile(x[row, column] / pieces, pieces)
    places = np.tile(row, pieces), np.tile(column, pieces)
    return coo_array((entries, places), shape=(len(x), WIDE + 1))


def real_mu(name: str, x: Any, y: Any) -> float:
    """How far the sum moves without the last person, or record, in deviations of its noise."""
    fit = FITS[name]
    gone = np.arange(len(x)) == len(x) - 1 if fit.pieces else LAST
    with shifts_seen() as seen:
        for there in (np.ones(len(x), bool), ~gone):
            fit.moved(x, y, there)
    (with_them, deviation), (without, _) = seen
    return float((with_them - without).norm()) / deviation


def persons_shown(trials: int, seed: int) -> Finding:
    """Attack a person of agreeing rows in the least sensitive of the fits."""
    least = min(real_mu(name, *table(np.ones(5))) for name in FITS)
    claimed = gdp_epsilon(MU, DELTA)
    return finding(claimed, gdp_epsilon(least, DELTA), claimed, 0)


def table(signs: Any) -> tuple[Any, Any]:
    """Rows and labels, those of the last person far out, each with its sign."""
    x = np.sin(1.7 * np.arange(len(OWNERS) * 4.0)).reshape(-1, 4)
    y = (np.arange(len(OWNERS)) % 2).astype(np.int64)
    x[LAST], y[LAST] = 1e3 * signs[:, None], 1
    return x, y


def shares() -> str:
    """A person of five rows that agree, and of five that cancel: what is claimed, and not more."""
    findings = []
    for name in FITS:
        for signs in (np.ones(5), np.array([1.0, -1, 1, -1, 1])):
            mu = real_mu(name, *table(signs))
            if not mu <= MU * (1 + 1e-9):
                findings.append(f"{name}: a person moved the sum by {mu / MU:.4g} of the claim")
            if (signs > 0).all() and mu < NEARLY * MU:
                findings.append(f"{name}: agreeing rows reach {mu / MU:.4g} of the claim alone")
    return refuted_by(findings)
