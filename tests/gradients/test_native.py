"""Compiled functions for gradients of single records: right, of one order, and not needed."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.gradients.arithmetic.norms import (
    LONG_BLOCK,
    NORM_BLOCK,
    blocks_in,
    squared_norms_of_parts,
)
from dpoptim.gradients.layers import kernels
from dpoptim.gradients.layers.convolution import ConvolutionRule, formed_by_patches
from dpoptim.gradients.layers.kernels import Compiled
from dpoptim.gradients.per_sample import native
from dpoptim.gradients.rows_of_records import SumOfRows
from dpoptim.runtime import compiled
from support import by_engine, joint_norm

BUILT = native.library() is not None
built = pytest.mark.skipif(not BUILT, reason="this package was built without compiled functions")
CLASSES = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
U = 2.0**-24


@st.composite
def layers(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    """A convolution without groups, and the size of its images."""
    axes = draw(st.integers(1, 3))
    of_axes = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(axes))  # noqa: E731
    kernel, dilation = of_axes(1, 9 if axes == 1 else 5), of_axes(1, 3)
    channels, outputs = draw(st.integers(1, 5)), draw(st.integers(1, 50))
    padding = of_axes(0, 3)
    least = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    more = of_axes(0, 40 if axes == 1 else 6)
    size = tuple(
        max(1, low - 2 * side) + extra
        for low, side, extra in zip(least, padding, more, strict=True)
    )
    module = CLASSES[axes](channels, outputs, kernel, of_axes(1, 3), padding, dilation, bias=False)
    return module, size


def formed(
    layer: nn.Module, x: Tensor, g: Tensor, block: int = NORM_BLOCK
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in the parameter's order, as they were written, and the norms of their blocks."""
    singly = Compiled(layer, x, g)
    rooms, norms = [], []
    for chunk in singly.one_by_one():
        rooms.append(torch.full((len(x), chunk.entries), math.nan))
        norms.append(torch.full((len(x), blocks_in(chunk.entries, block)), math.nan))
        chunk.form_measured(slice(0, len(x)), rooms[-1], norms[-1], block)
    written = torch.cat(rooms, 1)
    return singly.in_order(written), written, torch.cat(norms, 1)


def with_level(level: int, patch: pytest.MonkeyPatch) -> None:
    found = native.library()
    patch.setattr(native, "library", lambda: compiled.Library(found.functions, level))


@built
@settings(max_examples=60)
@given(layer_and_size=layers(), records=st.integers(1, 3), seed=st.integers(0, 99))
def test_gradients_err_by_less_than_one_chain_of_additions_can(
    layer_and_size: tuple[nn.Module, tuple[int, ...]], records: int, seed: int
) -> None:
    """In any geometry: gamma_n of the sum of absolute values of the terms (Higham 2002, 3.1)."""
    layer, size = layer_and_size
    torch.manual_seed(seed)
    x = torch.randn(records, layer.in_channels, *size)
    g = torch.randn_like(layer(x)).detach()
    everything = slice(0, records)
    exact, terms = (
        formed_by_patches(layer, of(x.double()), of(g.double()), everything, records)
        for of in (lambda t: t, torch.abs)
    )
    found, *_ = formed(layer, x, g)
    steps = math.prod(g.shape[2:]) + 1
    assert ((found - exact).abs() <= steps * U / (1 - steps * U) * terms).all()


@built
@settings(max_examples=30)
@given(layer_and_size=layers(), seed=st.integers(0, 99))
def test_a_gradient_has_the_same_bits_in_any_place_and_cut_anyhow(
    layer_and_size: tuple[nn.Module, tuple[int, ...]], seed: int
) -> None:
    """Alone or in a batch, in any layout, in chunks of one row, and by narrower vectors."""
    layer, size = layer_and_size
    torch.manual_seed(seed)
    x = torch.randn(1, layer.in_channels, *size)
    g = torch.randn_like(layer(x)).detach()
    alone, *_ = formed(layer, x, g)
    many_x, many_g = torch.randn(5, *x.shape[1:]), torch.randn(5, *g.shape[1:])
    many_x[3], many_g[3] = x[0], g[0]
    many_x[4], many_g[2] = math.nan, math.inf
    assert torch.equal(formed(layer, many_x, many_g)[0][3], alone[0])
    apart = [t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (many_x, many_g)]
    assert torch.equal(formed(layer, *apart)[0][3], alone[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "WORK", 1)
        assert len(Compiled(layer, x, g).one_by_one()) == alone.shape[1] // (
            layer.out_channels * layer.kernel_size[-1]
        )
        assert torch.equal(formed(layer, x, g)[0], alone)
    with pytest.MonkeyPatch.context() as patch:
        with_level(1, patch)
        assert torch.equal(formed(layer, x, g)[0], alone)


@built
@settings(max_examples=20)
@given(layer_and_size=layers(), seed=st.integers(0, 99))
def test_records_of_several_rows_are_sums_over_those_that_are_there(
    layer_and_size: tuple[nn.Module, tuple[int, ...]], seed: int
) -> None:
    """One chain over the positions of all, whatever the others hold; zero where none is there."""
    layer, size = layer_and_size
    torch.manual_seed(seed)
    x = torch.randn(9, layer.in_channels, *size)
    g = torch.randn_like(layer(x)).detach()
    exact, terms = (
        formed_by_patches(layer, of(x.double()), of(g.double()), slice(0, 9), 9)
        for of in (lambda t: t, torch.abs)
    )
    keep = torch.tensor([True, True, True, False, True, True, False, False, False])
    x[~keep], g[~keep] = math.nan, math.inf
    exact, terms = ((t * keep[:, None]).unflatten(0, (3, 3)).sum(1) for t in (exact, terms))
    singly = SumOfRows(Compiled(layer, x, g), 3, keep)
    chunks = singly.one_by_one()

    def summed(part: slice) -> tuple[Tensor, Tensor]:
        rooms = [torch.full((part.stop - part.start, each.entries), math.nan) for each in chunks]
        norms = [torch.full((len(room), 1), math.nan) for room in rooms]
        for chunk, room, of_chunk in zip(chunks, rooms, norms, strict=True):
            chunk.form_measured(part, room, of_chunk, chunk.entries)
        return torch.cat(rooms, 1), torch.cat(norms, 1)

    written, norms = summed(slice(0, 3))
    found, steps = singly.in_order(written), 3 * math.prod(g.shape[2:]) + 1
    assert ((found - exact).abs() <= steps * U / (1 - steps * U) * terms).all()
    assert torch.equal(found[2], torch.zeros_like(found[2]))
    torch.testing.assert_close(norms.norm(dim=1), written.norm(dim=1))
    assert torch.equal(summed(slice(1, 2))[0][0], written[1])
    assert torch.equal(torch.cat([each.form(1) for each in chunks]), written[1])


def outer(g: Tensor, a: Tensor, block: int = NORM_BLOCK) -> tuple[Tensor, Tensor]:
    entries = g.shape[2] * a.shape[2]
    room = torch.full((len(g), entries), math.nan)
    norms = torch.full((len(g), blocks_in(entries, block)), math.nan)
    native.outer(g, a, room, norms, block)
    return room, norms


@built
@settings(max_examples=60)
@given(
    positions=st.sampled_from([0, 1, 2, 33, 511, 512, 513, 1100]),
    rows=st.integers(1, 40),
    columns=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_sums_over_positions_are_one_chain_anywhere(
    positions: int, rows: int, columns: int, seed: int
) -> None:
    """Within the bound of one chain; with the same bits in any place, layout and vectors."""
    torch.manual_seed(seed)
    g, a = torch.randn(3, positions, rows), torch.randn(3, positions, columns)
    g[2] = math.nan
    found, norms = outer(g, a)
    exact, terms = (
        torch.bmm(of(g[:2].double()).mT, of(a[:2].double())).flatten(1)
        for of in (lambda t: t, torch.abs)
    )
    steps = positions + 1
    assert ((found[:2] - exact).abs() <= steps * U / (1 - steps * U) * terms).all()
    squared = squared_norms_of_parts([found[:2]], norms[:2].double())
    truth = found[:2].double().square().sum(1)
    assert (truth <= squared).all()
    assert (squared <= truth * 1.001).all()
    assert positions == 0 or norms[2].isnan().all()
    wider_g, wider_a = torch.randn(1, positions, rows + 3), torch.randn(1, positions, columns + 5)
    wider_g[0, :, 1 : rows + 1], wider_a[0, :, 2 : columns + 2] = g[1], a[1]
    apart = outer(wider_g[:, :, 1 : rows + 1], wider_a[:, :, 2 : columns + 2])
    assert torch.equal(apart[0][0], found[1])
    assert torch.equal(apart[1][0], norms[1])
    some = outer(g[1:2, :, rows // 2 :], a[1:2])[0]
    assert torch.equal(some[0], found[1, rows // 2 * columns :])
    with pytest.MonkeyPatch.context() as patch:
        with_level(1, patch)
        assert torch.equal(outer(g[:2], a[:2])[0], found[:2])


@built
@pytest.mark.parametrize("block", [NORM_BLOCK, LONG_BLOCK])
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e-12, 1.0, 1e18, 1e30, 1e37, math.inf, math.nan])
def test_what_is_written_is_what_is_measured(
    block: int, level: int, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never low, hardly high, and not finite where a number is not."""
    if level > native.library().level:
        pytest.skip("this processor has no such vectors")
    with_level(level, monkeypatch)
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 37, (2, 5), bias=False)
    x, g = torch.randn(2, 3, 4, 9), torch.randn(2, 37, 3, 5)
    g[1] *= size
    _, written, norms = formed(layer, x, g, block)
    squared = squared_norms_of_parts([written], norms.double(), block=block)
    truth = written.double().square().sum(1)
    assert truth[0] <= squared[0] <= truth[0] * 1.001
    if math.isfinite(float(truth[1])):
        assert truth[1] <= squared[1] <= truth[1] * 1.001
    else:
        assert not math.isfinite(float(squared[1]))


@built
@pytest.mark.parametrize("entries", [1, 31, 64, 1000])
@pytest.mark.parametrize("records", [1, 7, 8, 19])
def test_records_are_added_in_their_order_without_those_that_do_not_count(
    entries: int, records: int
) -> None:
    torch.manual_seed(0)
    rows, weights = torch.randn(records, entries + 5)[:, :entries], torch.rand(records)
    weights[records // 2] = 0
    rows[records // 2] = math.nan
    total = torch.randn(entries)
    counted = weights.double()[:, None] * rows.nan_to_num().double()
    exact, terms = (of(total.double()) + of(counted).sum(0) for of in (lambda t: t, torch.abs))
    found, in_turn = total.clone(), total.clone()
    native.add(found, rows, weights.tolist())
    assert ((found - exact).abs() <= (records + 1) * U * terms).all()
    for record in range(records):
        native.add(in_turn, rows[record : record + 1], weights[record : record + 1].tolist())
    assert torch.equal(found, in_turn)


class Images(nn.Module):
    """Convolutions of each kind of row, and of a single place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 16, 4, 2, 1), nn.GroupNorm(4, 16), nn.ReLU()),
            *(nn.Conv2d(16, 24, 3, padding=1, dilation=(1, 2)), nn.ReLU()),
            *(nn.Conv2d(24, 40, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            nn.Linear(40, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def sums(records: int = 23) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = Images(), torch.randn(records, 3, 12, 13)
    x[5, 0, 0, 0] = math.nan
    return by_engine(
        model, x, torch.randn(records), Clipping(0.3), capacity=records, reduction="sum"
    )


@pytest.fixture
def restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@built
@pytest.mark.usefixtures("restored")
def test_sums_have_the_same_bits_with_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "WORK", 1 << 12)  # so that there are chunks for all
    found = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        found.append(sums())
    for one, other in itertools.pairwise(found):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@built
def test_without_the_library_sums_are_the_same_but_for_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = sums()
    monkeypatch.setattr(native, "library", lambda: None)
    by_torch = sums()
    assert joint_norm(compiled) > 0.1
    apart = joint_norm([a - b for a, b in zip(compiled, by_torch, strict=True)])
    assert 0 < apart <= 1e-5 * joint_norm(compiled)  # other last bits: it was another way


@built
def test_which_layers_they_serve_is_told_by_public_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    like = torch.empty(0)
    assert Compiled.serves(nn.Conv2d(4, 8, 3), like)
    assert not Compiled.serves(nn.Conv2d(4, 7, 3), like)  # most of a vector would be thrown away
    assert not Compiled.serves(nn.Conv2d(4, 8, 3, groups=2), like)
    assert not Compiled.serves(nn.Conv2d(4, 8, 3), like.double())
    assert not Compiled.serves(nn.Conv2d(4, 8, 3), like.to("meta"))
    monkeypatch.setattr(native, "library", lambda: None)
    assert not Compiled.serves(nn.Conv2d(4, 8, 3), like)


def test_inputs_that_are_dense_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """And room is taken for a part's gradients only."""
    seen = []
    monkeypatch.setattr(kernels.native, "form", lambda *given: seen.append(given))
    x, g = torch.randn(4, 3, 5, 5), torch.randn(4, 16, 3, 3)
    (chunk,) = Compiled(nn.Conv2d(3, 16, 3), x, g).one_by_one()
    room, norms = torch.empty(2, chunk.entries), torch.empty(2, 1)
    chunk.form_measured(slice(1, 3), room, norms, 1024)
    _, given_x, given_g, out, *_ = seen[0]
    assert given_x.data_ptr() == x[1].data_ptr()
    assert given_g.data_ptr() == g[1].data_ptr()
    assert out is room


def test_the_environment_switches_them_off_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert native.kind().startswith("compiled" if BUILT else "PyTorch")
    monkeypatch.setenv(compiled.SWITCH, "0")
    monkeypatch.setattr(compiled, "library", compiled.library.__wrapped__)
    monkeypatch.setattr(native, "library", native.library.__wrapped__)
    assert native.kind() == "PyTorch's operations"


@pytest.mark.skipif(not BUILT, reason="this package was built without compiled functions")
def test_a_library_of_other_files_is_not_used_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after an update of a package that is installed in place."""
    monkeypatch.setattr(compiled, "digest_of_sources", lambda: "another")
    monkeypatch.setattr(compiled, "library", compiled.library.__wrapped__)
    monkeypatch.setattr(native, "library", native.library.__wrapped__)
    with pytest.warns(RuntimeWarning, match="install dpoptim again"):
        assert native.kind() == "PyTorch's operations"


@pytest.mark.parametrize("content", [None, b"", b"no library"], ids=["absent", "empty", "other"])
def test_a_library_that_cannot_be_loaded_is_not_used_and_that_is_said(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "_compiled.so"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(compiled, "LIBRARY", path)
    monkeypatch.setattr(compiled, "library", compiled.library.__wrapped__)
    monkeypatch.setattr(native, "library", native.library.__wrapped__)
    assert native.kind() == "PyTorch's operations"
    assert not native.serves(torch.empty(0))
    weight = ConvolutionRule().per_sample_grads(
        nn.Conv2d(3, 16, 3), (torch.randn(2, 3, 5, 5),), torch.randn(2, 16, 3, 3)
    )["weight"]
    assert not isinstance(weight.singly, Compiled)
