"""The compiled sums of linear models: those of PyTorch's operations, and within the same bounds."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from dpoptim.clipping import Clipping
from dpoptim.runtime.compiled import library
from dpoptim.solvers import LinearProblem, Objective, linear_sums
from dpoptim.solvers.linear_model import LinearModel

pytestmark = pytest.mark.skipif(library() is None, reason="there are no compiled functions")

LOSSES = [("softmax", 3), ("logistic", 1), ("squared", 1), ("squared", 2), ("huber", 1)]


@contextmanager
def by_operations() -> Iterator[None]:
    with patch.object(linear_sums, "serve", lambda *given: False):
        yield


def data(model: LinearModel, rows: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(0)
    y = torch.randn(rows, model.outputs, dtype=torch.float64).squeeze(1)
    if model.loss == "softmax":
        y = torch.randint(0, model.outputs, (rows,))
    if model.loss == "logistic":
        y = (y > 0).long()
    return {"x": torch.randn(rows, model.features, dtype=dtype), "y": y}


def points(model: LinearModel, count: int = 1) -> list[tuple[float, Tensor]]:
    torch.manual_seed(1)
    return [
        (c, torch.randn(model.dimension, dtype=torch.float64)) for c in (1.0, -0.7, 0.3)[:count]
    ]


@pytest.mark.parametrize(("loss", "outputs"), LOSSES)
@pytest.mark.parametrize("features", [1, 3, 8, 50])
@pytest.mark.parametrize("rows", [1, 32, 70])
def test_sums_are_those_of_operations(loss: Any, outputs: int, features: int, rows: int) -> None:
    for intercept in (True, False):
        model = LinearModel(loss, features, outputs, intercept=intercept, huber_delta=0.3)
        given = data(model, rows)
        given["x"][0] = math.inf if rows > 1 else 1.0
        for more in ({}, {"shares": torch.rand(rows).double(), "weights": torch.rand(rows) * 9}):
            for terms in (points(model, 1), points(model, 3)):
                compiled = model.clipped_sum(*given.values(), terms, 0.7, capacity=rows, **more)
                with by_operations():
                    known = model.clipped_sum(*given.values(), terms, 0.7, capacity=rows, **more)
                torch.testing.assert_close(compiled, known, rtol=1e-6, atol=1e-6)
                assert compiled.isfinite().all()


def test_float32_rows_are_summed_as_what_they_are_in_float64() -> None:
    model = LinearModel("logistic", 20)
    given = data(model, 500, torch.float32)
    narrow = model.clipped_sum(**given, terms=points(model), bound=1.0, capacity=500)
    given["x"] = given["x"].double()
    wide = model.clipped_sum(**given, terms=points(model), bound=1.0, capacity=500)
    # norms of float32 rows are raised by 2^-19
    torch.testing.assert_close(narrow, wide, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("loss", "outputs"), LOSSES)
def test_a_rows_numbers_are_the_same_bits_beside_any_others(loss: Any, outputs: int) -> None:
    model = LinearModel(loss, 13, outputs)
    given = data(model, 90)
    for place in (0, 3, 31, 32, 63, 89):
        x = torch.full_like(given["x"], math.nan)
        x[place] = given["x"][place]
        beside = model.clipped_sum(x, given["y"], points(model), 0.5, capacity=90)
        alone = model.clipped_sum(
            given["x"][[place]], given["y"][[place]], points(model), 0.5, capacity=90
        )
        assert beside.equal(alone)
        assert alone.any()


@pytest.mark.parametrize("y", [3.0, -1.0, 0.5, 1e30, math.nan, math.inf])
def test_a_label_that_is_no_class_counts_nothing(y: float) -> None:
    model = LinearModel("softmax", 4, 3)
    total = model.clipped_sum(torch.ones(1, 4), torch.tensor([y]), points(model), 1.0, capacity=1)
    assert not total.any()


@pytest.mark.parametrize("row", [math.nan, math.inf, -math.inf, 1e300, 2.0**101])
@pytest.mark.parametrize("weight", [1.0, math.nan, math.inf])
def test_rows_that_are_not_finite_or_too_long_count_nothing(row: float, weight: float) -> None:
    model = LinearModel("squared", 4)
    x, y = torch.ones(40, 4, dtype=torch.float64), torch.ones(40)
    weights = torch.ones(40, dtype=torch.float64)
    x[7, 2], weights[7] = row, weight
    rest = [i for i in range(40) if i != 7]
    total = model.clipped_sum(x, y, points(model), 1.0, capacity=40, weights=weights)
    known = model.clipped_sum(x[rest], y[rest], points(model), 1.0, capacity=40)
    torch.testing.assert_close(total, known, rtol=1e-12, atol=0)


def distance(rows: int, bound: float, dtype: torch.dtype) -> float:
    """How far the sum moves by one record among many that all pull the same way."""
    model = LinearModel("squared", 5)
    torch.manual_seed(2)
    x = (1 + torch.rand(rows, 5, dtype=torch.float64) / 8).to(dtype)
    y = torch.full((rows,), 1e3)
    w = [(1.0, torch.zeros(model.dimension, dtype=torch.float64))]
    with_it = model.clipped_sum(x, y, w, bound, capacity=rows)
    x[rows // 3] = math.nan
    return float((with_it - model.clipped_sum(x, y, w, bound, capacity=rows)).norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bound", [1e-7, 0.3, 100.0])
def test_one_record_of_many_moves_the_sum_by_its_bound_at_most(
    dtype: torch.dtype, bound: float
) -> None:
    """In several sums of `AT_MOST` rows, whose additions round, too."""
    assert 0.9999 * bound < distance(30_000, bound, dtype) <= bound


def test_the_test_above_sees_a_factor_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Clipping.in_c
    monkeypatch.setattr(
        Clipping, "in_c", lambda self, margin: (1.0, self.norm * (1 + 1e-9), *honest(self, 0)[2:])
    )
    assert distance(30_000, 0.3, torch.float64) > 0.3


def test_an_objective_gives_the_same_sum_in_any_chunks() -> None:
    model = LinearModel("softmax", 6, 4)
    given = data(model, 1000)
    problem = LinearProblem(model, capacity=1000)
    terms = points(model)
    sums = [
        Objective(problem, (given["x"], given["y"]), chunk=chunk).clipped_sum(terms, 0.5)
        for chunk in (7, 64, 1000)
    ]
    torch.testing.assert_close(sums[0], sums[2], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sums[1], sums[2], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("x", [torch.ones(9, 8)[:, ::2], torch.ones(4, 9).T, torch.ones(0, 4)])
def test_rows_may_lie_in_any_way(x: Tensor) -> None:
    model, y = LinearModel("logistic", 4), torch.zeros(len(x))
    found = model.clipped_sum(x, y, points(model), 0.5, capacity=9)
    assert found.equal(model.clipped_sum(x.contiguous(), y, points(model), 0.5, capacity=9))


@pytest.mark.parametrize("serves", [True, False])
def test_shapes_that_do_not_fit_are_refused_by_name(
    serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled functions would read other records' numbers, or what lies behind."""
    if not serves:
        monkeypatch.setattr(linear_sums, "serve", lambda *given: False)
    x, n = torch.randn(8, 5), 8
    softmax, one, three = (
        LinearModel("softmax", 5, 3),
        LinearModel("squared", 5),
        LinearModel("squared", 5, 3),
    )

    def summed(model: LinearModel, x: Tensor, y: Tensor, **known: Any) -> Tensor:
        w = torch.zeros(known.pop("entries", model.dimension), dtype=torch.float64)
        return model.clipped_sum(x, y, [(1.0, w)], 1.0, capacity=n, **known)

    labels, targets = torch.randint(0, 3, (n, 1)), torch.randn(n, 3)
    for model, y in ((softmax, labels), (one, targets), (three, targets[:, :2]), (one, x[:7, 0])):
        with pytest.raises(ValueError, match=r"^y must have shape"):
            summed(model, x, y)
    for wrong in (x[:, :4], torch.randn(n, 400), x[:, 0]):
        with pytest.raises(ValueError, match=r"^x must have shape"):
            summed(one, wrong, targets[:, 0])
    with pytest.raises(ValueError, match="dimension"):
        summed(one, x, targets[:, 0], entries=5)
    for name in ("squared_row_norms", "shares", "weights"):
        with pytest.raises(ValueError, match=name):
            summed(one, x, targets[:, 0], **{name: torch.ones(1, dtype=torch.float64)})
    same = summed(three, x, targets[:, :1].expand(-1, 3))
    assert torch.equal(summed(three, x, targets[:, :1]), same)
    assert torch.equal(summed(three, x, targets[:, 0]), same)


def test_what_is_prepared_is_not_the_callers_array() -> None:
    """Its norms are measured once: what was written into it later would be longer."""
    x, y = np.random.default_rng(0).normal(size=(30, 5)), np.zeros(30)
    problem = LinearProblem(LinearModel("logistic", 5), capacity=30)
    batch = problem.prepare((x, y))
    terms = [(1.0, torch.zeros(6, dtype=torch.float64))]
    before = problem.clipped_sum(batch, terms, 1.0)
    x *= 1000
    assert torch.equal(problem.clipped_sum(batch, terms, 1.0), before)
