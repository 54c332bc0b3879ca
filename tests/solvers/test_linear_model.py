"""Generalised linear models in closed form: what autograd gives, and bounds that hold whatever the
records hold.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpoptim.solvers import linear_sums
from dpoptim.solvers.linear_model import LinearModel, Loss, as_rows

LOSSES = [("softmax", 4), ("logistic", 1), ("squared", 1), ("squared", 3), ("huber", 2)]
WAYS = ["compiled", "operations"]
EXTREME = [0.0, 1.0, -1.0, 1e-30, 1e30, -1e38, float("inf"), float("nan")]


@contextmanager
def summed(way: str) -> Iterator[None]:
    """By compiled functions where there are some, or by PyTorch's operations."""
    honest = linear_sums.serve
    with patch.object(linear_sums, "serve", lambda *of: way == "compiled" and honest(*of)):
        yield


def data(model: LinearModel, rows: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, model.features, generator=generator, dtype=dtype)
    if model.loss == "softmax":
        return x, torch.randint(0, model.outputs, (rows,), generator=generator)
    y = torch.randn(rows, model.outputs, generator=generator, dtype=dtype)
    return x, (y[:, 0] > 0).long() if model.loss == "logistic" else y


def points(model: LinearModel, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(model.dimension, generator=generator, dtype=torch.float64) for _ in range(count)
    ]


def by_autograd(
    model: LinearModel, x: Tensor, y: Tensor, terms: list[tuple[float, Tensor]], bound: float
) -> Tensor:
    total = torch.zeros(model.dimension, dtype=torch.float64)
    for i in range(len(x)):
        combined = torch.zeros_like(total)
        for c, w in terms:
            leaf = w.clone().requires_grad_()
            loss = model.losses(model.scores(leaf, x[i : i + 1].double()), y[i : i + 1]).sum()
            combined += c * torch.autograd.grad(loss, leaf)[0]
        total += combined * min(1.0, bound / max(float(combined.norm()), 1e-300))
    return total


@pytest.mark.parametrize(("loss", "outputs"), LOSSES)
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("terms", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 2e-6), (torch.float32, 1e-2)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.thinned(4)
def test_sums_are_those_of_autograd(
    loss: str,
    outputs: int,
    intercept: bool,
    terms: int,
    dtype: torch.dtype,
    tolerance: float,
    way: str,
) -> None:
    model = LinearModel(loss, features=6, outputs=outputs, intercept=intercept)
    x, y = data(model, 40, dtype)
    combination = list(zip([1.0, -0.7, 0.3], points(model, 3), strict=True))[:terms]
    for bound in (0.5, 1e3):
        with summed(way):
            ours = model.clipped_sum(x, y, combination, bound, capacity=40)
        truth = by_autograd(model, x, y, combination, bound)
        assert float((ours - truth).norm()) <= tolerance * float(truth.norm())


@pytest.mark.parametrize(("loss", "outputs"), LOSSES)
def test_a_difference_of_near_points_is_clipped_as_a_difference(loss: str, outputs: int) -> None:
    model = LinearModel(loss, features=6, outputs=outputs)
    x, y = data(model, 30, torch.float64)
    w = points(model, 1)[0]
    terms = [(1.0, w * (1 + 1e-5)), (-1.0, w)]
    ours = model.clipped_sum(x, y, terms, 1e-7, capacity=30)
    assert float((ours - by_autograd(model, x, y, terms, 1e-7)).norm()) <= 1e-4 * float(ours.norm())


def test_the_large_batch_path_agrees_and_needs_a_small_margin_only() -> None:
    model = LinearModel("softmax", features=6, outputs=4)
    x, y = data(model, 300, torch.float32)
    w = points(model, 1)[0]
    small = model.clipped_sum(x, y, [(1.0, w)], 0.5, capacity=300)
    large = model.clipped_sum(x, y, [(1.0, w)], 0.5, capacity=3_000_000)
    truth = by_autograd(model, x, y, [(1.0, w)], 0.5)
    assert float((small - truth).norm()) <= 1e-2 * float(truth.norm())
    assert float((large - truth).norm()) <= 6e-3 * float(truth.norm())


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("capacity", [32, 100_000])
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=60)
@given(
    record=st.lists(st.sampled_from(EXTREME) | st.floats(width=32), min_size=5, max_size=5),
    label=st.sampled_from([0, 3, 4, -1, 10**12]),
    bound=st.sampled_from([1e-30, 1e-7, 0.3, 5.0, 1e6]),
    outputs=st.sampled_from(LOSSES),
    difference=st.booleans(),
)
def test_one_record_moves_the_sum_by_no_more_than_the_bound(
    dtype: torch.dtype,
    capacity: int,
    way: str,
    record: list[float],
    label: int,
    bound: float,
    outputs: tuple[str, int],
    difference: bool,
) -> None:
    """Guarantee of clipped_sum: zero-out (the record contributes nothing) at most ``bound``,
    replace-one twice.
    """
    model = LinearModel(outputs[0], features=5, outputs=outputs[1])
    x, y = data(model, 32, dtype)
    w, v = points(model, 2)
    terms = [(1.0, w), (-1.0, v)] if difference else [(1.0, w)]
    bad = torch.tensor(record).to(dtype)
    other_x, other_y = x.clone(), y.clone()
    other_x[5] = bad
    other_y[5] = (
        label if model.loss == "softmax" else bad[0].nan_to_num(0).clamp(-9e18, 9e18).to(y.dtype)
    )
    without_x, without_y = torch.cat([x[:5], x[6:]]), torch.cat([y[:5], y[6:]])
    with summed(way):
        sums = {
            name: model.clipped_sum(*rows, terms, bound, capacity=capacity)
            for name, rows in {
                "is": (x, y),
                "other": (other_x, other_y),
                "without": (without_x, without_y),
            }.items()
        }
    assert all(bool(torch.isfinite(total).all()) for total in sums.values())
    assert float((sums["is"] - sums["without"]).norm()) <= bound
    assert float((sums["other"] - sums["without"]).norm()) <= bound
    assert float((sums["other"] - sums["is"]).norm()) <= 2 * bound


def test_lipschitz_and_smoothness_bound_gradients_and_their_differences() -> None:
    for loss, outputs in LOSSES:
        model = LinearModel(loss, features=5, outputs=outputs)
        x, y = data(model, 200, torch.float64)
        radius = float(model.squared_row_norms(x).max().sqrt())
        w, v = points(model, 2)
        r, s = (model.residuals(model.scores(p, x), y) for p in (w, v))
        norms = model.squared_row_norms(x).sqrt()
        assert float((r.norm(dim=1) * norms).max()) <= model.lipschitz(radius) * (1 + 1e-12)
        difference = float(((r - s).norm(dim=1) * norms).max())
        assert difference <= model.smoothness(radius) * float((w - v).norm()) * (1 + 1e-12)


def test_rows_of_a_memory_map_are_read_chunk_by_chunk(tmp_path) -> None:
    stored = np.arange(12, dtype=np.uint8).reshape(4, 3)
    np.save(tmp_path / "x.npy", stored)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert as_rows(mapped[1:3]).equal(torch.tensor([[3.0, 4, 5], [6, 7, 8]]))
    assert as_rows(mapped[1:3]).dtype == torch.float32
    assert as_rows(stored.astype(np.float64)).dtype == torch.float64


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"loss": "hinge"}, "loss must be one of"),
        ({"outputs": 1}, "outputs=1 does not fit loss='softmax'"),
        ({"loss": "logistic", "outputs": 2}, "use loss='softmax'"),
        ({"features": 0}, "features must be at least 1"),
        ({"huber_delta": math.nan}, "huber_delta must be"),
    ],
)
def test_wrong_settings_are_refused_by_name(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LinearModel(**{"loss": "softmax", "features": 3, "outputs": 2, **wrong})


def test_a_bound_that_bounds_nothing_is_refused() -> None:
    model = LinearModel("softmax", features=6, outputs=4)
    x, y = data(model, 4, torch.float32)
    for bound in (0.0, -1.0, 1e37, math.inf, math.nan):
        with pytest.raises(ValueError, match="bound must be above 0 and at most"):
            model.clipped_sum(x, y, [(1.0, points(model, 1)[0])], bound, capacity=4)


def test_labels_of_any_kind_count_or_do_not() -> None:
    """A label that is no class leaves its record out, and nobody else."""
    model = LinearModel("softmax", features=6, outputs=300)
    x, _ = data(model, 5, torch.float32)
    w = torch.zeros(model.dimension, dtype=torch.float64)
    labels = torch.tensor([0.0, 7.0, math.nan, 299.0, 1e30])
    counted = model.clipped_sum(x[[0, 1, 3]], labels[[0, 1, 3]], [(1.0, w)], 1.0, capacity=5)
    torch.testing.assert_close(model.clipped_sum(x, labels, [(1.0, w)], 1.0, capacity=5), counted)
    small = torch.tensor([0, 7, 200, 255, 3])
    expected = model.clipped_sum(x, small, [(1.0, w)], 1.0, capacity=5)
    torch.testing.assert_close(
        model.clipped_sum(x, small.to(torch.uint8), [(1.0, w)], 1.0, capacity=5), expected
    )


@pytest.mark.parametrize("loss", ["softmax", "logistic", "squared", "huber"])
def test_an_empty_batch_adds_nothing(loss: Loss) -> None:
    model = LinearModel(loss, features=6, outputs=4 if loss == "softmax" else 1)
    w = torch.zeros(model.dimension, dtype=torch.float64)
    total = model.clipped_sum(torch.empty(0, 6), torch.empty(0), [(1.0, w)], 1.0, capacity=5)
    assert total.shape == (model.dimension,)
    assert not total.any()
