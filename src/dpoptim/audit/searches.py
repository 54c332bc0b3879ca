"""Private searches audited exactly: what trials could cost by their noise, against the charge."""

from typing import Any
from unittest.mock import patch

import dp_accounting
import numpy as np
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from scipy.optimize import brentq
from scipy.stats import norm

from dpoptim.accounting import compute_epsilon, gdp_mu
from dpoptim.accounting.ledger import Ledger
from dpoptim.audit.finding import Finding, finding
from dpoptim.estimators import DPLogisticRegression
from dpoptim.tuning.search import SHAPE, DPSearchCV, search_event

__all__ = ["search_shown", "searches"]

TRIALS, EPSILON, DELTA = 8.0, 1.0, 1e-5
RELATION = "zero-out"
ROUNDING = 1e-3


def searches() -> str:
    """A search on made-up records: empty, or what trials cost beyond charge or claim."""
    fits: list[float] = []
    honest = DPLogisticRegression.fit

    def fit(self: Any, *arguments: Any) -> Any:
        fits.append(gdp_mu(self.epsilon, self.delta))
        return honest(self, *arguments)

    x = np.linspace(-1, 1, 40)[:, None]
    estimator = DPLogisticRegression(data_norm=1.0, classes=[0, 1])
    with Ledger(neighboring=RELATION) as ledger, patch.object(DPLogisticRegression, "fit", fit):
        search = DPSearchCV(
            estimator,
            {"steps": [1, 2]},
            epsilon=EPSILON,
            delta=DELTA,
            mean_trials=TRIALS,
            ledger=ledger,
            noise_seed=0,
        ).fit(x, (x[:, 0] > 0).astype(int))
        charged = [compute_epsilon(e.event, DELTA, RELATION).epsilon for e in ledger.entries()]
    trial = dp_accounting.GaussianDpEvent(1 / max(fits))
    cost = compute_epsilon(RepeatAndSelectDpEvent(trial, TRIALS, SHAPE), DELTA, RELATION).epsilon
    said = {"charged": sum(charged), "claimed": search.privacy_.epsilon}
    return "; ".join(
        f"refuted: a search costs epsilon {cost:.3g}, and {number:.3g} was {name}"
        for name, number in said.items()
        if number < cost * (1 - ROUNDING)
    )


def search_shown(trials: int, seed: int) -> Finding:
    """The best score of a search whose trials each show a record as sharply as they may.

    The largest of K Gaussians, K logarithmic: both distribution functions are known, so the error
    rates are computed. The claim is the Renyi bound of Papernot and Steinke (2022), Theorem 2,
    which holds for every trial of that price; this one reaches six tenths of it.
    """
    event = search_event(EPSILON, DELTA, RELATION, TRIALS)
    claimed = compute_epsilon(event, DELTA, RELATION).epsilon
    gamma = brentq(lambda g: (1 - g) / (g * np.log(1 / g)) - TRIALS, 1e-9, 1 - 1e-9)

    def best_below(score: np.ndarray) -> np.ndarray:
        """The generating function of K at the chance that one trial is below."""
        return np.log1p(-(1 - gamma) * norm.cdf(score)) / np.log(gamma)

    score = np.linspace(-8, 12, 20_001)
    absent, present = best_below(score), best_below(score - 1 / event.event.noise_multiplier)
    shown = 0.0
    for one, other in ((absent, present), (1 - present, 1 - absent)):
        for p, q in ((one, other), (other, one)):
            seen = (p > 1e-13) & (q > DELTA)
            shown = max(shown, float(np.log((q[seen] - DELTA) / p[seen]).max()))
    return finding(claimed, shown, claimed, 0)
