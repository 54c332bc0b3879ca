"""Try to falsify that a unit moves a step's sum by at most C: persons, and records held twice.

A person may own any rows; a data set that holds a record at several places, trained on or scored,
is to be refused.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from dpoptim.audit.finding import refuted_by
from dpoptim.audit.small_runs import CLIP_NORM, linear_of_zeros, parameters_of, sum_of_a_step
from dpoptim.errors import PrivacyError
from dpoptim.evaluation import ClassifierScores
from dpoptim.methods import DPSGD
from dpoptim.training.attach import attach_own

REDUCTIONS: tuple[tuple[Literal["mean", "sum"], int | None], ...] = (
    ("mean", None),
    ("sum", None),
    ("mean", 3),
    ("sum", 6),
)
PERSONS, MOST, FEATURES = 6, 3, 4
RECORDS = 6


def sum_over_persons(
    x: Tensor, y: Tensor, owners: Tensor, how: Literal["mean", "sum"], physical: int | None
) -> Tensor:
    """The sum of one step of a linear model, of every person and without noise: float64."""
    plan = DPSGD(clip_norm=CLIP_NORM).plan(
        n=PERSONS, batch_size=PERSONS, steps=1, noise_multiplier=0, delta=1e-5
    )
    model = linear_of_zeros(FEATURES, 1, bias=True, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with attach_own(
        plan,
        model,
        optimizer,
        TensorDataset(x, y),
        loss_reduction="sum",
        noise_seed=0,
        persons=owners.tolist(),
        rows_per_record=MOST,
        rows_reduction=how,
    ) as private:
        for rows, targets in private.batches(physical_batch_size=physical):
            F.mse_loss(model(rows)[:, 0], targets, reduction="sum").backward()
            optimizer.step()
    return -PERSONS * parameters_of(model)


def persons() -> str:
    """Take persons out, of agreeing, cancelling or single rows: how far do sums move?"""
    owners = torch.tensor([0, 1, 1, 2, 2, 2, 3, 4, 4, 5, 5, 5, 5, 5])
    x = torch.arange(len(owners) * FEATURES, dtype=torch.float64).view(-1, FEATURES).mul(1.7).sin()
    y = torch.arange(len(owners), dtype=torch.float64).add(0.4).cos()
    last = owners == 5
    hostile = {
        "agree": torch.ones(5, dtype=torch.float64),
        "cancel": torch.tensor([1.0, -1, 1, -1, 1]).double(),
    }
    findings = []
    for name, signs in hostile.items():
        for how, physical in REDUCTIONS:
            x[last], y[last] = 1e3, 1e3 * signs
            with_them = sum_over_persons(x, y, owners, how, physical)
            moved = float(
                (
                    with_them - sum_over_persons(x[~last], y[~last], owners[~last], how, physical)
                ).norm()
            )
            if not moved <= CLIP_NORM * (1 + 1e-9):
                findings.append(
                    f"a person whose rows {name} moved the sum by {moved / CLIP_NORM:.4g} C ({how})"
                )
    # a person of one row, too short to be clipped, adds that row's gradient
    x, y = x[:1], 0.1 * y[:1]
    expected = -2 * y[0] * torch.cat([x[0], torch.ones(1, dtype=torch.float64)])
    for how, _ in REDUCTIONS[:2]:
        if not torch.allclose(sum_over_persons(x, y, owners[:1], how, None), expected, rtol=1e-6):
            findings.append(f"rows that are not there change what a person adds ({how})")
    return refuted_by(findings)


def oversampled(x: Tensor) -> Any:
    return Subset(TensorDataset(x), [0, 0, *range(1, RECORDS)])


def added_to_itself(x: Tensor) -> Any:
    return ConcatDataset([TensorDataset(x), TensorDataset(x)])


def listed_again(x: Tensor) -> Any:
    items = [(row,) for row in x]
    return items + items[:1]


REPEATS: dict[str, Callable[[Tensor], Any]] = {
    "a Subset that repeats a place": oversampled,
    "a data set joined to itself": added_to_itself,
    "a list with an item again": listed_again,
}


def repeated_records() -> str:
    """Blank one record, and see how far the sum and the counts of scores move."""
    found = []
    for name, make in REPEATS.items():
        with suppress(PrivacyError):
            sums = [
                sum_of_a_step(linear_of_zeros(2, 1), make(records(first)), first_output)
                for first in (1.0, 0.0)
            ]
            moved = float((sums[0] - sums[1]).norm())
            if moved > CLIP_NORM:
                found.append(f"{name} moves the sum by {moved / CLIP_NORM:.2f} clip norms")
        with suppress(PrivacyError):
            counts = float((counts_of(make(records(1.0))) - counts_of(make(records(0.0)))).max())
            if counts > 1.5:
                found.append(f"{name} moves a count of scores by {counts:.0f}")
    return refuted_by(found)


def records(first: float) -> Tensor:
    """The first one as often as given, the others far out."""
    x = torch.arange(1.0, 2 * RECORDS + 1).reshape(RECORDS, 2)
    x[0] *= first
    return x


def first_output(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)[:, 0]


def counts_of(hold_out: Any) -> Tensor:
    """Correct and wrong predictions, by noise that repeats; a blank record is of no class."""

    def outputs(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return model(batch[0]), batch[0][:, 0].sign() - 1

    model = linear_of_zeros(2, 2, bias=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    n = len(hold_out)
    plan = DPSGD(CLIP_NORM).plan(
        n=1, batch_size=1, steps=1, noise_multiplier=1.0, delta=1e-3, neighboring="zero-out"
    )
    with attach_own(plan, model, optimizer, TensorDataset(records(1.0)[:1])) as private:
        scores = private.evaluate(hold_out, epsilon=1.0, n=n, outputs=outputs, noise_seed=1)
    assert isinstance(scores, ClassifierScores)
    return torch.from_numpy(scores.confusion)
