"""Private searches audited exactly: what trials could cost by their noise, against the charge."""

from typing import Any
from unittest.mock import patch

import dp_accounting
import numpy as np
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from dpoptim.accounting import compute_epsilon, gdp_mu
from dpoptim.accounting.ledger import Ledger
from dpoptim.estimators import DPLogisticRegression
from dpoptim.tuning.search import SHAPE, DPSearchCV

__all__ = ["searches"]

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
