"""Shares of a private search's charged epsilon that an exact attack shows, over what is promised.

Run: ``python benchmarks/search_shares.py --out benchmarks/results`` writes search_shares.csv:
``shown`` by the order of scores of `dpoptim.audit.searches`, and ``at_most``, what the same noise
costs by the theorem of `dpoptim.accounting.selection`. Nothing is drawn: figures repeat.
"""

from itertools import product

from dpoptim.accounting import compute_epsilon
from dpoptim.audit.searches import RELATION, worst_orders
from dpoptim.tuning.search import search_event
from one_table import write_table

EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
DELTAS = (1e-5, 1e-9)
MEANS = (2.0, 8.0, 10.0, 50.0)  # expected numbers of trials; 10: the default


def shares(epsilon: float, delta: float, mean: float) -> dict[str, float]:
    """The line of a search within (epsilon, delta) of ``mean`` expected trials."""
    event = search_event(epsilon, delta, RELATION, mean)
    shown = worst_orders(1 / event.event.noise_multiplier, mean, delta)
    least = compute_epsilon(event, delta, RELATION, accountant="order statistics").epsilon
    return {
        "epsilon": epsilon,
        "delta": delta,
        "mean_trials": mean,
        "shown": round(shown / epsilon, 4),
        "at_most": round(least / epsilon, 4),
    }


if __name__ == "__main__":
    write_table(
        "search_shares", __doc__, (shares(*case) for case in product(EPSILONS, DELTAS, MEANS))
    )
