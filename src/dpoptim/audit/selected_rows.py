"""Tables whose rows noisy counts select: canaries with a row each, and what a record adds.

An attacker who adds records of his own to a canary's row moves its count to the threshold, or
beyond it: the same as another threshold. So the attack lowers the plan's, to where rows are
visible; noise, share, steps and sampling stay the plan's. Detectors look at what a record adds to a
step's query, and at what a step shows of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from scipy.stats import chi2
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpoptim.accounting.canonical import canonical
from dpoptim.accounting.choose_profile import gaussian_mu
from dpoptim.accounting.guarantee import parse_neighboring
from dpoptim.audit.bounds import Floats, clopper_pearson_lower, clopper_pearson_upper
from dpoptim.audit.finding import Finding
from dpoptim.audit.small_runs import attach_canaries
from dpoptim.audit.step_methods import two_worlds_finding
from dpoptim.audit.two_worlds import LENGTH, Attack, sampled_gaussians
from dpoptim.clipping import Clipping
from dpoptim.distributed.ranks import Ranks
from dpoptim.gate import SelectedRows
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.isolation import Isolation
from dpoptim.mechanisms.selected_rows import RowSelection
from dpoptim.methods import SparseSGD, TrainingMethod
from dpoptim.noise.few_rows import memory_of
from dpoptim.plan import Plan
from dpoptim.sampling import Sampler
from dpoptim.training.attach import attach
from dpoptim.training.tables import totals_of_tables

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


def row_selection(failure: float, seed: int) -> str:
    """Detect records that add too much to a step's query, and queries that show too much."""
    found = contribution_maps(seed), law_of_selection(failure, seed)
    return "; ".join(each for each in found if each)


class Lookups(nn.Module):
    """Two tables, in which a record may look a row up several times: bags, and a sequence."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(rows, 2, mode="sum", padding_idx=0, dtype=torch.float64)
        self.row = nn.Embedding(rows, 2, dtype=torch.float64)

    def forward(self, index: Tensor) -> Tensor:
        return self.bag(index).sum(1) + self.row(index).sum((1, 2))


def contribution_maps(seed: int) -> str:
    """Exact: how far one record moves counts and sums together, whatever it looks up."""
    generator, rows = torch.Generator().manual_seed(seed), 60
    batch = torch.randint(0, rows, (6, rows), generator=generator)
    batch[0] = torch.arange(rows)  # all rows
    batch[1] = 7  # one row, many times
    batch[2, 5:] = 0  # padding
    batch[3, 1::2] = batch[3, ::2]  # some twice
    found = sums_and_counts(batch)
    for record in range(len(batch)):
        others = sums_and_counts(torch.cat([batch[:record], batch[record + 1 :]]))
        counts, sums = (
            distance_of_tables(found[2:], others[2:]),
            distance_of_tables(found[:2], others[:2]),
        )
        if max(counts, sums) > 1:
            return (
                f"refuted: record {record} moves the counts by {counts:.7g} and the sums by "
                f"{sums:.7g} C, of at most 1"
            )
    return ""


def distance_of_tables(of_one: Sequence[Tensor], of_other: Sequence[Tensor]) -> float:
    pairs = zip(of_one, of_other, strict=True)
    return math.sqrt(sum(float((a - b).to_dense().square().sum()) for a, b in pairs))


def sums_and_counts(batch: Tensor) -> list[Tensor]:
    """Sums of both tables over C, and their counts: what a step would ask the gate for."""
    torch_state = torch.random.get_rng_state()
    model = Lookups(60)
    torch.random.set_rng_state(torch_state)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    totals = totals_of_tables(model, [optimizer], Isolation(), Ranks())
    engine = Engine(model, Clipping(1.0), capacity=len(batch), reduction="sum", totals=totals)
    engine.attach()
    try:
        engine.begin_microbatch(len(batch), groups=[[1]] * len(batch))
        engine.backward(5 * model(batch))
        return memory_of(engine.take_by_parameter())
    finally:
        engine.detach()


@dataclass
class Law:
    """The mechanism's law, as a run shows it: rows by what was in them.

    Attributes:
        trials, kept: rows without a record and with one, over all steps; and of them those seen.
        squares: of the sums over C of rows seen, less their record's; added up.
    """

    trials: list[int] = field(default_factory=lambda: [0, 0])
    kept: list[int] = field(default_factory=lambda: [0, 0])
    squares: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def note(self, kind: int, moved: Floats) -> None:
        seen = moved != 0
        self.trials[kind] += len(moved)
        self.kept[kind] += int(seen.sum())
        self.squares[kind] += float(np.square(moved[seen] - kind).sum())


def law_of_selection(failure: float, seed: int) -> str:
    """Statistical: counts and gradients together must not show more than one Gaussian's mu.

    The noise on counts is read off how often rows without a record and with one are selected, that
    on gradients off the values of those that are; each bound fails with probability at most a
    quarter of ``failure``.
    """
    count, part = 20_000, failure / 4
    plan = SparseSGD(1.0, share=0.5, false_positives=0.3).plan(
        n=count // 2, batch_size=count // 2, steps=4, noise_multiplier=1.0, delta=1e-5
    )
    model, law = Rows(count), Law()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = TensorDataset(torch.arange(count // 2))
    with attach(plan, model, optimizer, data, noise_seed=seed, label="audit") as private:
        for (index,) in private.batches():
            private.backward(LENGTH * model(index))
            optimizer.step()
            moved = take_moves(model)[:-1] * plan.batch_size
            law.note(1, moved[: count // 2])
            law.note(0, moved[count // 2 :])
    mu = gaussian_mu(canonical(plan.event), parse_neighboring(plan.neighboring))
    assert mu is not None
    return verdict_on(law, mu / math.sqrt(plan.steps), part)


def verdict_on(law: Law, claimed: float, failure: float) -> str:
    """The finding, from lower bounds on what counts and gradients show each."""
    with_one = float(ndtri(clopper_pearson_lower(law.kept[1], law.trials[1], failure)))
    without = float(ndtri(clopper_pearson_upper(law.kept[0], law.trials[0], failure)))
    by_count = max(0.0, with_one - without)
    for kind in (0, 1):
        if law.kept[kind] == 0:
            return f"refuted: no row {'with a record' if kind else 'without'} was ever selected"
        if law.squares[kind] == 0:
            return f"refuted: rows {'with' if kind else 'without'} a record have no noise"
        most = law.squares[kind] / chi2.ppf(failure, law.kept[kind])  # of the variance
        shown = math.hypot(by_count, 1 / math.sqrt(most))
        if shown > claimed:
            return (
                f"refuted: a step shows mu of at least {shown:.4g} (counts {by_count:.4g}), and "
                f"{claimed:.4g} is claimed"
            )
    return ""
