"""Whether oneDNN keeps a row apart from others is tried, not believed."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dpoptim.gradients.arithmetic import onednn, row_products
from dpoptim.gradients.arithmetic.multiplication import (
    linear,
    linear_by,
    onednn_forms_gradients,
    onednn_multiplies,
    rows_leave_mkl,
)
from dpoptim.gradients.arithmetic.onednn import TRIED_ROWS, WIDTH, keeps_rows_apart
from support import missing, using

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def in_order(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product whose every number is one chain, so a function of its row and column alone."""
    total = x.new_zeros(x.shape[0], w.shape[0])
    for i in range(x.shape[1]):
        total += x[:, i, None] * w[:, i]
    return total if bias is None else total + bias


def by_halves(x: Tensor, w: Tensor) -> Tensor:
    """The same added up in another order."""
    half = x.shape[1] // 2
    return in_order(x[:, :half], w[:, :half]) + in_order(x[:, half:], w[:, half:])


def by_company(rows: int) -> Product:
    def product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        return (by_halves if x.shape[0] == rows and x.shape[1] == WIDTH else in_order)(x, w)

    return product


def by_place(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return (in_order if w.is_contiguous() or x.shape[1] != WIDTH else by_halves)(x, w)


def by_length(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Inner lengths in two blocks, wherever they end."""
    return (by_halves if x.shape[1] != WIDTH else in_order)(x, w)


def tried_with(product: Product, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(onednn, "onednn_linear", product)
    monkeypatch.setattr(onednn, "_found", {})
    return keeps_rows_apart()


@pytest.fixture
def never_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_onednn(*_: object) -> Tensor:
        raise AssertionError("multiplied by oneDNN")

    monkeypatch.setattr(onednn, "by_onednn", by_onednn)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("product", [*map(by_company, TRIED_ROWS), by_place, by_length])
def test_products_that_round_a_row_by_what_lies_beside_it_are_not_made(
    product: Product, monkeypatch: pytest.MonkeyPatch, never_called: None
) -> None:
    assert not tried_with(product, monkeypatch)
    x, w = torch.randn(3, 7), torch.randn(9, 7)
    with using("oneDNN"):
        assert not onednn_multiplies(x, 9, 7)
        assert not onednn_forms_gradients(x, 9, 7)
        assert torch.equal(linear(x, w), F.linear(x, w))
        assert torch.equal(linear_by(w, x)(x), F.linear(x, w))


def test_products_that_keep_rows_apart_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried_with(in_order, monkeypatch)
    with using("oneDNN"):
        assert onednn_multiplies(torch.randn(3, 7), 9, 7)
        assert rows_leave_mkl(torch.randn(3, 7), 9, 7)


@pytest.mark.skipif(bool(missing("rows")), reason=missing("rows"))
def test_rows_are_multiplied_by_compiled_functions_all_the_same(
    monkeypatch: pytest.MonkeyPatch, never_called: None
) -> None:
    assert not tried_with(by_place, monkeypatch)
    x, w = torch.randn(3, 7), torch.randn(9, 7)
    with using("rows"):
        assert torch.equal(linear(x, w), row_products.multiply(x, w, None, 0))
        assert not onednn_multiplies(x, 9, 7)
        assert rows_leave_mkl(x, 9, 7)


def test_each_number_of_threads_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(onednn, "_found", {})
    monkeypatch.setattr(onednn, "trial_succeeds", lambda: not tried.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 1, 2):
            torch.set_num_threads(threads)
            assert keeps_rows_apart()
    finally:
        torch.set_num_threads(before)
    assert tried == [1, 2]


def test_a_trial_draws_from_no_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "_found", {})
    before = torch.get_rng_state()
    keeps_rows_apart()
    assert torch.equal(torch.get_rng_state(), before)
