"""Sums that trials hold the engine against: the truth, by one pass over records alone."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.gradients.engine_sums import engine_sums
from dpoptim.gradients.expected_sums import (
    CLIPPING_AND_NOT,
    LEAST_BOUND,
    TABLE,
    WEIGHTED,
    squared_distance,
)
from dpoptim.gradients.oracle import RecordsAlone, clipped_sums, gradients_alone
from dpoptim.gradients.placement import IN_PLACE
from dpoptim.noise.few_rows import FewRows

SIZES = [1.0, 1.0, 1e-3, 50.0, 1.0, 0.0, math.inf]  # of records; without the last two, of norms
ORDER = [*range(7), 0, 3]


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().sum()


def records(sizes: list[float]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 4, dtype=torch.float64) * size for size in sizes]


@pytest.mark.parametrize("weighings", [[WEIGHTED], [*CLIPPING_AND_NOT]])
def test_sums_are_those_of_weighted_clipped_gradients(weighings: list[Any]) -> None:
    model, alone = nn.Linear(4, 3).double(), records(SIZES)
    gradients = gradients_alone(model, loss, alone)
    found = RecordsAlone(model, loss, alone).clipped_sums(weighings, ORDER, "sum")
    for each in found:
        weights = torch.tensor(each.weights, dtype=torch.float64)
        weighted = [(g.movedim(0, -1) * weights).movedim(-1, 0)[ORDER] for g in gradients]
        truth = clipped_sums(weighted, Clipping(each.clip_norm), len(ORDER), "sum")
        assert max(each.distances(truth, IN_PLACE)) <= 1e-9 * each.clip_norm


def test_weights_make_some_records_longer_than_the_bound_and_others_shorter() -> None:
    """However long their gradients are; weights commute with rounding."""
    model, sizes = nn.Linear(4, 3), [30.0, 1.0, 0.1, 2.0, 1.0]
    alone = [each.float() for each in records(sizes)]
    gradients = RecordsAlone(model, loss, alone)
    (found,) = gradients.clipped_sums([WEIGHTED], range(5), "sum")
    reached = gradients.squared.sqrt() * torch.tensor(found.weights) / found.clip_norm
    for reaches, least in zip(reached.tolist(), [1.25, 0.45, 2.5, 0.225, 1.25], strict=True):
        assert least <= reaches * (1 + 1e-6)
        assert reaches < 2 * least
    assert all(math.frexp(each)[0] == 0.5 for each in found.weights)


@pytest.mark.parametrize(
    ("weighings", "first"), [([WEIGHTED], 1e-9), ([WEIGHTED], 1e6), ([*CLIPPING_AND_NOT], 1e6)]
)
def test_a_first_record_unlike_the_others_sets_no_bound(weighings: list[Any], first: float) -> None:
    model, alone = nn.Linear(4, 3, bias=False).double(), records([first, 1.0, 1.0, 1.0, 1.0])
    gradients = RecordsAlone(model, loss, alone)
    found = gradients.clipped_sums(weighings, range(5), "sum")
    typical = float(gradients.squared.sqrt().median())
    assert typical / 2 <= found[0].clip_norm <= typical


def test_nothing_is_clipped_under_the_bound_that_clips_nobody() -> None:
    model, alone = nn.Linear(4, 3).double(), records([1.0, 2.0, 3.0])
    gradients = RecordsAlone(model, loss, alone)
    clipping, none = gradients.clipped_sums(CLIPPING_AND_NOT, range(3), "sum")
    assert none.clip_norm > 1.9 * float(gradients.squared.max().sqrt()) > clipping.clip_norm
    for total, g in zip(none.of, gradients.stacked(), strict=True):
        torch.testing.assert_close(total, g.sum(0), rtol=1e-6, atol=1e-6)


def test_records_without_any_gradient_have_sums_of_zero() -> None:
    model, alone = nn.Linear(4, 3, bias=False).double(), records([0.0, math.nan])
    for each in RecordsAlone(model, loss, alone).clipped_sums(CLIPPING_AND_NOT, [0, 1], "sum"):
        assert each.clip_norm == LEAST_BOUND
        assert not any(total.any() for total in each.of)


def test_what_records_give_each_other_shows_even_where_it_adds_up_to_nothing() -> None:
    """As where a loss takes the mean of the batch from each record's output."""
    torch.manual_seed(0)
    model, batch = nn.Linear(4, 3), torch.randn(6, 4)
    gradients = RecordsAlone(model, loss, [*batch.split(1)])
    (truth,) = gradients.clipped_sums([WEIGHTED], range(6), "sum")

    def off(of_each: Any) -> float:
        def weighted(model: nn.Module, x: Tensor) -> Tensor:
            return (of_each(model, x) * torch.tensor(truth.weights)).sum()

        given = model, weighted, batch, 6, Clipping(truth.clip_norm), "sum"
        return max(truth.distances(engine_sums(*given), IN_PLACE)) / truth.clip_norm  # type: ignore[arg-type]

    def own(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum(1)

    def given_round(model: nn.Module, x: Tensor) -> Tensor:
        found = own(model, x)
        return found + 0.01 * (found - found.roll(1))

    assert off(own) < 1e-6
    assert off(given_round) > 1e-3


def test_distances_are_of_all_entries() -> None:
    torch.manual_seed(0)
    ours, truth = torch.randn(3, 70_001), torch.randn(3, 70_001, dtype=torch.float64)
    torch.testing.assert_close(
        squared_distance(ours, truth), (ours.double() - truth).square().sum()
    )


class Looked(nn.Module):
    """A table, large enough to be in memory for the rows that were looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TABLE // 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)[:, 0]


@pytest.mark.parametrize("dense", [False, True])
def test_large_tables_have_memory_for_few_rows(dense: bool) -> None:
    torch.manual_seed(0)
    model, alone = Looked(), [torch.randint(TABLE // 8, (1, 3)) for _ in range(4)]
    (found,) = RecordsAlone(model, loss, alone).clipped_sums([WEIGHTED], range(4), "sum")
    assert isinstance(found.of[0], FewRows)
    weighted = [
        g * torch.tensor(found.weights).view(-1, 1, 1) for g in gradients_alone(model, loss, alone)
    ]
    truth = clipped_sums(weighted, Clipping(found.clip_norm), 4, "sum")[0]
    row = truth.any(1).nonzero()[:, 0]
    given = truth.clone() if dense else FewRows(truth.new_empty(0), 0, row, truth[row])
    assert found.distances([given], IN_PLACE)[0] < 1e-6 * found.clip_norm
    truth[row[0]] += 0.5
    given = truth.clone() if dense else FewRows(truth.new_empty(0), 0, row, truth[row])
    assert found.distances([given], IN_PLACE)[0] == pytest.approx(0.5 * math.sqrt(8))
