"""Private searches audited exactly: what trials could cost by their noise, against the charge."""

from typing import Any
from unittest.mock import patch

import dp_accounting
import numpy as np
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from scipy.optimize import brentq
from scipy.stats import norm

from dpoptim.accounting import compute_epsilon, gdp_epsilon, gdp_mu
from dpoptim.accounting.choose_profile import Accountant
from dpoptim.accounting.ledger import Ledger
from dpoptim.audit.finding import DELTA, MU, Finding, finding
from dpoptim.estimators import DPLogisticRegression
from dpoptim.noise.trials import logarithmic_parameter
from dpoptim.tuning.search import DPSearchCV
from dpoptim.tuning.search_event import SHAPE, search_event

TRIALS = 8.0
EPSILON = gdp_epsilon(MU, DELTA)  # of a whole search: what other audits of one Gaussian claim
RELATION = "zero-out"
ROUNDING = 1e-3
CUTS = (-np.inf, *np.arange(-3.0, 0.0, 0.125))
CELLS, _FARTHEST = 4_001, 10.0


def searches() -> str:
    """A search on made-up records: empty, or what trials cost beyond charge or claim."""
    fits: list[float] = []
    honest = DPLogisticRegression.fit

    def fit(self: Any, *data: Any, persons: Any) -> Any:
        fits.append(gdp_mu(self.epsilon, self.delta))
        return honest(self, *data, persons=persons)

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


def search_shown(accountant: Accountant, trials: int, seed: int) -> Finding:
    """Attack the worst scores found, of Gaussian trials each as sharp as it may be; computed.

    A score rises with nothing: its best outputs are those below a cut, which the record's presence
    makes rarer, then come the largest, then ever smaller ones. So where the record is present a
    large output meets fewer better ones, beside being likelier itself. The chance that the best of
    K lies in a cell of outputs is a difference of K's generating function, and the attack's
    hockey-stick divergence a sum over cells: a lower bound whatever they are.

    Args:
        accountant: whose claim is audited, for the noise of a search as it is charged.
    """
    event = search_event(EPSILON, DELTA, RELATION, TRIALS)
    claimed = compute_epsilon(event, DELTA, RELATION, accountant=accountant).epsilon
    return finding(claimed, worst_orders(1 / event.event.noise_multiplier, TRIALS), claimed, 0)


def worst_orders(mu: float, mean: float, delta: float = DELTA) -> float:
    """The largest epsilon that an order of this kind shows, of mean > 1 trials of mu each."""
    return max(worst_order(mu, mean, cut, delta) for cut in CUTS)


def worst_order(mu: float, mean: float, cut: float, delta: float = DELTA) -> float:
    """The epsilon, at delta, of the best of K outputs of N(0, 1), or N(mu, 1), in that order.

    Args:
        cut: outputs below have the best scores; -inf: scores fall as outputs do.
    """
    falling = np.linspace(_FARTHEST, max(cut, -_FARTHEST), CELLS)
    better = [norm.cdf(cut - shift) + norm.sf(falling - shift) for shift in (0.0, mu)]
    absent, present = (-np.diff(best_worse(1 - chance, mean)) for chance in better)

    def over(epsilon: float) -> float:
        return float(np.maximum(present - np.exp(epsilon) * absent, 0).sum() - delta)

    return float(brentq(over, 0.0, 100.0)) if over(0.0) > 0 else 0.0


def best_worse(worse: np.ndarray, mean: float) -> np.ndarray:
    """The chance that the best of K trials is among those that one is in with chance `worse`."""
    gamma = logarithmic_parameter(mean)
    return np.asarray(np.log1p(-(1 - gamma) * worse) / np.log(gamma))
