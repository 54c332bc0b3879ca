"""A quantile of a private column."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpoptim.accounting.ledger import Ledger
from dpoptim.accounting.public_numbers import relation_of
from dpoptim.arguments import real_number
from dpoptim.estimators.settings import Delta
from dpoptim.quantiles import Column, candidates_of, choose_in_parts, places, scores_of
from dpoptim.statistics import Floats, Price, guarantee_of, paid_gate
from dpoptim.summaries.groups import Groups
from dpoptim.summaries.summary import (
    Summary,
    column_of,
    of_owners,
    owners_of,
    shares_of_rows,
    stated,
)
from dpoptim.target_range import TargetRange

OF_DATES = (
    "found = dpoptim.private_quantile(days, 0.5, 0, 1_826, ...) up to 2024; start + "
    "pd.Timedelta(days=found.value) is a date again."
)


def private_quantile(
    values: Any,
    quantile: float | Sequence[float],
    lower: float,
    upper: float,
    *,
    epsilon: float,
    delta: Delta = "auto",
    neighboring: str | None = None,
    n: int | None = None,
    ledger: Ledger | None = None,
    noise_seed: int | None = None,
    label: str = "private quantile",
    persons: Any = None,
    by: Any = None,
    groups: Sequence[Any] | None = None,
) -> Summary:
    """A number below which about a share ``quantile`` of the records lies.

    Args:
        values: as for `private_mean`; missing ones are left out.
        quantile: in (0, 1); 0.5 is the median. Several, a list of k, share the budget's mu^2
            evenly, and are put in order.
        lower, upper: public range of the answer, one of some hundreds of numbers in it, or in the
            middle between two of them: evenly, and closer towards 0 and the ends
            (`quantiles.candidates_of`).
        epsilon, delta, neighboring, n, ledger, noise_seed, label: as for `private_mean`.
        persons: the owner of each value, where a person may have several: each of k values that are
            not missing then counts 1/k, and the guarantee protects a person.
        by, groups: as for `private_mean`; under replace-one each group has half of the budget's
            mu^2, since a record may leave one and enter another.

    Returns:
        the number, of several shape (k,), with ``by`` (groups,) or (groups, k);
        ``standard_error`` is None.

    Raises:
        ValueError: a bad column or setting, before anything is spent. LedgerError: the budget does
            not admit it.

    **Guarantee.** ``guarantee``: an exponential mechanism, exactly drawn, on public numbers and
    what is between them, by how many values must move for the quantile to be there (`scores_of`),
    which one record, or person, changes by at most 1, in one group alone.

    Examples:
        >>> import numpy as np
        >>> import dpoptim
        >>> pay = np.random.default_rng(0).lognormal(10, 0.8, 5_000)
        >>> found = dpoptim.private_quantile(pay, 0.5, 0, 1e8, epsilon=1.0)
        >>> 15_000 < found.value < 32_000  # the median is 22,026
        True
    """
    shares = shares_given(quantile)
    column = column_of(values, OF_DATES)
    within = TargetRange.of((lower, upper))
    relation = relation_of(neighboring, ledger)
    owners = owners_of(persons, len(column), "values")
    units = len(column) if owners is None else len(owners)
    price = Price.of(units, epsilon=epsilon, delta=delta, neighboring=relation, n=n)
    candidates = candidates_of(-within.middle / within.half)
    of_groups = Groups.of(by, groups, len(column), persons)
    scaled = np.where(np.isnan(column), np.nan, within.scaled(column))
    weights = shares_of_rows(owners, ~np.isnan(scaled))
    parts = [scaled[own] for own in of_groups.parts()]
    before = [Column(part, weights=weights).before(candidates) for part in parts]
    mu, touched = price.mu / math.sqrt(len(shares)), of_groups.touched(relation)
    with paid_gate(
        price.mu, relation, label=label, ledger=of_owners(ledger, owners), noise_seed=noise_seed
    ) as gate:
        chosen = [
            choose_in_parts(gate, [scores_of(of, each * of[-1]) for of in before], mu, touched)
            for each in shares
        ]
    released = guarantee_of(gate, price.delta, noise_seed=noise_seed)
    guarantee = stated(released, price, ledger, owners)
    low, high = places(candidates)
    middles = np.array((low + high) / 2)[np.array(chosen).T]  # (groups, shares)
    found = within.unscaled(in_order(middles, shares))
    kept = found if several(quantile) else found[:, 0]
    return Summary(of_groups.shaped(kept), None, guarantee)


def several(quantile: Any) -> bool:
    """Whether several quantiles were asked for."""
    return isinstance(quantile, list | tuple) or np.ndim(quantile) == 1


def shares_given(quantile: Any) -> list[float]:
    """One share of the records, or several; a ValueError where any is none."""
    given = [*quantile] if several(quantile) else [quantile]
    shares = [real_number("quantile", each) for each in given]
    if not shares or not all(0 < share < 1 for share in shares):
        said = ", ".join(f"{share:g}" for share in shares)
        raise ValueError(f"quantile must be between 0 and 1, got {said or 'none'}.")
    return shares


def in_order(found: Floats, shares: list[float]) -> Floats:
    """Quantiles of larger shares are not below those of smaller; a post-processing."""
    ranks = np.argsort(np.argsort(shares, kind="stable"), kind="stable")
    ordered: Floats = np.sort(found, axis=1)[:, ranks]
    return ordered
