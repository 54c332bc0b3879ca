"""Settings chosen on public data that is like the private: free, and the first thing to do."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.model_selection import ParameterGrid

from dpoptim.accounting.gaussian import gdp_epsilon, gdp_mu
from dpoptim.data.sparse_rows import count_rows
from dpoptim.estimators.repeats import uncounted


@dataclass(frozen=True)
class Tried:
    """A candidate: its settings, and its scores on the public hold-out, one a seed."""

    settings: Mapping[str, Any]
    scores: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores)


def tune_on_public(
    estimator: Any,
    grid: Mapping[str, Sequence[Any]],
    train: tuple[Any, NDArray[Any]],
    test: tuple[Any, NDArray[Any]],
    *,
    epsilon: float,
    delta: float,
    n: int | None = None,
    seeds: int = 3,
    persons: Any = None,
) -> list[Tried]:
    """Train every candidate with the noise that it would have on private records.

    Args:
        estimator: `DPLogisticRegression` or `DPLinearRegression`.
        grid: as for ``GridSearchCV``.
        train, test: public tables (x, y).
        epsilon, delta: of the private run that these settings are for.
        n: records (or persons) of the private run, if they are not as many as in ``train``: the
            noise in a mean falls with their number, so the proxies are given more or less of it to
            match.
        seeds: runs of each candidate, whose noise repeats.
        persons: owners of the rows of ``train``, where the private run is to protect persons.

    Returns:
        The candidates, the best mean score first.

    Raises:
        ValueError: a setting that the estimator has not, or refuses.

    **Guarantee.** None: the data is public, and no private record is touched.

    Examples:
        >>> import numpy as np
        >>> from dpoptim.estimators import DPLogisticRegression
        >>> from dpoptim.tuning import tune_on_public
        >>> x = np.random.default_rng(0).uniform(-1, 1, (1_000, 3))
        >>> public = x, x[:, 0] > 0
        >>> model = DPLogisticRegression(classes=[False, True])
        >>> tried = tune_on_public(
        ...     model, {"clip_norm": [0.5, 5.0]}, public, public, epsilon=1.0, delta=1e-6, seeds=1
        ... )
        >>> len(tried)
        2
    """
    units = count_rows(train[0]) if persons is None else len(np.unique(np.asarray(persons)))
    mu = gdp_mu(epsilon, delta) * (1.0 if n is None else n / units)
    found = []
    for settings in ParameterGrid(grid):
        scores = []
        for seed in range(seeds):
            model = clone(estimator).set_params(
                **settings,
                epsilon=gdp_epsilon(mu, delta),
                delta=delta,
                noise_seed=seed,
                ledger=None,
            )
            with uncounted():
                model.fit(*train, persons=persons)
            scores.append(float(model.score(*test)))
        found.append(Tried(settings, tuple(scores)))
    return sorted(found, key=lambda tried: -tried.mean)
