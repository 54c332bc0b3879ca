"""The mean of a private column, or of persons' means."""

from dataclasses import replace
from typing import Any

import numpy as np

from dpoptim.accounting.ledger import Ledger
from dpoptim.data.input_arrays import number_array, one_axis
from dpoptim.estimators.settings import Delta
from dpoptim.preprocessing.standard_scaler import DPStandardScaler
from dpoptim.privacy_unit import RECORD
from dpoptim.statistics import Floats
from dpoptim.summaries.summary import PERSON, Summary, owners_of
from dpoptim.training.batches.privacy_units import Persons


class PrivateMean(DPStandardScaler):
    """`DPStandardScaler` of one column, by the name that a ledger has of `private_mean`."""


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

    Returns:
        the mean of values cut to the range that was found, and its error by noise.

    Raises:
        ValueError: a bad column or setting, before anything is spent. LedgerError: the budget does
            not admit it.

    **Guarantee.** ``guarantee``, for all values: that of `DPStandardScaler`, whose mean this is.
    With ``persons`` it is of the table with one row a person, a function of that person's values
    alone.

    Examples:
        >>> import numpy as np
        >>> import dpoptim
        >>> ages = np.random.default_rng(0).uniform(20, 60, 5_000)
        >>> found = dpoptim.private_mean(ages, 0, 120, epsilon=1.0)
        >>> abs(found.value - 40) < 2
        True
    """
    # infinite ones are at the ends, like all beyond: to refuse them would tell of them
    column = np.clip(number_array("values", one_axis("values", values)), lower, upper)
    unit, owners = RECORD.name, owners_of(persons, len(column), "values")
    if owners is not None:
        column, unit = means_of_persons(column, owners), PERSON
        ledger = None if ledger is None else ledger.of_units(unit)
    scaler = PrivateMean(
        lower,
        upper,
        epsilon=epsilon,
        delta=delta,
        neighboring=neighboring,
        n=n,
        ledger=ledger,
        noise_seed=noise_seed,
        label=label,
    ).fit(column[:, None])
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
