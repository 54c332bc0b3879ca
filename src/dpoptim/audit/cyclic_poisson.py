"""Attack on banded noise over batches sampled by turns, by somebody who knows each canary's part.

The guarantee holds for every part, so the attacker may be told it. A canary's turns are separate
stretches of the strategy's output, which the attacker makes from what was released; in each, the
likelihood ratio is that of a sampled Gaussian in the direction of the canary's column.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from dpoptim.audit.banded import banded_query, canaries_trained, strategy_output
from dpoptim.audit.sampled_gaussians import SampledGaussians
from dpoptim.audit.side_by_side import Floats
from dpoptim.audit.two_worlds import log_likelihood_ratio
from dpoptim.plan import Plan
from dpoptim.sampling import CyclicPoissonSampling
from dpoptim.training.private_training import PrivateTraining


def parts_of(plan: Plan) -> CyclicPoissonSampling:
    """Return the plan's sampler.

    Raises:
        ValueError: the plan samples otherwise, or its noise is not banded.
    """
    banded_query(plan)
    if not isinstance(plan.sampler, CyclicPoissonSampling):
        raise ValueError("this attack is for cyclic Poisson batches.")
    return plan.sampler


def family_of_turns(plan: Plan) -> SampledGaussians:
    """Return the plan's family, its noise apart: written down here, not asked of it."""
    sampler = parts_of(plan)
    turns = -(-plan.steps // sampler.parts)
    return SampledGaussians(plan.batch_size / plan.n * sampler.parts, turns, plan.neighboring)


def scores_of_turns(
    plan: Plan,
    present: NDArray[np.bool_],
    *,
    noise_seed: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Floats:
    """Run the plan with the canaries in ``present``, (m,), and score each one's presence: (m,)."""
    sampler = parts_of(plan)
    # of who is not there
    parts = np.random.default_rng(0).integers(sampler.parts, size=len(present))
    with canaries_trained(plan, present, noise_seed, dtype) as (private, records, released):
        parts[records] = known_parts(private)
    return turn_scores(plan, released, parts)


def known_parts(private: PrivateTraining) -> NDArray[np.int64]:
    """Return the parts that the run dealt its records into."""
    order = private._steps.secret_state()["queue"]["order"]
    return np.asarray(order.numpy())


def turn_scores(plan: Plan, released: Floats, parts: NDArray[np.int64]) -> Floats:
    """Score canaries by what was released of their coordinates.

    Args:
        released: (steps, m), in norm bounds. parts: of the canaries, (m,).
    """
    (query, strategy), sampler = banded_query(plan), parts_of(plan)
    column, rows = strategy.coefficients(plan.steps)
    weights = np.sqrt(rows)
    output = strategy_output(strategy, released)
    noise = query.standard_deviation / query.norm_bound
    scores = np.zeros(len(parts))
    for step in range(plan.steps):
        direction = column[: plan.steps - step] * weights[step : step + len(column)]
        length = float(np.linalg.norm(direction))
        mine = parts == step % sampler.parts
        seen = direction @ output[step : step + len(direction), mine] / length**2
        scores[mine] += log_likelihood_ratio(
            seen,
            noise_multiplier=noise / length,
            sample_rate=sampler.rate,
            neighboring=plan.neighboring,
        )
    return scores
