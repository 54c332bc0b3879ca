"""Attacks on tables whose rows noisy counts select: canaries with a row each, and what is counted.

An attacker who adds records of his own to a canary's row moves its count to the threshold, or
beyond it: the same as another threshold. So the attack lowers the plan's, to where rows are
visible; noise, share, steps and sampling stay the plan's.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpoptim.audit.finding import Finding
from dpoptim.audit.small_runs import attach_canaries
from dpoptim.audit.step_methods import two_worlds_finding
from dpoptim.audit.two_worlds import LENGTH, Attack, sampled_gaussians
from dpoptim.gate import SelectedRows
from dpoptim.mechanisms.selected_rows import RowSelection
from dpoptim.methods import TrainingMethod
from dpoptim.plan import Plan
from dpoptim.sampling import Sampler

Floats = NDArray[np.float64]
VISIBLE = 0.98  # of the rows are selected without the canary, where the gradient shows most


@dataclass(frozen=True)
class LowThreshold(TrainingMethod):
    """A method's sampler and row selection with flat clipping, and most rows selected."""

    method: TrainingMethod
    clip_norm: float
    visible: float = VISIBLE
    name: ClassVar[str] = "low threshold"
    summary: ClassVar[str] = "for audits"

    def sampler(self, n: int, batch_size: int) -> Sampler:
        return self.method.sampler(n, batch_size)

    @property
    def mechanism(self) -> RowSelection:
        mechanism = self.method.mechanism
        assert isinstance(mechanism, RowSelection)
        return replace(mechanism, false_positives=self.visible)


def selected_rows(plan: Plan, trials: int, seed: int) -> Finding:
    """Counts and gradients of ``trials`` canaries at once; see `audit.two_worlds`."""
    assert isinstance(plan.method, TrainingMethod)
    assert isinstance(plan.query, SelectedRows)
    # most of a large share shows where the count decides
    visible = VISIBLE if plan.query.share < 0.5 else 0.5
    scaled = replace(
        plan,
        method=LowThreshold(plan.method, plan.method.norm_bound, visible),
        n=trials,
        batch_size=max(1, round(plan.batch_size / plan.n * trials)),
    )
    return two_worlds_finding(scaled, seed, Attack(canary_scores, sampled_gaussians))


class Rows(nn.Module):
    """A table with a row for each canary; one more is padding, for those that are not there."""

    def __init__(self, count: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.table = nn.Embedding(count + 1, 1, padding_idx=count, dtype=dtype)
        with torch.no_grad():
            self.table.weight.zero_()

    def forward(self, index: Tensor) -> Tensor:
        return self.table(index)[:, 0]


def canary_scores(
    plan: Plan,
    present: NDArray[np.bool_],
    *,
    noise_seed: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Floats:
    """Run the plan with the canaries in ``present``, (m,), and score each one's presence: (m,).

    The score is the log-likelihood ratio of what is seen: whether the row moved, and how far.
    """
    model = Rows(len(present), dtype)
    scores = np.zeros(len(present))
    data = canary_data(plan.neighboring, torch.from_numpy(present))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    norm = plan.method.rule.norm
    with attach_canaries(plan, model, optimizer, data, noise_seed) as private:
        for index, sign in private.batches():
            private.backward(model(index) * sign.to(dtype) * LENGTH * norm)
            optimizer.step()
            step = private.steps_done - 1
            moved = take_moves(model)[:-1] * plan.expected_batch(step) / norm
            scores += log_likelihood_ratio(plan, step, moved)
    return scores


def take_moves(model: Rows) -> Floats:
    """How far each row moved from zero, against the gradient; they are back there afterwards."""
    with torch.no_grad():
        moved = -model.table.weight[:, 0].double().numpy()
        model.table.weight.zero_()
    return np.asarray(moved, np.float64)


def canary_data(neighboring: str, present: Tensor) -> TensorDataset:
    """Records (row, sign of the gradient); under zero-out an absent one looks up nothing."""
    index, padding = torch.arange(len(present)), len(present)
    match neighboring:
        case "add-or-remove-one":
            return TensorDataset(index[present], torch.ones(int(present.sum())))
        case "zero-out":
            return TensorDataset(torch.where(present, index, padding), torch.ones(len(present)))
        case "replace-one":
            return TensorDataset(index, present.float() * 2 - 1)
    raise ValueError(f"neighboring {neighboring!r} has no two-world audit.")


def log_likelihood_ratio(plan: Plan, step: int, moved: Floats) -> Floats:
    """Log-likelihood ratio, present over absent, of rows' moves over C; 0: not selected."""
    query = plan.query
    assert isinstance(query, SelectedRows)
    rate = plan.expected_batch(step) / plan.n
    deviation = query.deviation(step) / query.norm_bound
    absent, present = ndtr(query.scores(np.array([0.0, 1.0]), step))
    seen = moved != 0

    def against_nothing(x: Floats) -> Floats:
        shown = np.log(present / absent) + (2 * x - 1) / (2 * deviation**2)
        hidden = math.log(max(1 - present, 1e-300) / (1 - absent))
        exponent = np.where(seen, shown, hidden)
        if rate == 1:
            return np.asarray(exponent)
        return np.logaddexp(math.log1p(-rate), math.log(rate) + exponent)

    ratio = against_nothing(moved)
    return ratio - against_nothing(-moved) if plan.neighboring == "replace-one" else ratio
