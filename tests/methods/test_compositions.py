"""Samplers, clipping, mechanisms and states combined: one record moves the gate's queries by no
more than is paid for.

Both worlds are given the same released numbers, so what differs is the record's own doing, as in
the theorems.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.methods.error_feedback import ErrorFeedback, HiddenStateNoise
from dpoptim.plan import Plan
from spies import worlds_of_queries

N, BATCH = 24, 8
WHEN = ("at the start", "all along")


def quantile(when: Any) -> dpoptim.PrivateQuantile:
    return dpoptim.PrivateQuantile(0.5, share=0.3, when=when, start=0.5)


METHODS: dict[str, Any] = {
    "dp-sgd": dpoptim.DPSGD(0.7),
    **{f"dp-sgd, {when}": dpoptim.DPSGD(quantile(when)) for when in WHEN},
    "dp-sgd, planned": dpoptim.DPSGD(dpoptim.PlannedClipNorm((1.0, 0.2, 0.5))),
    "dp-ftrl, planned": dpoptim.DPFTRL(dpoptim.PlannedClipNorm((1.0, 0.2)), order="given"),
    "dp-sgd, scaled": dpoptim.DPSGD(dpoptim.ScaledClipNorm(0.3, every=2)),
    "dp-sgd by layer, scaled": dpoptim.DPSGD(dpoptim.ScaledClipNorm(0.3, 2, 0.5), "per-layer"),
    "dp-sgd automatic, scaled": dpoptim.DPSGD(dpoptim.ScaledClipNorm(0.3, 1), "automatic"),
    "dp-ftrl, scaled": dpoptim.DPFTRL(dpoptim.ScaledClipNorm(0.3, 2), order="given"),
    "dice-sgd, scaled": dpoptim.DiceSGD(dpoptim.ScaledClipNorm(0.3, 2), 0.5, 3.0),
    "dice-sgd, planned": dpoptim.DiceSGD(dpoptim.PlannedClipNorm((1.0, 0.2)), 0.5, 3.0),
    "dp-ftrl": dpoptim.DPFTRL(0.7, order="given"),
    **{
        f"dp-ftrl, {when}": dpoptim.DPFTRL(quantile(when), noise="tree", order="given")
        for when in WHEN
    },
    "dp-ftrl by value": dpoptim.DPFTRL(0.7, order="given", value_bound="sharp"),
    **{f"value-sgd, {when}": dpoptim.ValueClippedSGD(quantile(when)) for when in WHEN},
    "dice-sgd": dpoptim.DiceSGD(0.7, 0.5, 1.6),
    "dice-sgd, long memory": dpoptim.DiceSGD(0.7, 0.5, 1.6, reset_each_epoch=False),
    "dice-sgd by layer": dpoptim.DiceSGD(0.7, 0.5, 1.6, clipping="per-layer"),
    "dice-sgd by layer, long memory": dpoptim.DiceSGD(
        0.7, 0.5, 1.6, clipping="per-layer", reset_each_epoch=False
    ),
    **{f"dice-sgd, {when}": dpoptim.DiceSGD(quantile(when), 0.5, 3.0) for when in WHEN},
    **{
        f"dice-sgd by layer, {when}": dpoptim.DiceSGD(
            quantile(when), 1.0, 3.0, clipping="per-layer", reset_each_epoch=False
        )
        for when in WHEN
    },
}


def moved(
    method: Any, monkeypatch: pytest.MonkeyPatch, *, epochs: int = 3, record: int = 3
) -> tuple[Plan, list[float]]:
    """How far the record, whose gradient is huge or nothing, moves the query of each step."""
    plan = dpoptim.Plan(method, N, BATCH, epochs * N // BATCH, 1.0, "zero-out", 1e-5)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(N, 4, generator=generator).double(), torch.arange(N) % 2
    with monkeypatch.context() as patch:
        worlds = worlds_of_queries(patch, 2.0)
        for length in (0.0, 50.0):
            data = x.clone()
            weight = torch.ones(N).double()
            data[record] *= length
            weight[record] = min(length, 1.0)
            worlds.append([])
            train(plan, TensorDataset(data, y, weight))
    return plan, [float((a - b).norm()) for a, b in zip(*worlds, strict=True)]


def train(plan: Plan, data: TensorDataset) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with dpoptim.attach(plan, model, optimizer, data, noise_seed=0) as private:
        for a, b, weight in private.batches():
            private.backward(F.cross_entropy(model(a), b, reduction="none") * weight)
            optimizer.step()


@pytest.mark.parametrize("name", METHODS)
def test_a_record_moves_the_queries_by_what_is_paid_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, distances = moved(METHODS[name], monkeypatch)
    assert max(distances) > 0.02  # it was seen
    if isinstance(plan.mechanism, HiddenStateNoise):
        assert math.hypot(*distances) <= plan.query.standard_deviation * (1 + 1e-9)
    else:
        assert max(distances) <= plan.method.norm_bound * (1 + 1e-9)
    if plan.sampler.relations[0] == "zero-out" and not isinstance(plan.mechanism, HiddenStateNoise):
        assert sum(distance > 0 for distance in distances) <= plan.sampler.participations(
            plan.steps
        )


def whole_radius(honest: Callable[..., float]) -> Callable[..., float]:
    return lambda memory, length, radius: honest(memory, length, memory._feedback)


def test_layers_that_each_feed_back_the_whole_radius_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long memory of one pass is where S follows C2: with C2 in every layer, records are seen
    too well.
    """
    method = dpoptim.DiceSGD(0.2, 0.01, 20.0, clipping="per-layer")
    plan, distances = moved(method, monkeypatch, epochs=1)
    assert math.hypot(*distances) <= plan.query.standard_deviation * (1 + 1e-9)
    fair = math.hypot(*distances)
    monkeypatch.setattr(ErrorFeedback, "_share", whole_radius(ErrorFeedback._share))
    _, distances = moved(method, monkeypatch, epochs=1)
    assert math.hypot(*distances) > fair


def test_every_combination_survives_json() -> None:
    for method in METHODS.values():
        plan = method.plan(
            n=24_000,
            batch_size=8_000,
            epochs=3,
            noise_multiplier=0.1,
            delta=1e-6,
            neighboring="zero-out",
        )
        assert dpoptim.Plan.from_json(plan.to_json()) == plan


def test_what_has_a_reason_not_to_work_says_it() -> None:
    with pytest.raises(ValueError, match="with value_bound, use 'flat'"):
        dpoptim.DPFTRL(1.0, "per-layer", value_bound="sharp")
    with pytest.raises(ValueError, match="accounting='paper' has a fixed clip_norm"):
        dpoptim.DiceSGD(quantile("all along"), accounting="paper")
