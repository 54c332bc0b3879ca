"""The sum of a private column, or of what persons have together."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dpoptim.accounting.ledger import Ledger
from dpoptim.accounting.public_numbers import relation_of
from dpoptim.arguments import real_number
from dpoptim.estimators.settings import Delta
from dpoptim.statistics import Floats, Price, release_sum
from dpoptim.summaries.groups import Groups
from dpoptim.summaries.summary import Summary, column_of, of_owners, owners_of, stated
from dpoptim.training.batches.privacy_units import Persons

LARGEST = 1e290  # of which 2^27 add up in float64, and noise, too


def private_sum(
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
    label: str = "private sum",
    persons: Any = None,
    by: Any = None,
    groups: Sequence[Any] | None = None,
) -> Summary:
    """The sum of one number a record, or of persons' sums.

    Args:
        values: shape (n,), NaN where one is missing, which adds nothing. Private.
        lower, upper: public range, to which each record's value is cut; with ``persons``, each
            person's sum. The noise is in proportion to the larger of both, so a range that is ten
            times too wide has ten times the noise.
        epsilon, delta, neighboring, n, ledger, noise_seed, label: as for `private_mean`.
        persons: the owner of each value, where a person may have several; the guarantee then
            protects a person.
        by, groups: as for `private_mean`.

    Returns:
        the sum of what was cut to the range, with ``by`` one for each group, and its error by
        noise.

    Raises:
        ValueError: a bad column or setting, before anything is spent. LedgerError: the budget does
            not admit it.

    **Guarantee.** ``guarantee``: a record, or person, adds a number between the lesser of ``lower``
    and 0 and the larger of ``upper`` and 0 to a sum, or to that of one group, that Gaussian noise
    covers.

    Examples:
        >>> import dpoptim
        >>> spent = [20.0] * 3_000 + [80.0] * 1_000
        >>> abs(dpoptim.private_sum(spent, 0, 100, epsilon=1.0).value - 140_000) < 5_000
        True
    """
    column = column_of(
        values, "dates have no sum, but days have: private_sum(days, 0, 1_826, ...)."
    )
    low, high = real_number("lower", lower), real_number("upper", upper)
    bound = max(abs(low), abs(high))
    if not low < high or not bound <= LARGEST:
        raise ValueError(
            f"lower and upper must be at most {LARGEST:g} in size, the lower one first, got "
            f"{lower!r} and {upper!r}."
        )
    of_groups = Groups.of(by, groups, len(column), persons)
    owners = owners_of(persons, len(column), "values")
    amounts = cut_amounts(column, low, high, owners)
    relation = relation_of(neighboring, ledger)
    price = Price.of(len(amounts), epsilon=epsilon, delta=delta, neighboring=relation, n=n)
    apart = max(high, 0.0) / bound - min(low, 0.0) / bound
    released = release_sum(
        of_groups.sums(amounts[:, None] / bound, 1.0)[:, 0],
        norm_bound=of_groups.reach(apart, 1.0, relation),
        mu=price.mu,
        delta=price.delta,
        neighboring=relation,
        label=label,
        ledger=of_owners(ledger, owners),
        noise_seed=noise_seed,
    )
    guarantee = stated(released.guarantee, price, ledger, owners)
    return Summary(of_groups.shaped(released.values * bound), released.deviation * bound, guarantee)


def cut_amounts(column: Floats, low: float, high: float, owners: Persons | None) -> Floats:
    """Amounts that records or persons add, within the range or 0; shape (units,). Private.

    **Guarantee.** Each depends on that record, or person's values, alone, rounding included.
    """
    sums = column
    if owners is not None:
        known = np.where(np.isnan(column), 0.0, column)
        with np.errstate(all="ignore"):  # a warning would tell of a record
            sums = np.bincount(owners.numbers, known, minlength=len(owners)).astype(np.float64)
            missing = np.bincount(owners.numbers, ~np.isnan(column), minlength=len(owners)) == 0
        sums[missing] = np.nan
    cut: Floats = np.where(np.isnan(sums), 0.0, np.clip(sums, low, high))
    return cut
