"""Every method attacked through its own code, under the name that the command line knows it by.

Each audit runs the method as its user would and compares what the best attack certifies with what
was promised.
"""

from collections.abc import Callable
from functools import partial

from dpoptim.accounting import gdp_epsilon
from dpoptim.audit import statistics as released_statistics
from dpoptim.audit.error_feedback import dice_sgd, dice_sgd_as_published
from dpoptim.audit.finding import DELTA, Finding, finding
from dpoptim.audit.searches import search_shown
from dpoptim.audit.shares import persons_shown
from dpoptim.audit.solvers import (
    SOLVERS,
    adaptive,
    adaptive_norms,
    low_quantile,
    solver,
    srgd,
    sums,
)
from dpoptim.audit.step_methods import (
    dp_ftrl,
    dp_ftrl_apart,
    dp_ftrl_by_turns,
    dp_ftrl_in_bins,
    dp_sgd,
)


def statistic(name: str, trials: int, seed: int) -> Finding:
    """A released statistic: the exact shift by the worst record, against its noise."""
    claimed = gdp_epsilon(released_statistics.MU, DELTA)
    return finding(claimed, gdp_epsilon(released_statistics.largest_mu(name), DELTA), claimed, 0)


Audit = Callable[[int, int], Finding]
AUDITS: dict[str, Audit] = {
    "dp-sgd": dp_sgd,
    "dp-sgd, sampled": partial(dp_sgd, sample_rate=0.01, steps=1000, noise=0.6),
    "dp-ftrl, buffered Toeplitz": partial(dp_ftrl, noise="buffered-toeplitz"),
    "dp-ftrl, Toeplitz": partial(dp_ftrl, noise="toeplitz"),
    "dp-ftrl, tree": partial(dp_ftrl, noise="tree"),
    "dp-ftrl, two passes": partial(dp_ftrl, noise="toeplitz", passes=2),
    "dp-ftrl, tree, two passes": partial(dp_ftrl, noise="tree", passes=2),
    "dp-ftrl, Honaker, two passes": partial(dp_ftrl, noise="tree-honaker", passes=2),
    "dp-ftrl, normalised, two passes": partial(dp_ftrl, noise="toeplitz-normalised", passes=2),
    "dp-ftrl, best": dp_ftrl,
    "dp-ftrl, best, two passes": partial(dp_ftrl, passes=2),
    "dp-ftrl, two vectors, two passes": partial(dp_ftrl, passes=2, buffers=2),
    "dp-ftrl, no vectors, two passes": partial(dp_ftrl, passes=2, buffers=0),
    "dp-ftrl, cosine decay, two passes": partial(dp_ftrl, passes=2, decay="cosine", momentum=0.9),
    "dp-ftrl, planned rates, two passes": partial(dp_ftrl, passes=2, decay=(0.2, 1.0, 0.1)),
    "dp-ftrl, sampled by turns": dp_ftrl_by_turns,
    "dp-ftrl, every turn": partial(dp_ftrl_by_turns, rate=1.0),
    "dp-ftrl, balls in bins": dp_ftrl_in_bins,
    "dp-ftrl, b-min-sep": dp_ftrl_apart,
    "dice-sgd": dice_sgd,
    "dice-sgd as published": dice_sgd_as_published,
    **{name: partial(solver, name) for name in SOLVERS},
    "adaptive-gd": adaptive,
    "adaptive-gd, norms": adaptive_norms,
    "accelerated-srgd": srgd,
    "sufficient-statistics": sums,
    "quantile": low_quantile,
    "search": partial(search_shown, "auto"),
    "search, order statistics": partial(search_shown, "order statistics"),
    "persons": persons_shown,
    **{
        name: partial(statistic, name)
        for name in (
            *("scaler", "imputer", "class counts", "frequent categories"),
            *("evaluation", "evaluation of a regression"),
        )
    },
}
