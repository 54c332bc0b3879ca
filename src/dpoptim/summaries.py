"""Single statistics of a private column: a mean, a count, a histogram, a quantile."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dpoptim.accounting.guarantee import Guarantee
from dpoptim.accounting.ledger import Ledger
from dpoptim.accounting.ledger_records import scope_on_ledger
from dpoptim.accounting.public_numbers import relation_of
from dpoptim.arguments import real_number
from dpoptim.data.input_arrays import number_array, one_axis
from dpoptim.data.numbers import classes_of
from dpoptim.estimators.repeats import ALONE, with_scope
from dpoptim.estimators.settings import Delta
from dpoptim.preprocessing.standard_scaler import DPStandardScaler
from dpoptim.privacy_unit import RECORD
from dpoptim.quantiles import Column, bound_of_count, candidates_of, epsilon_of_choice
from dpoptim.statistics import (
    Floats,
    Price,
    guarantee_of,
    histogram_bound,
    paid_gate,
    release_sum,
)
from dpoptim.target_range import TargetRange
from dpoptim.training.batches.privacy_units import Persons


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


def stated(guarantee: Guarantee, price: Price, ledger: Ledger | None) -> Guarantee:
    """The guarantee of a release, with its scope."""
    scope = (ALONE,) if ledger is None else scope_on_ledger(ledger, guarantee.delta)
    return with_scope(price.noted(guarantee), scope)


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
    unit = RECORD.name if persons is None else "person"
    if persons is not None:
        column = means_of_persons(column, Persons.of(persons, len(column), 1, "values"))
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
) -> Summary:
    """How many records have something.

    Args:
        flags: shape (n,), a truth value for each record. Private.
        epsilon, delta, neighboring, n, ledger, noise_seed, label: as for `private_mean`, and so is
            what is raised.

    Returns:
        the count, which may be below 0 and no whole number.

    **Guarantee.** ``guarantee``: a record adds 0 or 1 to a sum that Gaussian noise covers.

    Examples:
        >>> import dpoptim
        >>> ill = [True] * 300 + [False] * 700
        >>> abs(dpoptim.private_count(ill, epsilon=1.0).value - 300) < 50
        True
    """
    found = private_histogram(
        one_axis("flags", flags).astype(bool).astype(np.int64),
        [1],
        epsilon=epsilon,
        delta=delta,
        neighboring=neighboring,
        n=n,
        ledger=ledger,
        noise_seed=noise_seed,
        label=label,
    )
    return replace(found, value=float(found.value[0]))


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
) -> Summary:
    """How many records have each of some categories, or lie in each of some bins.

    Args:
        values: one for each record, shape (n,); one of no category, or outside of all bins, adds
            nothing. Private.
        categories: a public list, each once.
        edges: instead, public numbers, rising: of bins that hold their lower edge, the last both.
        epsilon, delta, neighboring, n, ledger, noise_seed: as for `private_mean`.
        label: public text for the ledger's entry.

    Returns:
        counts of shape (k,), which may be below 0 and no whole numbers: rounding is yours.

    Raises:
        ValueError: a bad column or setting, before anything is spent. LedgerError: the budget does
            not admit it.

    **Guarantee.** ``guarantee``: a record adds 1 to one count at most, and one vector is released
    with Gaussian noise.

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
    if categories is not None:
        places, bins = classes_of([*categories], column), len(categories)
    else:
        ends = number_array("edges", edges)
        if ends.ndim != 1 or len(ends) < 2 or not (np.diff(ends) > 0).all():
            raise ValueError("edges must be at least two numbers, rising.")
        places, bins = in_bins(number_array("values", column), ends), len(ends) - 1
    counts = np.bincount(places + 1, minlength=bins + 1)[1:].astype(np.float64)
    relation = relation_of(neighboring, ledger)
    price = Price.of(len(column), epsilon=epsilon, delta=delta, neighboring=relation, n=n)
    released = release_sum(
        counts,
        norm_bound=histogram_bound(relation) if bins > 1 else bound_of_count(relation),
        mu=price.mu,
        delta=price.delta,
        neighboring=relation,
        label=label,
        ledger=ledger,
        noise_seed=noise_seed,
    )
    return Summary(released.values, released.deviation, stated(released.guarantee, price, ledger))


def in_bins(values: Floats, edges: Floats) -> Any:
    """The bin of each value, -1 outside of all, and of NaN; the last bin holds both its edges."""
    places = np.searchsorted(edges, values, side="right") - 1
    places = np.where(values == edges[-1], len(edges) - 2, places)
    return np.where((values >= edges[0]) & (values <= edges[-1]), places, -1)


def private_quantile(
    values: Any,
    quantile: float,
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
) -> Summary:
    """A number below which about a share ``quantile`` of the records lies.

    Args:
        values: as for `private_mean`; missing ones are neither below nor above.
        quantile: in (0, 1); 0.5 is the median.
        lower, upper: public range of the answer, one of some hundreds of numbers in it: evenly, and
            closer towards 0 and the ends (`quantiles.candidates_of`).
        epsilon, delta, neighboring, n, ledger, noise_seed, label: as for `private_mean`.

    Returns:
        the candidate; ``standard_error`` is None.

    Raises:
        ValueError: a bad column or setting, before anything is spent. LedgerError: the budget does
            not admit it.

    **Guarantee.** ``guarantee``: an exponential mechanism, exactly drawn, on public candidates r,
    with score ``-|#{values < r} - rank|``, or of those above for quantiles from 0.5 on, which one
    record changes by at most 1.

    Examples:
        >>> import numpy as np
        >>> import dpoptim
        >>> pay = np.random.default_rng(0).lognormal(10, 0.8, 5_000)
        >>> found = dpoptim.private_quantile(pay, 0.5, 0, 1e8, epsilon=1.0)
        >>> 15_000 < found.value < 32_000  # the median is 22,026
        True
    """
    share = real_number("quantile", quantile)
    if not 0 < share < 1:
        raise ValueError(f"quantile must be between 0 and 1, got {share:g}.")
    within = TargetRange.of((lower, upper))
    column = number_array("values", one_axis("values", values))
    relation = relation_of(neighboring, ledger)
    price = Price.of(len(column), epsilon=epsilon, delta=delta, neighboring=relation, n=n)
    mu = price.mu
    candidates = candidates_of(-within.middle / within.half)
    scaled = np.where(np.isnan(column), np.nan, within.scaled(column))
    below, above = Column(scaled).counts(candidates)
    counts, rank = (below, share) if share < 0.5 else (above, 1 - share)
    scores = -np.abs(counts - rank * price.n)
    with paid_gate(mu, relation, label=label, ledger=ledger, noise_seed=noise_seed) as gate:
        chosen = gate.select(
            scores.tolist(), norm_bound=bound_of_count(relation), epsilon=epsilon_of_choice(mu)
        )
    released = guarantee_of(gate, price.delta, noise_seed=noise_seed)
    guarantee = stated(released, price, ledger)
    return Summary(float(within.unscaled(candidates[[chosen]])[0]), None, guarantee)
