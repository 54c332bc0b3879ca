"""Attack on banded noise over batches sampled by turns, by somebody who knows each canary's part.

The guarantee holds for every part, so the attacker may be told it. A canary's turns are separate
stretches of the strategy's output, which the attacker makes from what was released; in each, the
likelihood ratio is that of a sampled Gaussian in the direction of the canary's column.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from dpoptim.audit.family import SampledGaussians
from dpoptim.audit.side_by_side import Floats, releases_kept
from dpoptim.audit.two_worlds import LENGTH, Canaries, canary_data, log_likelihood_ratio
from dpoptim.gate import CorrelatedSum
from dpoptim.noise.correlated import BandedToeplitz
from dpoptim.plan import Plan
from dpoptim.sampling import CyclicPoissonSampling
from dpoptim.training.attach import attach
from dpoptim.training.private_training import PrivateTraining


def parts_of(plan: Plan) -> CyclicPoissonSampling:
    """Return the plan's sampler.

    Raises:
        ValueError: the plan samples otherwise, or its noise is not banded.
    """
    query = plan.query
    banded = isinstance(query, CorrelatedSum) and isinstance(query.strategy, BandedToeplitz)
    if not isinstance(plan.sampler, CyclicPoissonSampling) or not banded:
        raise ValueError("this attack is for banded noise on batches sampled by turns.")
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
    data = canary_data(plan.neighboring, torch.from_numpy(present))
    model = Canaries(len(present), dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    length = LENGTH * plan.method.rule.norm
    with (
        releases_kept(len(present)) as kept,
        attach(plan, model, optimizer, data, noise_seed=noise_seed, label="audit") as private,
    ):
        for index, sign in private.batches():
            private.backward(model(index) * sign.to(dtype) * length)
            optimizer.step()
        known = known_parts(private)
    # of who is not there
    parts = np.random.default_rng(0).integers(sampler.parts, size=len(present))
    parts[data.tensors[0].numpy()] = known
    released = torch.stack(kept).numpy() / plan.method.rule.norm
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
    query, sampler = plan.query, parts_of(plan)
    assert isinstance(query, CorrelatedSum)
    assert isinstance(query.strategy, BandedToeplitz)
    column, rows = query.strategy.coefficients(plan.steps)
    weights = np.sqrt(rows)
    output = np.zeros_like(released)  # of the strategy: D T applied to what was released
    for lag, coefficient in enumerate(column):
        output[lag:] += coefficient * released[: plan.steps - lag]
    output *= weights[:, None]
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
