"""Statistics of a private column: what is released, what it costs, and whose values count."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dpoptim.accounting.guarantee import Guarantee
from dpoptim.accounting.ledger import Ledger
from dpoptim.accounting.ledger_records import scope_on_ledger
from dpoptim.accounting.public_numbers import public_number_of_records, stated_delta
from dpoptim.arguments import real_number
from dpoptim.estimators.scope import ALONE, with_scope
from dpoptim.estimators.settings import Delta
from dpoptim.privacy_unit import RECORD
from dpoptim.statistics import Floats, price_of
from dpoptim.training.batches.privacy_units import Persons

PERSON = "person"
STEPS = 2.0**26  # in what one person counts; sums of up to 2^27 persons are exact


@dataclass(frozen=True)
class Summary:
    """A released statistic; public.

    Attributes:
        value: a number, or an array of a histogram's counts.
        standard_error: of each number by the noise alone, not by which records there are; None
            where noise chose among candidates.
        guarantee: of the release.
    """

    value: Any
    standard_error: float | None
    guarantee: Guarantee


@dataclass(frozen=True)
class Price:
    """The budget of a statistic, on how many records, or persons, and where it is charged."""

    epsilon: float
    delta: Delta
    neighboring: str
    n: int | None
    ledger: Ledger | None
    noise_seed: int | None
    owners: Persons | None

    @property
    def unit(self) -> str:
        return RECORD.name if self.owners is None else PERSON

    @property
    def charged(self) -> Ledger | None:
        """The ledger, which is told that these are persons."""
        if self.ledger is None or self.owners is None:
            return self.ledger
        return self.ledger.of_units(PERSON)

    def of(self, rows: int) -> tuple[int, float, float, tuple[str, ...]]:
        """Public n, mu, delta and what must be said of them."""
        units = rows if self.owners is None else len(self.owners)
        n = public_number_of_records(self.n, units, self.neighboring)
        delta, said = stated_delta(self.delta, n, epsilon=self.epsilon)
        return n, price_of(real_number("epsilon", self.epsilon), delta), delta, said

    def stated(self, guarantee: Guarantee, said: tuple[str, ...]) -> Guarantee:
        """The guarantee, with its scope."""
        noted = replace(guarantee, notes=(*guarantee.notes, *said), unit=self.unit)
        if self.ledger is None:
            return with_scope(noted, (ALONE,))
        return with_scope(noted, scope_on_ledger(self.ledger, guarantee.delta))


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
