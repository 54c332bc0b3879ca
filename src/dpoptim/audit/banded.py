"""Shared parts of attacks on banded noise: a plan's query, C times inputs, a run with canaries."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from dpoptim.audit.side_by_side import Floats, releases_kept
from dpoptim.audit.small_runs import attach_canaries
from dpoptim.audit.two_worlds import LENGTH, Canaries, canary_data
from dpoptim.gate import CorrelatedSum
from dpoptim.noise.correlated import BandedToeplitz
from dpoptim.plan import Plan
from dpoptim.training.private_training import PrivateTraining


def banded_query(plan: Plan) -> tuple[CorrelatedSum, BandedToeplitz]:
    """Return the plan's query and its strategy.

    Raises:
        ValueError: the plan's noise is not banded.
    """
    query = plan.query
    if not isinstance(query, CorrelatedSum) or not isinstance(query.strategy, BandedToeplitz):
        raise ValueError("this attack is for banded noise.")
    return query, query.strategy


def strategy_output(strategy: BandedToeplitz, inputs: Floats) -> Floats:
    """C times inputs of shape (steps, k): written down here, not asked of the strategy."""
    steps = len(inputs)
    column, rows = strategy.coefficients(steps)
    output = np.zeros_like(inputs)
    for lag, coefficient in enumerate(column):
        output[lag:] += coefficient * inputs[: steps - lag]
    return np.asarray(output * np.sqrt(rows)[:, None])


@contextmanager
def canaries_trained(
    plan: Plan, present: NDArray[np.bool_], noise_seed: int | None, dtype: torch.dtype
) -> Iterator[tuple[PrivateTraining, NDArray[np.int64], Floats]]:
    """Run the plan with the canaries in ``present``, (m,).

    Yields the training, the canaries that were its records, and what was released of each
    canary's coordinate, in norm bounds: shape (steps, m).
    """
    data = canary_data(plan.neighboring, torch.from_numpy(present))
    model = Canaries(len(present), dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    length = LENGTH * plan.method.rule.norm
    with (
        releases_kept(len(present)) as kept,
        attach_canaries(plan, model, optimizer, data, noise_seed) as private,
    ):
        for index, sign in private.batches():
            private.backward(model(index) * sign.to(dtype) * length)
            optimizer.step()
        released = torch.stack(kept).numpy() / plan.method.rule.norm
        yield private, data.tensors[0].numpy(), released
