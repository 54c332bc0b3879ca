"""Columns brought to mean 0 and standard deviation 1, as a noisy sum knows them."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np

from dpoptim.estimators.atomic_fits import whole_fit
from dpoptim.estimators.settings import refuse_other_types
from dpoptim.gate import FilteredGate
from dpoptim.preprocessing.private_step import BoundedColumns, SummedStep, trying
from dpoptim.statistics import (
    BOUND_ROUNDING,
    Floats,
    Price,
    guarantee_of,
    noisy_sum,
    paid_gate,
    sum_of_cells,
)

Missing = Literal["keep", "mean"]
SHARE, ROUNDS = 0.2, 5  # of a budget's mu^2, at most, that finds ranges
DEVIATIONS = 4.0  # half a range, in standard deviations of values and noise
VISIBLE = 1 / 3  # noise of a round over a variance that shows: noise alone seldom looks so
NARROWER = 0.9  # a part of a range that is worth going on in
HIDDEN = (
    "noise is large beside what was found in {} column{} (standard_error_ beside scale_): a "
    "narrower public range, more records or a larger epsilon"
)
LEAST_SPREAD = 1e-3  # standard deviation, in half ranges, that a column is taken to have at least


def moments(sums: Floats, n: int) -> tuple[Floats, Floats, Floats]:
    """Means and variances in half ranges, and how many values are there; of noisy sums."""
    total, centred_squares, absent = sums
    present = np.clip(n - absent, max(1.0, 0.01 * n), n)
    mean = np.clip(total / present, -1.0, 1.0)
    return mean, centred_squares / present + 0.5 - mean**2, present


@dataclass(kw_only=True, eq=False, repr=False)
class DPStandardScaler(BoundedColumns, SummedStep):
    """Scale columns by their privately measured means and standard deviations.

    Args:
        lower, upper: public range of the columns: one number, or one for each. Values beyond are
            cut to it.
        epsilon: the budget, > 0; None where a `PrivatePipeline` decides.
        delta: in (1e-14, 1), or ``"auto"``: at most 1e-5 and 1/(10 n), n being public.
        with_mean: whether means are taken off. Without, 0 stays 0 where a column's range holds it,
            and a sparse table stays sparse.
        missing: ``"keep"`` leaves missing values (NaN) missing; ``"mean"`` fills them with the
            column's mean, which is 0 after scaling (by ``with_mean``) and costs nothing more.
        neighboring: ``"zero-out"``, ``"replace-one"``, or ``"add-or-remove-one"`` with a public
            ``n``. None: as the ledger counts; else zero-out.
        n: public number of records; needed where the relation hides it.
        ledger: where it is charged; None: nowhere.
        noise_seed: repeatable noise, for tests.

    Attributes:
        mean_, scale_: shape (columns,), as released.
        standard_error_: of ``mean_`` by the noise, shape (columns,); ``privacy_`` notes how many
            columns it is large for.
        privacy_: `Guarantee` of the fit.

    A public range may be far wider than a column: up to a fifth of the budget's mu^2 finds the part
    of it that values take up, four standard deviations about their mean, in a few rounds.

    **Guarantee.** ``privacy_``, for every table. With u the value in half ranges from the middle,
    a record adds ``(u, u^2 - 1/2, 0)`` for each column, or ``(0, 0, 1)`` where its value is
    missing: at most sqrt(5/4) long, to which each is cut, and sqrt(5/4 columns) for all. One
    vector, one Gaussian a round, in the range that the rounds before have released.

    Examples:
        >>> import numpy as np
        >>> from dpoptim.preprocessing import DPStandardScaler
        >>> x = np.random.default_rng(0).normal(50, 10, (5_000, 1))
        >>> scaler = DPStandardScaler(lower=0, upper=100, epsilon=1.0).fit(x)
        >>> bool(abs(scaler.mean_[0] - 50) < 3)
        True
    """

    missing: Missing = "keep"
    with_mean: bool = True

    def norm_bound(self, columns: int) -> float:
        return math.sqrt(1.25 * columns)

    @whole_fit
    def fit(self, X: Any, y: Any = None) -> Self:
        """Measure. Args: X of shape (n, columns), NaN where a value is missing.

        Raises:
            ValueError: a bad table or setting, before anything is spent.
        """
        refuse_other_types(self)
        x = self._numbers(X, reset=True)
        price, bound = self._price(len(x)), self.norm_bound(x.shape[1])
        middle, half = self._bounds(x.shape[1])
        if trying():
            released, deviation = np.full((3, x.shape[1]), float(price.n)), 1.0
            self._released(released, 1.0, price)
        else:
            with paid_gate(
                price.mu,
                self.relation,
                label=self._named,
                ledger=self.ledger,
                noise_seed=self.noise_seed,
            ) as gate:
                released, deviation, (middle, half) = self._measured(
                    gate, x, (middle, half), bound * BOUND_ROUNDING, price
                )
            self._state(guarantee_of(gate, price.delta, noise_seed=self.noise_seed), price)
        mean, variance, present = moments(released, price.n)
        least = max(LEAST_SPREAD, min(1.0, deviation / price.n))
        self.mean_: Floats = middle + half * mean
        self.scale_: Floats = half * np.sqrt(np.clip(variance, least**2, 1.0))
        self.standard_error_: Floats = half * np.minimum(deviation / present, 1.0)
        self._note_noise()
        return self

    def _measured(
        self, gate: FilteredGate, x: Any, ends: tuple[Floats, Floats], bound: float, price: Price
    ) -> tuple[Floats, float, tuple[Floats, Floats]]:
        """The last round's sums, their noise's deviation, and the ranges they were measured in.

        **Guarantee.** Every round is mu-GDP for its own mu, whatever ranges the ones before have
        released, and their mu^2 add up to at most that of the price.
        """
        middle, half = ends
        round_mu = price.mu * math.sqrt(SHARE / ROUNDS)
        noise = gate.deviation(bound, round_mu) / price.n
        seen = np.zeros(len(half), dtype=bool)  # columns whose scatter shows
        for _ in range(ROUNDS):
            if DEVIATIONS**2 * noise >= 1:  # it would hide where they are
                break
            released = self._round(gate, x, (middle, half), bound, round_mu)
            mean, variance, _ = moments(released, price.n)
            part = DEVIATIONS * np.sqrt(np.maximum(variance, 0.0) + noise)
            # Once scatter shows it is not measured in a narrower range, which would cut off what
            # is rare and far away. Nor where moments contradict each other, as where n is wrong.
            wrong = variance < -4 * noise * np.hypot(1.0, 2 * mean)
            seen |= (noise < VISIBLE * variance) | wrong
            narrower = (part < NARROWER) & ~seen
            if not narrower.any():
                break
            middle = np.where(narrower, middle + half * mean, middle)
            half = np.where(narrower, half * part, half)
        left = math.sqrt(price.mu**2 - gate.filter.spent**2) * (1 - 1e-10)
        last = self._round(gate, x, (middle, half), bound, left)
        return last, gate.deviation(bound, left), (middle, half)

    def _round(
        self, gate: FilteredGate, x: Any, ends: tuple[Floats, Floats], bound: float, mu: float
    ) -> Floats:
        """Noisy sums of (u, u^2 - 1/2, missing), shape (3, columns), u in half ranges."""
        middle, half = ends

        def cells(values: Floats, columns: Any) -> Floats:
            scaled, missing = self._in_range(values, middle[columns], half[columns])
            return np.stack([scaled, np.where(missing, 0.0, scaled**2 - 0.5), missing])

        gate.open(mu)
        total = sum_of_cells(x, cells, bound / BOUND_ROUNDING)
        return noisy_sum(gate, total.ravel(), norm_bound=bound, mu=mu).reshape(total.shape)

    def _note_noise(self) -> None:
        """Say in ``privacy_`` which columns noise hides, by released numbers."""
        hidden = int((self.standard_error_ > self.scale_ / 2).sum())
        if hidden and not trying() and self.privacy_ is not None:
            said = HIDDEN.format(hidden, "" if hidden == 1 else "s")
            self.privacy_ = replace(self.privacy_, notes=(*self.privacy_.notes, said))

    def transform(self, X: Any) -> Any:
        """``(X - mean_) / scale_``, X cut to the public range; shape (n, columns).

        Of a sparse table a dense one, unless ``with_mean=False`` keeps 0 in all columns.
        """
        return self._mapped(X)

    def _map(self, x: Floats, columns: Any) -> Floats:
        middle, half = (ends[columns] for ends in self._bounds(self.n_features_in_))
        mean, scale = self.mean_[columns], self.scale_[columns]
        if self.missing == "mean":
            x = np.where(np.isnan(x), mean, x)
        cut = np.clip(x, middle - half, middle + half)
        return (cut - mean if self.with_mean else cut) / scale
