"""Quantiles of columns by exponential mechanisms on public candidates, from one filter."""

import math
from dataclasses import replace

import numpy as np

from dpoptim.accounting.accountant import compute_epsilon
from dpoptim.accounting.filters import selection_epsilon, selection_mu
from dpoptim.accounting.guarantee import SEEDED, Guarantee
from dpoptim.accounting.ledger import Ledger
from dpoptim.gate import FilteredGate
from dpoptim.gate.one_process import refuse_other_ranks
from dpoptim.noise.stream import key_stream
from dpoptim.statistics import Floats

LARGEST_MU = 40.0  # of one choice; beyond it there is nothing left to gain


def select_tails(
    values: Floats,
    candidates: Floats,
    rank: float,
    *,
    mu: float,
    delta: float,
    neighboring: str,
    label: str,
    ledger: Ledger | None = None,
    noise_seed: int | None = None,
) -> tuple[Floats, Floats, Guarantee]:
    """For each column a candidate with about ``rank`` values below, one with as many above.

    Args:
        values: shape (n, columns); NaN is in neither tail.
        candidates: public numbers, rising, shape (k,).
        rank: public.
        mu: the price of all choices together; > 0.
        delta, neighboring, label, ledger, noise_seed: as for `statistics.release_sum`.

    **Guarantee.** mu-GDP. A score is minus the distance of a count from ``rank``. A record,
    present or not or with another value, moves a count by at most 1; under replace-one the gate
    takes twice the bound, which is therefore one half.
    """
    refuse_other_ranks(label, ledger)
    price = min(mu / math.sqrt(2 * values.shape[1]) * (1 - 1e-9), LARGEST_MU)
    epsilon = selection_epsilon(price)
    while selection_mu(epsilon) > price:  # the two conversions round each to its own side
        epsilon *= 1 - 1e-12
    bound = 0.5 if neighboring == "replace-one" else 1.0
    found = np.empty((2, values.shape[1]))
    with Ledger(neighboring=neighboring) as own:
        gate = FilteredGate(
            mu=mu,
            neighboring=neighboring,
            ledger=own if ledger is None else ledger,
            noise=key_stream(noise_seed, label),
            label=label,
        )
        for column in range(values.shape[1]):
            ordered = np.sort(values[:, column])  # missing values last
            ordered = ordered[~np.isnan(ordered)]
            below = np.searchsorted(ordered, candidates, side="left")
            above = len(ordered) - np.searchsorted(ordered, candidates, side="right")
            for tail, counts in enumerate((below, above)):
                scores = [-abs(float(count) - rank) for count in counts]
                found[tail, column] = candidates[
                    gate.select(scores, norm_bound=bound, epsilon=epsilon)
                ]
        gate.finish()
    notes = () if noise_seed is None else (SEEDED,)
    return found[0], found[1], replace(compute_epsilon(gate.event, delta, neighboring), notes=notes)
