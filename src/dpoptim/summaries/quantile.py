"""A quantile of a private column."""

from typing import Any

import numpy as np

from dpoptim.accounting.ledger import Ledger
from dpoptim.accounting.public_numbers import relation_of
from dpoptim.arguments import real_number
from dpoptim.data.input_arrays import number_array, one_axis
from dpoptim.estimators.settings import Delta
from dpoptim.quantiles import Column, candidates_of, choose, places, scores_of
from dpoptim.statistics import Price, guarantee_of, paid_gate
from dpoptim.summaries.summary import Summary, of_owners, owners_of, shares_of_rows, stated
from dpoptim.target_range import TargetRange


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
    persons: Any = None,
) -> Summary:
    """A number below which about a share ``quantile`` of the records lies.

    Args:
        values: as for `private_mean`; missing ones are left out.
        quantile: in (0, 1); 0.5 is the median.
        lower, upper: public range of the answer, one of some hundreds of numbers in it, or in the
            middle between two of them: evenly, and closer towards 0 and the ends
            (`quantiles.candidates_of`).
        epsilon, delta, neighboring, n, ledger, noise_seed, label: as for `private_mean`.
        persons: the owner of each value, where a person may have several: each of k values that are
            not missing then counts 1/k, and the guarantee protects a person.

    Returns:
        the number; ``standard_error`` is None.

    Raises:
        ValueError: a bad column or setting, before anything is spent. LedgerError: the budget does
            not admit it.

    **Guarantee.** ``guarantee``: an exponential mechanism, exactly drawn, on public numbers and
    what is between them, by how many values must move for the quantile to be there (`scores_of`),
    which one record, or person, changes by at most 1.

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
    owners = owners_of(persons, len(column), "values")
    units = len(column) if owners is None else len(owners)
    price = Price.of(units, epsilon=epsilon, delta=delta, neighboring=relation, n=n)
    candidates = candidates_of(-within.middle / within.half)
    scaled = np.where(np.isnan(column), np.nan, within.scaled(column))
    before = Column(scaled, weights=shares_of_rows(owners, ~np.isnan(scaled))).before(candidates)
    with paid_gate(
        price.mu, relation, label=label, ledger=of_owners(ledger, owners), noise_seed=noise_seed
    ) as gate:
        place = choose(gate, scores_of(before, share * before[-1]), price.mu)
    released = guarantee_of(gate, price.delta, noise_seed=noise_seed)
    guarantee = stated(released, price, ledger, owners)
    low, high = places(candidates)
    middle = (low[[place]] + high[[place]]) / 2
    return Summary(float(within.unscaled(middle)[0]), None, guarantee)
