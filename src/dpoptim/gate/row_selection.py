"""Rows of tables that noisy counts select: the others' noise is never drawn.

A step's query is one vector: a count for each row of all tables, and the sum of the clipped
gradients. Adding noise to every entry and then keeping, of the tables' gradients, the rows whose
noisy count exceeds a threshold would be post-processing of one Gaussian release. Here the same law
is drawn at the cost of the rows that are kept:

* noise on the gradients of rows that are thrown away is not drawn: it is independent of all that
  is kept;
* a count is only compared with the threshold, so a coin takes the place of its noise, of the
  chance that the noise would have to lift it above;
* rows that nobody touched have a count of 0, and so one chance in common: the heads among so many
  coins are drawn, and not a coin for each. Selected, they get their noise like all others.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr
from torch import Tensor

from dpoptim.gate.queries import SelectedRows
from dpoptim.gradients.per_sample.sparse import sparse_rows
from dpoptim.noise.exact_bernoulli import rare_heads, toss_coins
from dpoptim.noise.few_rows import Vector
from dpoptim.noise.stream import KeyStream


def select_rows(
    query: SelectedRows, step: int, coins: KeyStream, sums: Sequence[Vector]
) -> list[Vector]:
    """Select rows of a step's tables, and return the sums that get noise.

    Args:
        query: what the plan pays for. step: counted from 0.
        coins: a stream for this step alone.
        sums: a parameter each, of a table sparse with its rows' sums; then of each table, in this
            order, the counts of its rows, sparse too. Rows ascend.

    Returns:
        the parameters' sums, of tables sparse, in float64: the selected rows alone.

    **Guarantee.** With independent noise of ``query.deviation(step)`` on every entry, what is
    returned is post-processing of one Gaussian release of noise multiplier
    ``query.noise_multiplier`` times the step's scale, if a record adds at most ``norm_bound`` to
    the sums and at most 1 to the counts, in Euclidean norm: of the vector ``(sqrt(share) counts,
    sqrt(1 - share) sums / norm_bound)``. Which rows they are may be published with it.
    """
    sparse = [each for each in sums if isinstance(each, Tensor) and each.is_sparse]
    tables = len(sparse) // 2
    counts = iter(sparse[tables:])
    return [
        rows_of_sum(each, rows_above_threshold(query, step, coins, next(counts)))
        if isinstance(each, Tensor) and each.is_sparse
        else each
        for each in sums[: len(sums) - tables]
    ]


def rows_above_threshold(
    query: SelectedRows, step: int, coins: KeyStream, counts: Tensor
) -> NDArray[np.int64]:
    """Return the rows whose noisy count exceeds the threshold, ascending."""
    touched = counts.indices()[0].cpu().numpy()
    scores = query.scores(counts.values().cpu().numpy(), step)
    heads = touched[toss_above_threshold(coins, scores)]
    untouched = float(query.scores(np.zeros(1), step)[0])
    if untouched > 0:
        others = np.flatnonzero(toss_above_threshold(coins, np.full(len(counts), untouched)))
    else:
        others = rare_heads(coins, len(counts), float(ndtr(untouched)))
    return np.union1d(heads, np.setdiff1d(others, touched, assume_unique=True))


def toss_above_threshold(coins: KeyStream, scores: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Toss, for each of ``scores``, whether it and a standard normal number exceed 0 together.

    The rarer side has the coin, whose chance float64 holds to 2^-40 of itself.
    """
    return np.asarray(toss_coins(coins, ndtr(-np.abs(scores))) != (scores > 0))


def rows_of_sum(total: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """Return these rows of a sparse sum, in float64; zeros where it has none."""
    wanted = torch.from_numpy(rows).to(total.device)
    there = total.indices()[0]
    values = torch.zeros(len(wanted), *total.shape[1:], dtype=torch.float64, device=total.device)
    if len(there):
        place = torch.searchsorted(there, wanted).clamp(max=len(there) - 1)
        found = there[place] == wanted
        values[found] = total.values()[place[found]].double()
    return sparse_rows(wanted, values, total.shape)
