"""Exact audit of linear estimators by weights of classes, and of several rows of a person.

With one release, and a person taken out of the table, how far the released sum moves over the
noise's deviation is the mu that the fit really has.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from dpoptim.accounting import gdp_epsilon
from dpoptim.audit.finding import Finding, finding
from dpoptim.audit.statistics import DELTA, MU, shifts_seen
from dpoptim.estimators import DPLinearRegression, DPLogisticRegression

OWNERS = np.array([0, 1, 1, 2, 2, 2, 3, 4, 4, 5, 5, 5, 5, 5])
LAST = OWNERS == 5
NEARLY = 1 - 1e-5  # of the claim, at least: some is lost to rounding
BUDGET: Any = {"epsilon": gdp_epsilon(MU, DELTA), "delta": DELTA, "data_norm": 1.0, "noise_seed": 0}


def logistic(**settings: Any) -> DPLogisticRegression:
    """A first gradient, clipped, is all that is released."""
    return DPLogisticRegression(**BUDGET, classes=[0, 1], solver="momentum-gd", steps=1, **settings)


def sums() -> DPLinearRegression:
    return DPLinearRegression(
        **BUDGET, target_bound=1.0, solver="sufficient-statistics", fit_intercept=False
    )


FITS: dict[str, Callable[[], Any]] = {
    "logistic": logistic,
    "logistic, weighted classes": lambda: logistic(class_weight={0: 1.0, 1: 4.0}),
    "regression sums": sums,
}


def real_mu(name: str, x: Any, y: Any) -> float:
    """How far the sum moves without the last person, in deviations of its noise."""
    with shifts_seen() as seen:
        for rows in (np.ones(len(x), bool), ~LAST):
            FITS[name]().set_params(rows_per_person=3).fit(x[rows], y[rows], persons=OWNERS[rows])
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
    return "refuted: " + "; ".join(findings) if findings else ""
