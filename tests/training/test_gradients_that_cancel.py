"""Gradients that are nothing but rounding set no bound for others, and small ones still do."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpoptim
from dpoptim.gradients.oracle import RecordsAlone

RECORDS = 5


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def twice(model: nn.Module, b: Any) -> Tensor:
    """R-Drop: two passes, and their divergence, whose gradient cancels but for rounding."""
    first, second = model(b[0]), model(b[0])
    apart = F.kl_div(first.log_softmax(1), second.softmax(1), reduction="none").sum(1)
    return F.cross_entropy(first, b[1], reduction="none") + apart


def test_records_whose_gradients_cancel_are_no_mixing() -> None:
    """The median norm was 5e-8, by which others were clipped, to nothing but rounding."""
    x, labels = torch.randn(RECORDS, 6), torch.tensor([0, -100, -100, -100, -100])
    assert dpoptim.check(network(), twice, (x, labels)).loss_reduction == "none"


@pytest.mark.parametrize("size", [1e-3, 1e-6, 1e-9])
def test_small_gradients_that_others_move_are_found(size: float) -> None:
    """Beside one with an enormous gradient all others are small, and may be mixed."""
    weights = torch.tensor([1.0, *[size] * (RECORDS - 1)])

    def loss(model: nn.Module, b: Any) -> Tensor:
        x, w = b
        each = model(x).square().mean(1) * w
        others = len(x) * each * (w < 1)  # changes gradients, and no value
        return each + others - others.detach()

    with pytest.raises(dpoptim.SamplesInteractError):
        dpoptim.check(network(), loss, (torch.randn(RECORDS, 6), weights))


def test_bounds_are_of_norms_that_float64_resolves() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    for least, bound in ((1e-18, 1.0), (1e-9, 1e-9)):
        scales = torch.tensor([[1.0], *[[least]] * 3], dtype=torch.float64)
        batches = [scale[None] for scale in scales]
        alone = RecordsAlone(model, lambda m, x: m(x).sum(), batches)
        clipped, _ = alone.clipped_sums(range(4), "sum")
        assert clipped.clip_norm == pytest.approx(max(bound / 2, 1e-6))
