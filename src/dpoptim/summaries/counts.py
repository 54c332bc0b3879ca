"""Counts of a private column: of what is true, of categories, of bins."""

from collections.abc import Sequence
from dataclasses import replace
from numbers import Number
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpoptim.accounting.ledger import Ledger
from dpoptim.accounting.public_numbers import relation_of
from dpoptim.data.input_arrays import number_array, one_axis
from dpoptim.data.numbers import classes_of
from dpoptim.estimators.settings import Delta
from dpoptim.missing_values import is_gap
from dpoptim.quantiles import bound_of_count
from dpoptim.statistics import Floats, Price, histogram_bound, release_sum
from dpoptim.summaries.groups import Groups
from dpoptim.summaries.summary import (
    Summary,
    column_of,
    of_owners,
    owners_of,
    shares_of_rows,
    stated,
)


def private_count(
    flags: Any,
    *,
    epsilon: float,
    delta: Delta = "auto",
    neighboring: str | None = None,
    n: int | None = None,
    ledger: Ledger | None = None,
    noise_seed: int | None = None,
    label: str = "private count",
    persons: Any = None,
    by: Any = None,
    groups: Sequence[Any] | None = None,
) -> Summary:
    """How many records, or persons, have something.

    Args:
        flags: shape (n,), a truth value for each record, or a number, true unless 0; what is
            missing (None, NaN), or a word among others, counts nowhere. Private.
        epsilon, delta, neighboring, n, ledger, noise_seed, label: as for `private_mean`, and so is
            what is raised.
        persons: the owner of each flag, where a person may have several; counted are persons of
            whom any flag is true, and the guarantee protects a person.
        by, groups: as for `private_mean`.

    Returns:
        the count, which may be below 0 and no whole number; with ``by`` one for each group.

    **Guarantee.** ``guarantee``: a record, or person, adds 0 or 1 to a sum, or to that of one
    group, that Gaussian noise covers.

    Examples:
        >>> import dpoptim
        >>> ill = [True] * 300 + [False] * 700
        >>> abs(dpoptim.private_count(ill, epsilon=1.0).value - 300) < 50
        True
    """
    column = truth_values(one_axis("flags", flags))
    of_groups = Groups.of(by, groups, len(column), persons)
    owners = owners_of(persons, len(column), "flags")
    if owners is not None:
        column = np.bincount(owners.numbers, column, minlength=len(owners)) > 0
    found = private_histogram(
        column.astype(np.int64),
        [1],
        epsilon=epsilon,
        delta=delta,
        neighboring=neighboring,
        n=n,
        ledger=ledger,
        noise_seed=noise_seed,
        label=label,
        persons=None if owners is None else np.arange(len(owners)),
        by=by,
        groups=groups,
    )
    return replace(found, value=of_groups.shaped(found.value.reshape(-1)))


def truth_values(flags: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each flag is true; not where it is missing, or text among others. Private.

    Raises:
        ValueError: a column of text, by its type alone.

    **Guarantee.** Each depends on that flag alone.
    """
    if flags.dtype.kind not in "biufcO":
        raise ValueError(
            "flags must be truth values: any text, or date, would be true. Fix: a comparison, "
            "such as flags == 'yes'."
        )
    if flags.dtype.kind == "O":
        known = (isinstance(each, Number | np.bool_) and not is_gap(each) for each in flags)
        return np.array([ok and bool(each) for ok, each in zip(known, flags, strict=True)], bool)
    return (flags != 0) & ~np.isnan(flags)


def private_histogram(
    values: Any,
    categories: Sequence[Any] | None = None,
    *,
    edges: Sequence[float] | None = None,
    epsilon: float,
    delta: Delta = "auto",
    neighboring: str | None = None,
    n: int | None = None,
    ledger: Ledger | None = None,
    noise_seed: int | None = None,
    label: str = "private histogram",
    persons: Any = None,
    by: Any = None,
    groups: Sequence[Any] | None = None,
) -> Summary:
    """How many records have each of some categories, or lie in each of some bins.

    Args:
        values: one for each record, shape (n,); one of no category, or outside of all bins, adds
            nothing. Private.
        categories: a public list, each once.
        edges: instead, public numbers, rising: of bins that hold their lower edge, the last both.
        epsilon, delta, neighboring, n, ledger, noise_seed: as for `private_mean`.
        label: public text for the ledger's entry.
        persons: the owner of each value, where a person may have several: each of k values then
            counts 1/k, so that a person counts once, and the guarantee protects a person.
        by, groups: as for `private_mean`.

    Returns:
        counts of shape (k,), with ``by`` (groups, k), which may be below 0 and no whole numbers:
        rounding is yours.

    Raises:
        ValueError: a bad column or setting, before anything is spent. LedgerError: the budget does
            not admit it.

    **Guarantee.** ``guarantee``: a record adds 1 to one count at most, a person at most 1 to all
    together, and one vector is released with Gaussian noise.

    Examples:
        >>> import dpoptim
        >>> words = ["no"] * 800 + ["yes"] * 200
        >>> found = dpoptim.private_histogram(words, ["no", "yes", "unknown"], epsilon=1.0)
        >>> found.value.round(-2)[:2].tolist()
        [800.0, 200.0]
    """
    if (categories is None) == (edges is None):
        raise ValueError("give one of categories and edges, as public knowledge.")
    column = one_axis("values", values)
    if categories is not None and not len(categories):
        raise ValueError("categories is empty: there is nothing to count. Fix: name at least one.")
    if categories is not None:
        places, bins = classes_of([*categories], column), len(categories)
    else:
        numbers = column_of(
            values, "edges in days, private_histogram(days, edges=[0, 366, 1_827])."
        )
        ends = number_array("edges", edges)
        if ends.ndim != 1 or len(ends) < 2 or not (np.diff(ends) > 0).all():
            raise ValueError("edges must be at least two numbers, rising.")
        places, bins = in_bins(numbers, ends), len(ends) - 1
    of_groups = Groups.of(by, groups, len(column), persons)
    places, cells = of_groups.cells(places, bins), of_groups.count * bins
    owners = owners_of(persons, len(column), "values")
    shares = shares_of_rows(owners, np.ones(len(column), dtype=bool))
    counts = np.bincount(places + 1, shares, minlength=cells + 1)[1:].astype(np.float64)
    relation = relation_of(neighboring, ledger)
    units = len(column) if owners is None else len(owners)
    price = Price.of(units, epsilon=epsilon, delta=delta, neighboring=relation, n=n)
    released = release_sum(
        counts,
        norm_bound=histogram_bound(relation) if cells > 1 else bound_of_count(relation),
        mu=price.mu,
        delta=price.delta,
        neighboring=relation,
        label=label,
        ledger=of_owners(ledger, owners),
        noise_seed=noise_seed,
    )
    guarantee = stated(released.guarantee, price, ledger, owners)
    found = of_groups.shaped(released.values.reshape(of_groups.count, bins))
    return Summary(found, released.deviation, guarantee)


def in_bins(values: Floats, edges: Floats) -> Any:
    """The bin of each value, -1 outside of all, and of NaN; the last bin holds both its edges."""
    places = np.searchsorted(edges, values, side="right") - 1
    places = np.where(values == edges[-1], len(edges) - 2, places)
    return np.where((values >= edges[0]) & (values <= edges[-1]), places, -1)
