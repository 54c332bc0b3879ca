"""Sums that trials hold the engine against: the truth, by one pass over records alone."""

import math

import pytest
import torch
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.gradients.expected_sums import LEAST_BOUND, TABLE, squared_distance
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


def test_sums_are_those_of_clipped_gradients() -> None:
    model, alone = nn.Linear(4, 3).double(), records(SIZES)
    gradients = gradients_alone(model, loss, alone)
    for found in RecordsAlone(model, loss, alone).clipped_sums(ORDER, "sum"):
        clipping = Clipping(found.clip_norm)
        truth = clipped_sums([g[ORDER] for g in gradients], clipping, len(ORDER), "sum")
        assert max(found.distances(truth, IN_PLACE)) <= 1e-6 * found.clip_norm


@pytest.mark.parametrize("first", [1e-9, 1e-1, 1e6])
def test_a_first_record_unlike_the_others_sets_no_bound(first: float) -> None:
    """Rounding of gradients that are nearly zero would look as if records were mixed."""
    model, alone = nn.Linear(4, 3, bias=False).double(), records([first, 1.0, 1.0, 1.0, 1.0])
    gradients = RecordsAlone(model, loss, alone)
    clipping, _ = gradients.clipped_sums(range(5), "sum")
    typical = float(gradients.squared.sqrt().median())
    assert 0.25 * typical <= clipping.clip_norm <= 0.75 * typical


def test_nothing_is_clipped_under_the_bound_that_clips_nobody() -> None:
    model, alone = nn.Linear(4, 3).double(), records([1.0, 2.0, 3.0])
    gradients = RecordsAlone(model, loss, alone)
    clipping, none = gradients.clipped_sums(range(3), "sum")
    assert none.clip_norm > 1.9 * float(gradients.squared.max().sqrt()) > clipping.clip_norm
    for total, g in zip(none.of, gradients.stacked(), strict=True):
        torch.testing.assert_close(total, g.sum(0), rtol=1e-6, atol=1e-6)


def test_records_without_any_gradient_have_sums_of_zero() -> None:
    model, alone = nn.Linear(4, 3, bias=False).double(), records([0.0, math.nan])
    for each in RecordsAlone(model, loss, alone).clipped_sums([0, 1], "sum"):
        assert each.clip_norm == LEAST_BOUND
        assert not any(total.any() for total in each.of)


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
    found, _ = RecordsAlone(model, loss, alone).clipped_sums(range(4), "sum")
    assert isinstance(found.of[0], FewRows)
    gradients = gradients_alone(model, loss, alone)
    truth = clipped_sums(gradients, Clipping(found.clip_norm), 4, "sum")[0]
    row = truth.any(1).nonzero()[:, 0]
    given = truth.clone() if dense else FewRows(truth.new_empty(0), 0, row, truth[row])
    assert found.distances([given], IN_PLACE)[0] < 1e-6 * found.clip_norm
    truth[row[0]] += 0.5
    given = truth.clone() if dense else FewRows(truth.new_empty(0), 0, row, truth[row])
    assert found.distances([given], IN_PLACE)[0] == pytest.approx(0.5 * math.sqrt(8))
