"""Statistics of a private column: what is released, what it costs, and whose values count."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpoptim.accounting.guarantee import Guarantee
from dpoptim.accounting.ledger import Ledger
from dpoptim.accounting.ledger_records import scope_on_ledger
from dpoptim.data.input_arrays import START, in_days, is_date, number_array, one_axis
from dpoptim.estimators.repeats import ALONE, with_scope
from dpoptim.missing_values import is_gap
from dpoptim.privacy_unit import RECORD
from dpoptim.quantiles import STEPS
from dpoptim.statistics import Floats, Price
from dpoptim.training.batches.privacy_units import Persons

PERSON = "person"


@dataclass(frozen=True)
class Summary:
    """A released statistic; public.

    Attributes:
        value: a number, or an array of a histogram's counts, of several quantiles, or of what
            groups have, in their order.
        standard_error: of each number by the noise alone, not by which records there are; an array
            of means by group; None where noise chose among candidates.
        guarantee: of the release.
    """

    value: Any
    standard_error: Any
    guarantee: Guarantee


def stated(
    guarantee: Guarantee, price: Price, ledger: Ledger | None, owners: Persons | None
) -> Guarantee:
    """The guarantee of a release, with its unit and scope."""
    scope = (ALONE,) if ledger is None else scope_on_ledger(ledger, guarantee.delta)
    unit = RECORD.name if owners is None else PERSON
    return with_scope(replace(price.noted(guarantee), unit=unit), scope)


def of_owners(ledger: Ledger | None, owners: Persons | None) -> Ledger | None:
    """The ledger, which is told where these are persons."""
    return ledger if ledger is None or owners is None else ledger.of_units(PERSON)


def column_of(values: Any, example: str) -> Floats:
    """One number a record; of dates a TypeError that shows the call to write instead.

    Args:
        example: the call on ``days``, the days since ``start``, and what its value is then.
    """
    column = one_axis("values", values)
    kind = getattr(values, "dtype", None)
    kind = kind if is_date(kind) else column.dtype
    if is_date(kind) or any(hasattr(each, "isoformat") for each in objects_in(column)):
        raise TypeError(
            "values holds dates or times. Fix: numbers of days, of dates since a public one, "
            f"start = {START}; days = {in_days(kind, 'start')}; {example}"
        )
    try:
        return number_array("values", column)
    except ValueError:
        texts = column.dtype.kind in "US" or any(isinstance(v, str) for v in objects_in(column))
        if not texts:
            raise
    raise ValueError(
        "values holds text that is no number. Fix: numbers, pd.to_numeric(values, errors='coerce')"
        f"; of dates, start = {START}; days = {in_days(None, 'start')}."
    )


def objects_in(column: NDArray[Any]) -> list[Any]:
    """The Python objects among values of shape (n,), gaps left out."""
    return [each for each in column if not is_gap(each)] if column.dtype == object else []


def owners_of(persons: Any, rows: int, what: str) -> Persons | None:
    return None if persons is None else Persons.of(persons, rows, 1, what)


def shares_of_rows(owners: Persons | None, known: Any) -> Floats | None:
    """Shares of rows, of which a person's known ones count 1 together; None: each row counts 1.

    Args:
        known: whether each row has a value, shape (rows,); those of others count 0. Private.

    **Guarantee.** A person's rows add at most 1, whoever else is there, rounding included: shares
    are whole multiples of 1 / STEPS, cut down to them, and add up exactly.
    """
    if owners is None:
        return None
    of_each = np.bincount(owners.numbers, known, minlength=len(owners))
    shares: Floats = np.floor(STEPS / np.maximum(of_each, 1))[owners.numbers] / STEPS
    return np.where(known, shares, 0.0)
