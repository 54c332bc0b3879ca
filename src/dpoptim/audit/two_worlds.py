"""Two-world audit: the library's own code with and without a record, many times at once.

**Many worlds in one run.** Every canary record looks up a row of its own in a table with one
column, so its gradient is one coordinate, longer than the clip norm: the worst case for a Gaussian
mechanism (a Dirac canary). Each canary's coin says whether it is in the data set. Records are
clipped one by one and noise is independent by coordinate, so each canary is an independent trial
*if the code is right*: a false alarm has at most probability ``1 - confidence``. Nothing of the
library is re-implemented: plan, sampler, engine, clipping, gate, ledger and optimizer are reached
through ``dpoptim.attach``.

**The statistic** is the log-likelihood ratio of the canary's noisy coordinates, optimal by Neyman
and Pearson.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpoptim.audit.bounds import Errors, Floats
from dpoptim.audit.sampled_gaussians import SampledGaussians, attainable_errors, choose_threshold
from dpoptim.audit.small_runs import attach_canaries
from dpoptim.gate import GaussianSum
from dpoptim.plan import Plan
from dpoptim.sampling import PlannedPoissonSampling, PoissonSampling

LENGTH = 16.0  # of a canary's gradient, in clip norms: what is not clipped stands out


@dataclass(frozen=True)
class AuditResult:
    """Outcome of an attack on a claim.

    Attributes:
        claimed: epsilon of the plan at ``delta``.
        lower_bound: epsilon that the attack certifies, with probability ``confidence``.
        limit: what the best attack on a tight claim would certify with as many trials, on average.
        trials: certifying trials in both worlds together; as many others chose the threshold.
        errors: the counts behind the bound.
    """

    claimed: float
    lower_bound: float
    limit: float
    delta: float
    neighboring: str
    trials: int
    confidence: float
    errors: Errors

    @property
    def verdict(self) -> str:
        """``"refuted"`` if the lower bound exceeds the claim, else ``"consistent"``: no proof."""
        return "refuted" if self.lower_bound > self.claimed else "consistent"

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return {**asdict(self), "verdict": self.verdict}

    def __str__(self) -> str:
        return (
            f"{self.verdict}: claimed epsilon {self.claimed:.3g}, audited at least "
            f"{self.lower_bound:.3g} of about {self.limit:.3g} that {self.trials} trials could "
            f"show (delta={self.delta:g}, {self.neighboring}, confidence {self.confidence:.7g})"
        )


class Canaries(nn.Module):
    """A table with a row for each canary: record i's gradient is ``length`` at coordinate i."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(count, 1, dtype=dtype)

    def forward(self, index: Tensor) -> Tensor:
        return self.table(index)[:, 0]


def audit_two_worlds(
    plan: Plan,
    *,
    canaries: int | None = None,
    confidence: float = 0.95,
    seed: int | None = None,
    noise_seed: int | None = None,
    dtype: torch.dtype = torch.float64,
    attack: "Attack | None" = None,
) -> AuditResult:
    """Attack a plan through the public API and compare what was learned with what it promises.

    Args:
        plan: what to attack; its relation says what the two worlds are (record absent or present;
            its gradient zero or not; its gradient of one sign or the other).
        canaries: independent trials, half of which choose the threshold; by default the plan's n,
            which the relations with an exact n insist on. Under add-or-remove-one about half of
            them are in the data set.
        confidence: in (0, 1); of the lower bound.
        seed: of the canaries' coins; None: fresh.
        noise_seed: as for ``attach``, for repeatable tests.
        dtype: of the model. float64 loses less of C to the rounding margin, so it audits more
            sharply.
        attack: how canaries are scored, and the family that the plan is in; None: `canary_scores`.

    Returns:
        the result; for a right implementation its verdict is ``"refuted"`` with probability at
        most ``1 - confidence``.

    Raises:
        ValueError: a setting out of range, by name.
    """
    claimed = plan.guarantee.epsilon
    if not 0 < plan.noise_multiplier < math.inf:
        raise ValueError(
            "plan has no noise, so it claims nothing that could be refuted; give it a "
            "noise_multiplier."
        )
    count = plan.n if canaries is None else canaries
    if count < 8:
        raise ValueError(
            f"canaries must be at least 8, got {count}; thousands are needed to show anything."
        )
    coins = np.random.default_rng(seed)
    present = coins.random(count) < 0.5
    attack = attack or Attack(canary_scores, sampled_gaussians)
    scores = attack.scores(plan, present, noise_seed=noise_seed, dtype=dtype)
    choosing = coins.random(count) < 0.5
    family = attack.family(plan)
    claim = family.tradeoff(plan.noise_multiplier)
    threshold = choose_threshold(
        scores[choosing & ~present], scores[choosing & present], confidence, claim
    )
    absent_scores, present_scores = scores[~choosing & ~present], scores[~choosing & present]
    errors = Errors(
        int((absent_scores > threshold).sum()),
        len(absent_scores),
        int((present_scores <= threshold).sum()),
        len(present_scores),
    )
    attainable = attainable_errors(
        claim, min(errors.absent_trials, errors.present_trials), confidence
    )
    return AuditResult(
        claimed=claimed,
        lower_bound=family.lower_bound(errors, plan.delta, confidence),
        limit=family.lower_bound(attainable, plan.delta, confidence),
        delta=plan.delta,
        neighboring=plan.neighboring,
        trials=errors.absent_trials + errors.present_trials,
        confidence=confidence,
        errors=errors,
    )


@dataclass(frozen=True)
class Attack:
    """Scores of canaries by (plan, present, noise_seed, dtype), and the plan's family."""

    scores: Callable[..., Floats]
    family: Callable[[Plan], SampledGaussians]


def sampled_gaussians(plan: Plan) -> SampledGaussians:
    """Return the plan's family: its sampling and its proportions of noise, of any size.

    Raises:
        ValueError: the plan is not of independent Gaussians on Poisson batches.
    """
    query, sampler = plan.query, plan.sampler
    coins = PoissonSampling | PlannedPoissonSampling
    if not isinstance(query, GaussianSum) or not isinstance(sampler, coins):
        raise ValueError(
            "the two-world audit is for independent noise on Poisson batches; see "
            "dpoptim.audit.attack_families."
        )
    rates = tuple(plan.expected_batch(step) / plan.n for step in range(plan.steps))
    return SampledGaussians(
        max(rates),
        plan.steps,
        plan.neighboring,
        query.scales,
        rates if min(rates) < max(rates) else (),
    )


def canary_scores(
    plan: Plan,
    present: NDArray[np.bool_],
    *,
    noise_seed: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Floats:
    """Run the plan with the canaries in ``present``, (m,), and score each one's presence: (m,)."""
    data = canary_data(plan.neighboring, torch.from_numpy(present))
    model = Canaries(len(present), dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    length = LENGTH * plan.method.rule.norm
    scales = sampled_gaussians(plan).scales
    scores = np.zeros(len(present))
    with torch.no_grad():
        model.table.weight.zero_()
    with attach_canaries(plan, model, optimizer, data, noise_seed) as private:
        for index, sign in private.batches():
            private.backward(model(index) * sign.to(dtype) * length)
            optimizer.step()
            with torch.no_grad():
                # SGD from zero with learning rate 1: the parameters are the noisy mean itself.
                expected = plan.expected_batch(private.steps_done - 1)
                moved = -model.table.weight[:, 0].double() * expected / plan.method.rule.norm
                model.table.weight.zero_()
            scores += log_likelihood_ratio(
                moved.numpy(),
                noise_multiplier=plan.noise_multiplier
                * (scales[private.steps_done - 1] if scales else 1.0),
                sample_rate=expected / plan.n,
                neighboring=plan.neighboring,
            )
    return scores


def canary_data(neighboring: str, present: Tensor) -> TensorDataset:
    """Records (row of the table, sign of the gradient) of the world that the coins chose."""
    index = torch.arange(len(present))
    match neighboring:
        case "add-or-remove-one":
            index = index[present]
            return TensorDataset(index, torch.ones(len(index)))
        case "zero-out":
            return TensorDataset(index, present.float())
        case "replace-one":
            return TensorDataset(index, present.float() * 2 - 1)
    raise ValueError(f"neighboring {neighboring!r} has no two-world audit.")


def log_likelihood_ratio(
    coordinate: Floats,
    *,
    noise_multiplier: float,
    sample_rate: float,
    neighboring: str = "add-or-remove-one",
) -> Floats:
    """Log-likelihood ratio, present over absent, of a step's noisy coordinate over C; any shape.

    ``log(1 - q + q exp((2 x - 1) / (2 sigma^2)))``; under replace-one the absent world's own term
    is subtracted.
    """

    def against_zero(x: Floats) -> Floats:
        exponent = (2 * x - 1) / (2 * noise_multiplier**2)
        if sample_rate == 1:
            return exponent
        return np.logaddexp(math.log1p(-sample_rate), math.log(sample_rate) + exponent)

    ratio = against_zero(coordinate)
    return ratio - against_zero(-coordinate) if neighboring == "replace-one" else ratio
