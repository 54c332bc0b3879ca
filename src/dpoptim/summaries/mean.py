"""The mean of a private column, or of persons' means."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dpoptim.accounting.ledger import Ledger
from dpoptim.arguments import real_number
from dpoptim.estimators.settings import Delta
from dpoptim.gate import FilteredGate
from dpoptim.preprocessing.standard_scaler import DEVIATIONS, DPStandardScaler, moments
from dpoptim.privacy_unit import RECORD
from dpoptim.statistics import (
    BOUND_ROUNDING,
    Floats,
    Price,
    guarantee_of,
    noisy_sum,
    paid_gate,
)
from dpoptim.summaries.groups import Groups
from dpoptim.summaries.summary import PERSON, Summary, column_of, owners_of
from dpoptim.summaries.total import LARGEST
from dpoptim.training.batches.privacy_units import Persons

OF_DATES = (
    "found = dpoptim.private_mean(days, 0, 1_826, ...) up to 2024; start + "
    "pd.Timedelta(days=found.value) is a date again."
)
FOR_RANGE = 0.2  # of a grouped mean's mu^2, to find where values lie


class PrivateMean(DPStandardScaler):
    """`DPStandardScaler` of one column, by the name that a ledger has of `private_mean`."""


class GroupedMean(DPStandardScaler):
    """Means by group, by the name that a ledger has of them.

    A fifth of mu^2 finds the range that all values take up, by the scaler's own rounds; the rest is
    for each group's sum and number of values, as one vector. So no mean is divided by a number that
    is private.
    """

    def measure(self, column: Floats, groups: Groups) -> Summary:
        """Release the means of shape (groups,). Args: column: NaN where a value is missing.

        **Guarantee.** mu-GDP for the price's mu. In the sums a record adds (u, 1) to one group,
        with u in [-1, 1] half ranges, at most sqrt 2; two of one group are at most 2 apart, and of
        two groups at most 2, as (u, 1) and (v, 1) stand at right angles there.
        """
        price, ends = self._price(len(column)), self._bounds(1)
        listed = np.where(groups.places >= 0, column, np.nan)
        with paid_gate(
            price.mu,
            self.relation,
            label=self._named,
            ledger=self.ledger,
            noise_seed=self.noise_seed,
        ) as gate:
            middle, half = self._range(gate, listed, ends, price)
            scaled, missing = self._in_range(listed, middle, half)
            rows = np.stack([scaled, np.ones(len(scaled))], axis=1)
            rows[missing] = 0.0
            bound = groups.reach(2.0, math.sqrt(2), self.relation)
            left = math.sqrt(price.mu**2 - gate.filter.spent**2) * (1 - 1e-10)
            gate.open(left)
            total = groups.sums(rows, math.sqrt(2)).ravel()
            sums, present = noisy_sum(gate, total, norm_bound=bound, mu=left).reshape(-1, 2).T
        self._state(guarantee_of(gate, price.delta, noise_seed=self.noise_seed), price)
        assert self.privacy_ is not None
        counted = np.maximum(present, 1.0)
        means = np.clip(sums / counted, -1.0, 1.0)
        deviations = gate.deviation(bound, left) * np.hypot(1.0, means) / counted
        return Summary(middle + half * means, half * np.minimum(deviations, 1.0), self.privacy_)

    def _range(
        self, gate: FilteredGate, column: Floats, ends: tuple[Floats, Floats], price: Price
    ) -> tuple[float, float]:
        """Middle and half width of the range to measure in, within the public one."""
        bound = self.norm_bound(1) * BOUND_ROUNDING
        part = price._replace(mu=price.mu * math.sqrt(FOR_RANGE))
        sums, deviation, (middle, half) = self._measured(gate, column[:, None], ends, bound, part)
        mean, variance, _ = moments(sums, price.n)
        reach = DEVIATIONS * np.sqrt(np.maximum(variance, 0.0) + deviation / price.n)
        low = np.maximum(middle + half * np.maximum(mean - reach, -1.0), ends[0] - ends[1])
        high = np.minimum(middle + half * np.minimum(mean + reach, 1.0), ends[0] + ends[1])
        return float((low + high)[0] / 2), float((high - low)[0] / 2)


def private_mean(
    values: Any,
    lower: float,
    upper: float,
    *,
    epsilon: float,
    delta: Delta = "auto",
    neighboring: str | None = None,
    n: int | None = None,
    ledger: Ledger | None = None,
    noise_seed: int | None = None,
    label: str | None = None,
    persons: Any = None,
    by: Any = None,
    groups: Sequence[Any] | None = None,
) -> Summary:
    """The mean of one number a record, or of persons' means.

    Args:
        values: shape (n,), NaN where one is missing, which is left out. Private.
        lower, upper: public range, which may be wide: a part of the budget finds where values are
            in it. Values beyond are cut to it. It must not be read off the values.
        epsilon, delta: the budget; delta ``"auto"``: at most 1e-5 and 1/(10 n).
        neighboring: ``"zero-out"``, ``"replace-one"``, or ``"add-or-remove-one"`` with ``n``.
            None: as the ledger counts; else zero-out.
        n: public number of records; needed where the relation hides it.
        ledger: where it is charged; None: nowhere.
        noise_seed: repeatable noise, for tests.
        label: public text for the ledger's entry, such as the column's name.
        persons: the owner of each value (numbers or strings), where the guarantee shall protect
            persons who have several. Each person then counts once, by the mean of their values; n
            and delta are of persons.
        by: the group of each record, shape (n,), private: statistics of each group at the price of
            one, since a record is in one. How many records a group has stays private; so never
            hand over a group's records as a table of their own, whose size counts as public.
            Not with ``persons``.
        groups: public list of groups, each once; records of others are left out.

    Returns:
        the mean of values cut to the range that was found, and its error by noise; with ``by``
        arrays of shape (groups,), and one range for all groups.

    Raises:
        ValueError: a bad column or setting, before anything is spent. LedgerError: the budget does
            not admit it.

    **Guarantee.** ``guarantee``, for all values: that of `DPStandardScaler`, whose mean this is.
    With ``persons`` it is of the table with one row a person, a function of that person's values
    alone. With ``by``: a fifth of mu^2 finds the range of all, and a record adds its value and 1 to
    the sum and the number of one group, which are released together (`GroupedMean`).

    Examples:
        >>> import numpy as np
        >>> import dpoptim
        >>> ages = np.random.default_rng(0).uniform(20, 60, 5_000)
        >>> found = dpoptim.private_mean(ages, 0, 120, epsilon=1.0)
        >>> abs(found.value - 40) < 2
        True
    """
    column = column_of(values, OF_DATES)
    for name, end in (("lower", lower), ("upper", upper)):
        if abs(real_number(name, end)) > LARGEST:
            raise ValueError(f"{name} must be at most {LARGEST:g} in size, got {end!r}.")
    # infinite ones are at the ends, like all beyond: to refuse them would tell of them
    column = np.clip(column, lower, upper)
    of_groups = Groups.of(by, groups, len(column), persons)
    unit, owners = RECORD.name, owners_of(persons, len(column), "values")
    if owners is not None:
        column, unit = means_of_persons(column, owners), PERSON
        ledger = None if ledger is None else ledger.of_units(unit)
    scaler = (PrivateMean if by is None else GroupedMean)(
        lower,
        upper,
        epsilon=epsilon,
        delta=delta,
        neighboring=neighboring,
        n=n,
        ledger=ledger,
        noise_seed=noise_seed,
        label=label,
    )
    if isinstance(scaler, GroupedMean):
        return scaler.measure(column, of_groups)
    scaler.fit(column[:, None])
    assert scaler.privacy_ is not None
    guarantee = replace(scaler.privacy_, unit=unit)
    return Summary(float(scaler.mean_[0]), float(scaler.standard_error_[0]), guarantee)


def means_of_persons(column: Floats, owners: Persons) -> Floats:
    """Each person's mean, NaN where all of their values are missing; shape (persons,). Private.

    **Guarantee.** Each depends on that person's values alone, rounding included.
    """
    known = ~np.isnan(column)
    with np.errstate(all="ignore"):  # a warning would tell of a record
        sums = np.bincount(owners.numbers, np.where(known, column, 0.0), minlength=len(owners))
        means: Floats = sums / np.bincount(owners.numbers, known, minlength=len(owners))
    return means
