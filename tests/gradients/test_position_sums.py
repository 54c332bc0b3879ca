"""Sums over a record's positions: right, of one order, and the record's own, compiled or not."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpoptim.gradients.arithmetic.position_sums import sum_normalised, sum_positions
from dpoptim.gradients.per_sample import native

Rows = tuple[Tensor, Tensor, Tensor | None, Tensor]


@pytest.fixture(params=["compiled", "PyTorch's"], autouse=True, scope="module")
def kind(request: pytest.FixtureRequest) -> Iterator[None]:
    compiled = request.param == "compiled"
    if compiled and native.library() is None:
        pytest.skip("this package was built without compiled functions")
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(native, "serves", lambda x: False)
        yield


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    """Inputs, output gradients, means or none, and scales; columns may lie apart."""
    B, T, p = draw(st.integers(0, 4)), draw(st.integers(0, 140)), draw(st.integers(1, 70))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    x, g = (torch.randn(B, T, p, generator=generator) for _ in range(2))
    if draw(st.booleans()):
        g = g.transpose(1, 2).contiguous().transpose(1, 2)
    if draw(st.booleans()):
        x = torch.cat([x, x], 2)[..., :p]
    mean = torch.randn(B, T, generator=generator) if draw(st.booleans()) else None
    return x, g, mean, torch.rand(B, T, generator=generator)


@given(rows())
@settings(max_examples=60)
def test_sums_are_those_of_double_precision(given: Rows) -> None:
    x, g, mean, scale = given
    scaled, whole = sum_normalised(x, mean, scale, g)
    normalised = (x.double() - (0 if mean is None else mean[..., None])) * scale[..., None]
    terms = normalised * g
    # no chain is longer than a block's and that of the blocks
    error = 200 * 2.0**-24 * (terms.abs().sum(1) + g.abs().sum(1).double())
    assert bool(((scaled - terms.sum(1)).abs() <= error).all())
    assert bool(((whole - g.double().sum(1)).abs() <= error).all())
    assert torch.equal(whole, sum_positions(g))


@given(rows(), st.integers(1, 3))
@settings(max_examples=60)
def test_a_record_s_sums_are_its_own(given: Rows, threads: int) -> None:
    """Alone, in another place, among others that overflow, and by any number of threads."""
    x, g, mean, scale = given
    if not len(x):
        return
    before, i = torch.get_num_threads(), len(x) - 1
    among = sum_normalised(x, mean, scale, g)
    others = [None if each is None else each.clone() for each in (x, mean, scale, g)]
    for each in others:
        if each is not None:
            each[:i] = torch.inf
    try:
        torch.set_num_threads(threads)
        alone = sum_normalised(
            x[i:], None if mean is None else mean[i:], scale[i:], g[i:].contiguous()
        )
        beside = sum_normalised(*others)  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(before)
    for whole, single, other in zip(among, alone, beside, strict=True):
        assert torch.equal(whole[i], single[0])
        assert torch.equal(whole[i], other[i])


def test_signs_of_conjugates_are_turned() -> None:
    """Imaginary parts of conjugates lie in memory with the other sign: biases moved uphill."""
    g = torch.randn(3, 5, 1, dtype=torch.complex64).conj().imag
    assert g.is_neg()
    scaled, whole = sum_normalised(g, None, torch.ones(3, 5), g)
    torch.testing.assert_close(whole, g.double().sum(1).float())
    torch.testing.assert_close(scaled, g.double().square().sum(1).float())


def test_many_records_are_dealt_to_threads() -> None:
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(33, 65, 96, generator=generator) for _ in range(2))
    scale = torch.rand(33, 65, generator=generator)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(torch.stack(sum_normalised(x, None, scale, g)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
