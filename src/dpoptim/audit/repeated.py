"""Data sets that hold a record at several places, trained on or scored: to be refused."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from dpoptim.audit.finding import refuted_by
from dpoptim.audit.small_runs import CLIP_NORM, linear_of_zeros, sum_of_a_step
from dpoptim.errors import PrivacyError
from dpoptim.evaluation import ClassifierScores
from dpoptim.methods import DPSGD
from dpoptim.training.attach import attach

RECORDS = 6


def oversampled(x: Tensor) -> Any:
    return Subset(TensorDataset(x), [0, 0, *range(1, RECORDS)])


def added_to_itself(x: Tensor) -> Any:
    return ConcatDataset([TensorDataset(x), TensorDataset(x)])


def listed_again(x: Tensor) -> Any:
    items = [(row,) for row in x]
    return items + items[:1]


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "a Subset that repeats a place": oversampled,
    "a data set joined to itself": added_to_itself,
    "a list with an item again": listed_again,
}


def repeated_records() -> str:
    """Blank one record, and see how far the sum and the counts of scores move."""
    found = []
    for name, make in WAYS.items():
        with suppress(PrivacyError):
            sums = [
                sum_of_a_step(linear_of_zeros(2, 1), make(records(first)), output)
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


def output(model: nn.Module, x: Tensor) -> Tensor:
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
    with attach(plan, model, optimizer, TensorDataset(records(1.0)[:1])) as private:
        scores = private.evaluate(hold_out, epsilon=1.0, n=n, outputs=outputs, noise_seed=1)
    assert isinstance(scores, ClassifierScores)
    return torch.from_numpy(scores.confusion)
