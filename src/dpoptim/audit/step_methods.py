"""Methods that train step by step, attacked through their own loop."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpoptim.accounting.canonical import canonical
from dpoptim.accounting.choose_profile import gaussian_mu
from dpoptim.accounting.guarantee import parse_neighboring
from dpoptim.audit.banded import family_of_bins, family_of_turns, scores_of_bins, scores_of_turns
from dpoptim.audit.bounds import Floats
from dpoptim.audit.finding import CONFIDENCE, DELTA, MU, Finding, finding, gaussian_finding
from dpoptim.audit.min_separation import family_apart, scores_apart
from dpoptim.audit.side_by_side import releases_kept, separate, without_canary
from dpoptim.audit.small_runs import attach_canaries
from dpoptim.audit.two_worlds import (
    LENGTH,
    Attack,
    audit_two_worlds,
    canary_scores,
    sampled_gaussians,
)
from dpoptim.methods import DPFTRL, DPSGD
from dpoptim.plan import Plan

MOST_RELEASES = 16_000_000  # numbers that the worlds of a plan's audit keep


def dp_sgd(
    trials: int, seed: int, *, sample_rate: float = 1.0, steps: int = 4, noise: float = 2.0
) -> Finding:
    plan = DPSGD(1.0).plan(
        n=trials,
        batch_size=max(1, round(sample_rate * trials)),
        steps=steps,
        noise_multiplier=noise,
        delta=DELTA,
        neighboring="zero-out",
    )
    return two_worlds_finding(plan, seed)


BY_STEPS = Attack(canary_scores, sampled_gaussians)
BY_BINS = Attack(scores_of_bins, family_of_bins)
BY_PATTERNS = Attack(scores_apart, family_apart)
BY_TURNS = Attack(scores_of_turns, family_of_turns)


def two_worlds_finding(plan: Plan, seed: int, attack: Attack = BY_STEPS) -> Finding:
    """The two-world audit's finding on a plan that samples, or takes everybody each step."""
    result = audit_two_worlds(
        plan, confidence=CONFIDENCE, seed=seed, noise_seed=seed, attack=attack
    )
    family = attack.family(plan)

    def needed() -> int:  # half of the trials choose the threshold, and certify nothing
        return 2 * family.trials_that_show_half(
            plan.noise_multiplier, result.claimed, plan.delta, CONFIDENCE
        )

    return finding(result.claimed, result.lower_bound, result.limit, result.trials, needed=needed)


def dp_ftrl(trials: int, seed: int, *, passes: int = 1, **settings: Any) -> Finding:
    """Correlated noise on fixed batches; ``settings`` of the method."""
    steps_per_pass = 6
    method = DPFTRL(1.0, order="given", **settings)
    plan = method.plan(
        n=trials * steps_per_pass,
        batch_size=trials,
        epochs=passes,
        noise_multiplier=1 / MU,
        delta=DELTA,
        neighboring="zero-out",
    )
    return fixed_order_plan(plan, trials, seed)


def dp_ftrl_by_turns(trials: int, seed: int, *, rate: float = 0.5) -> Finding:
    """Banded noise on cyclic Poisson batches; at ``rate`` 1 parts are whole, and most shows."""
    bands = 4
    plan = DPFTRL(1.0, sampling="cyclic-poisson", bands=bands).plan(
        n=trials - trials % bands,
        batch_size=round(rate * trials) // bands,
        steps=3 * bands,
        noise_multiplier=math.sqrt(3) / MU if rate == 1 else 0.7,
        delta=DELTA,
        neighboring="zero-out",
    )
    return two_worlds_finding(plan, seed, BY_TURNS)


def dp_ftrl_in_bins(trials: int, seed: int) -> Finding:
    """Banded noise on balls in three bins, two passes."""
    n = trials - trials % 3
    plan = DPFTRL(1.0, sampling="balls-in-bins", bands=2).plan(
        n=n,
        batch_size=n // 3,
        epochs=2,
        noise_multiplier=0.6,
        delta=DELTA,
        neighboring="zero-out",
    )
    return two_worlds_finding(plan, seed, BY_BINS)


def dp_ftrl_apart(trials: int, seed: int) -> Finding:
    """Banded noise on b-min-sep batches."""
    bands = 3
    plan = DPFTRL(1.0, sampling="b-min-sep", bands=bands).plan(
        n=trials,
        batch_size=trials // 5,
        steps=3 * bands,
        noise_multiplier=0.5,
        delta=DELTA,
        neighboring="zero-out",
    )
    return two_worlds_finding(plan, seed, BY_PATTERNS)


def fixed_order_plan(plan: Plan, trials: int, seed: int) -> Finding:
    """Canaries in the first of fixed batches in given order, where a record is best seen.

    Args:
        plan: of a method that takes its batches in the data set's order. Steps and noise stay.
        trials: runs side by side; fewer where there are many steps, so that their releases fit
            memory.
    """
    trials = min(trials, max(1000, MOST_RELEASES // plan.steps))
    steps_per_pass = math.ceil(plan.n / plan.batch_size)
    n = trials * steps_per_pass
    plan = replace(plan, n=n, batch_size=trials)

    def world(presence: float, world_seed: int) -> Floats:
        index = torch.arange(trials).repeat(steps_per_pass)
        weight = torch.zeros(n, dtype=torch.float64)
        weight[:trials] = presence
        return table_releases(plan, TensorDataset(index, weight), trials, world_seed)

    found = separate(
        world, low=without_canary(plan.neighboring), confidence=CONFIDENCE, seed=seed * 10
    )
    return gaussian_finding(found, mu_of(plan))


def mu_of(plan: Plan) -> float:
    """Claim of a run that is one Gaussian.

    Raises:
        ValueError: it is none.
    """
    mu = gaussian_mu(canonical(plan.event), parse_neighboring(plan.neighboring))
    if mu is None:
        raise ValueError(
            f"a run on batches by {type(plan.sampler).__name__} is not one Gaussian, which the "
            "attack 'fixed order' supposes. Fix: the mechanism's audit_family names another one, "
            "such as 'everybody', which leaves the sampler out."
        )
    return mu


def table_releases(plan: Plan, data: TensorDataset, columns: int, seed: int) -> Floats:
    """Each step's release, a record's gradient being 16 C times its weight at its entry."""
    table = nn.Embedding(columns, 1, dtype=torch.float64)
    with torch.no_grad():
        table.weight.zero_()
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    with (
        releases_kept(columns) as kept,
        attach_canaries(plan, table, optimizer, data, seed) as private,
    ):
        for index, weight in private.batches():
            private.backward(table(index)[:, 0] * weight * LENGTH)
            optimizer.step()
    return torch.stack(kept).numpy()
