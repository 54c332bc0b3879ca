"""Products by oneDNN and by compiled functions: those of torch, and each row of them the same to
the last bit in any company.
"""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.gradients.arithmetic import multiplication, onednn, row_products
from dpoptim.gradients.arithmetic.multiplication import (
    linear,
    linear_by,
    linear_of_constants,
    onednn_multiplies,
)
from dpoptim.gradients.arithmetic.onednn import BLOCKS, transposed_product
from dpoptim.gradients.engine import Engine
from dpoptim.runtime import compiled_work
from dpoptim.runtime.compiled_work import Task
from support import (
    CASES,
    EVERY_LIBRARY,
    LIBRARIES,
    Case,
    by_engine,
    clipped,
    joint_norm,
    missing,
    vmap_gradients,
)

ONEDNN = pytest.mark.parametrize("library", ["oneDNN"], indirect=True)
ROWS = pytest.mark.parametrize("library", ["rows"], indirect=True)
NOT_MKL = pytest.mark.parametrize("library", ["oneDNN", "rows"], indirect=True)
SIZES = [(3, 5), (784, 10), (10, 784), (256, 1024), (1500, 130), (333, 77), (50, 192)]


@pytest.mark.parametrize("name", EVERY_LIBRARY)
def test_what_cannot_be_tried_here_is_named(name: str) -> None:
    if missing(name):
        pytest.skip(missing(name))
    assert name in LIBRARIES


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Outputs of the matrices that rows were multiplied with elsewhere than by MKL."""
    seen = []
    honest = onednn.by_onednn

    def by_onednn(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(len(w))
        return honest(x, w, bias)

    compiled = row_products.laying_out

    def laying_out(w: Tensor, panels: Tensor) -> tuple[bytes, Task]:
        seen.append(len(w))
        return compiled(w, panels)

    monkeypatch.setattr(onednn, "by_onednn", by_onednn)
    monkeypatch.setattr(row_products, "laying_out", laying_out)
    return seen


@pytest.mark.skipif(bool(missing("oneDNN")), reason=missing("oneDNN"))
@pytest.mark.parametrize(
    ("rows", "columns", "by_onednn"),
    [(10, 784, True), (8, 512, False), (8, 513, True), (16, 511, False), (784, 10, False)],
)
def test_thin_matrices_go_to_onednn_if_their_rows_are_long(
    rows: int, columns: int, by_onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the batch: one record may not choose the library of others."""
    monkeypatch.setattr(multiplication, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(multiplication, "compiles_rows", lambda: False)
    monkeypatch.setattr(multiplication, "compiles_thin_rows", lambda: False)
    seen = counted(monkeypatch)
    w = torch.randn(rows, columns)
    for batch in (1, 5, 500):
        x = torch.randn(batch, columns)
        torch.testing.assert_close(linear(x, w), F.linear(x, w), rtol=1e-4, atol=1e-3)
        assert bool(seen) == by_onednn
        seen.clear()


@pytest.mark.skipif(not row_products.serve(), reason="built without compiled functions")
@pytest.mark.parametrize(
    ("rows", "columns", "compiled"),
    [(10, 784, True), (16, 512, True), (17, 784, False), (10, 511, False), (784, 10, False)],
)
def test_thin_matrices_leave_mkl_where_it_is_slow_with_them_alone(
    rows: int, columns: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On processors with vectors of 8, whatever the batch."""
    monkeypatch.setattr(multiplication, "onednn_is_faster", lambda: False)
    monkeypatch.setattr(multiplication, "compiles_thin_rows", lambda: True)
    seen = counted(monkeypatch)
    w = torch.randn(rows, columns)
    for batch in (1, 5, 500):
        x = torch.randn(batch, columns)
        torch.testing.assert_close(linear(x, w), F.linear(x, w), rtol=1e-4, atol=1e-3)
        assert bool(seen) == compiled
        seen.clear()
        linear(x.double(), w.double())
        assert not seen


@pytest.mark.skipif(not row_products.serve(), reason="built without compiled functions")
@pytest.mark.parametrize("shape", [(1, 1), (7, 9), (13, 33), (16, 200), (70, 64), (300, 31)])
def test_products_are_the_same_by_vectors_of_any_width(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One chain for each number, whichever are computed beside it."""
    outputs, inner = shape
    w, bias = torch.randn(outputs, inner), torch.randn(outputs)
    for given in (w, torch.randn(inner, outputs).T):
        for batch in (1, 5, 12, 40):
            x = torch.randn(batch, inner)
            found = []
            for level in range(1, row_products.functions().level + 1):
                with monkeypatch.context() as patch:
                    of_level = replace(row_products.functions(), level=level)
                    patch.setattr(row_products, "functions", lambda of_level=of_level: of_level)
                    found.append(row_products.Panels(given).multiply(x, bias))
                    found.append(row_products.multiply(x, given, bias, 0))
            for each in found:
                torch.testing.assert_close(each, F.linear(x, given, bias))
                assert torch.equal(each, found[0])


@NOT_MKL
@pytest.mark.parametrize("columns", SIZES)
@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3), (1, 1), (0,), (2, 0)], ids=str)
def test_products_are_those_of_torch(
    columns: tuple[int, int], shape: tuple[int, ...], library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = counted(monkeypatch)
    torch.manual_seed(0)
    k, n = columns
    x, w, bias = torch.randn(*shape, k), torch.randn(n, k), torch.randn(n)
    for each in (w, w.T.contiguous().T):
        for offset in (None, bias):
            expected = F.linear(x.double(), w.double(), None if offset is None else offset.double())
            found = linear(x, each, offset)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)
    assert bool(seen) == bool(x.numel())


@ONEDNN
def test_any_number_of_rows_takes_few_shapes(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN keeps half a megabyte for each: a model took 800 MiB more after 400 Poisson
    batches.
    """
    shapes = set()
    honest = onednn.by_onednn

    def by_onednn(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        shapes.add((tuple(x.shape), tuple(w.shape)))
        return honest(x, w, bias)

    monkeypatch.setattr(onednn, "by_onednn", by_onednn)
    w, bias = torch.randn(9, 7), torch.randn(9)
    for rows in range(1, 700):
        x = torch.randn(rows, 7)
        torch.testing.assert_close(linear(x, w, bias), F.linear(x, w, bias))
    assert shapes == {((size, 7), (9, 7)) for size in BLOCKS if size <= 512}
    shapes.clear()
    for inner in range(200):
        left, right = torch.randn(inner, 7), torch.randn(inner, 9)
        torch.testing.assert_close(
            transposed_product(left, right), left.T @ right, rtol=1e-4, atol=1e-4
        )
    assert shapes == {((7, inner), (9, inner)) for inner in range(32, 225, 32)}


@ONEDNN
@pytest.mark.parametrize("threads", [1, 4], indirect=True)
def test_zeros_that_fill_up_an_inner_length_change_no_bit(library: str, threads: None) -> None:
    """So what a group, or a record, adds is a function of its rows."""
    torch.manual_seed(0)
    for inner in (5, 31, 32, 100, 159, 160, 700):
        left, right = torch.randn(inner, 70), torch.randn(inner, 65)
        filled = [torch.cat([x, torch.zeros(64, x.shape[1])]) for x in (left, right)]
        assert torch.equal(transposed_product(left, right), transposed_product(*filled))


@pytest.mark.thinned(2)
@NOT_MKL
@pytest.mark.parametrize("threads", [1, 2, 4], indirect=True)
@pytest.mark.parametrize("columns", [(64, 520), (520, 64), (333, 77)])
def test_many_rows_at_once_are_rounded_as_few(
    columns: tuple[int, int], library: str, threads: None
) -> None:
    """Blocks are as large as the batch allows, so what is rounded must not depend on their size,
    nor on the threads that share them.
    """
    torch.manual_seed(0)
    k, n = columns
    x, w, bias = torch.randn(4096, k), torch.randn(n, k), torch.randn(n)
    apart = torch.cat([linear(part, w, bias) for part in x.split(64)])
    for rows in (4096, 2048, 512, 3900):  # whole blocks, and one that is put together
        assert torch.equal(linear(x[:rows], w, bias), apart[:rows])
    assert torch.equal(linear(x.view(32, 128, k), w, bias), apart.view(32, 128, n))
    turned = x.view(128, 32, k).transpose(0, 1)
    assert torch.equal(linear(turned, w, bias), apart.view(128, 32, n).transpose(0, 1))


def one_chain(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """``x @ w.T + bias``, every number added up in the order of the inner length."""
    total = bias.expand(len(x), len(w))
    for i in range(x.shape[1]):  # a product of two floats is exact in float64
        product = x[:, i, None].double() * w[:, i].double()
        total = (total.double() + product).float()
    return total


@ROWS
@pytest.mark.parametrize("threads", [1, 2, 3, 8], indirect=True)
@pytest.mark.parametrize("rows", [1, 5, 14, 15, 61])
@pytest.mark.parametrize(
    "columns", [(2, 2), (33, 5), (400, 16), (17, 47), (385, 33), (1100, 300), (20, 9000)], ids=str
)
@pytest.mark.thinned(2)
def test_compiled_products_are_one_chain_for_each_number(
    columns: tuple[int, int],
    rows: int,
    library: str,
    threads: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However it is cut to fit caches and dealt to threads. The chain here is rounded twice where
    its float64 sum lies halfway between two float32: seldom, and by one unit.
    """
    monkeypatch.setattr(compiled_work, "WORTH_A_THREAD", 1)
    torch.manual_seed(0)
    k, n = columns
    x, w, bias = torch.randn(rows, k), torch.randn(n, k), torch.randn(n)
    found = linear(x, w, bias)
    assert (found != one_chain(x, w, bias)).double().mean() < 1e-3
    for other in (w.T.contiguous().T, torch.stack([w, w], 2)[..., 0]):  # by columns, and apart
        assert torch.equal(linear(x, other, bias), found)
    assert torch.equal(linear(torch.stack([x, x], 1)[:, 0], w, bias), found)
    apart = torch.cat([linear(row[None], w, bias) for row in x])
    assert torch.equal(apart, found)


@pytest.mark.parametrize("library", LIBRARIES, indirect=True)
@pytest.mark.parametrize("rows", [1, 2, 4, 45, 60, 64, 70, 300, 5000])
def test_a_weight_chosen_once_multiplies_as_each_time(library: str, rows: int) -> None:
    w, x = torch.randn(512, 128), torch.randn(rows, 128)
    assert torch.equal(linear_by(w, x)(x), linear(x, w))
    assert torch.equal(linear_by(w.T, x @ w.T)(x @ w.T), linear(x @ w.T, w.T))


@NOT_MKL
def test_a_bias_may_lie_anyhow(library: str) -> None:
    """oneDNN reads it as if it were contiguous: what lay beside it got into the sum."""
    torch.manual_seed(0)
    x, w = torch.randn(5, 8), torch.randn(9, 8)
    for bias in (
        torch.randn(18)[::2],
        torch.randn(9, 2)[:, 0],
        torch.randn(1).expand(9),
        torch.randn(1),
        torch.randn(1, 9),
    ):
        torch.testing.assert_close(linear(x, w, bias), F.linear(x, w, bias))
    with pytest.raises(RuntimeError, match="dtype"):
        linear(x, w, torch.randn(9, dtype=torch.float64))


@NOT_MKL
@pytest.mark.parametrize("threads", [1, 4], indirect=True)
@pytest.mark.parametrize("columns", SIZES)
def test_a_row_is_rounded_alike_in_any_company(
    columns: tuple[int, int], library: str, threads: None
) -> None:
    torch.manual_seed(0)
    k, n = columns
    x, w = torch.randn(300, k), torch.randn(n, k)
    together = linear(x, w)
    apart = torch.empty(x.numel() + 3)[3:].view_as(x).copy_(x)
    assert torch.equal(linear(apart, torch.empty(w.numel() + 1)[1:].view_as(w).copy_(w)), together)
    assert torch.equal(linear(x.T.contiguous().T, w.T.contiguous().T), together)
    for rows in (1, 2, 3, 7, 16, 31, 64, 65, 127, 299):
        assert torch.equal(linear(x[-rows:], w), together[-rows:])


@NOT_MKL
def test_rows_may_overlap_or_repeat(library: str) -> None:
    torch.manual_seed(0)
    long = torch.randn(200)
    windows, repeated, apart = (
        long.as_strided((30, 20), (3, 1)),
        long[:20].expand(30, 20),
        torch.randn(30, 40)[:, ::2],
    )
    for x in (windows, repeated, apart):
        for w in (windows, repeated, apart):
            assert torch.equal(linear(x, w), linear(x.contiguous(), w.contiguous()))


@NOT_MKL
def test_what_is_not_finite_stays_in_its_row(library: str) -> None:
    x, w = torch.randn(40, 64), torch.randn(80, 64)
    expected = linear(x, w)
    x[3], x[4, 5], x[39, 0] = torch.inf, torch.nan, torch.finfo(torch.float32).max
    others = [i for i in range(40) if i not in (3, 4, 39)]
    assert torch.equal(linear(x, w)[others], expected[others])
    assert not linear(x, w)[[3, 4]].isfinite().any()


@pytest.mark.parametrize("library", LIBRARIES, indirect=True)
def test_constants_pass_gradients_on(library: str) -> None:
    torch.manual_seed(0)
    w, bias = torch.randn(30, 20), torch.randn(30)
    x = torch.randn(4, 5, 20, requires_grad=True)
    g = torch.randn(4, 5, 30)
    linear_of_constants(x, w, bias).backward(g)
    torch.testing.assert_close(x.grad, g @ w)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear_of_constants(x, w, bias), F.linear(x, w, bias))


@ONEDNN
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
def test_other_precisions_and_switches_are_left_to_torch(library: str) -> None:
    assert onednn_multiplies(torch.ones(1), 8, 8)
    assert not onednn_multiplies(torch.ones(1), 1, 64)
    assert not onednn_multiplies(torch.ones(1), 64, 1)
    assert not onednn_multiplies(torch.ones(1, dtype=torch.float64), 8, 8)
    assert not onednn_multiplies(torch.ones(1, dtype=torch.bfloat16), 8, 8)
    assert not onednn_multiplies(torch.ones(1, device="meta"), 8, 8)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not onednn_multiplies(torch.ones(1), 8, 8)
    before, torch.backends.mkldnn.matmul.fp32_precision = (
        torch.backends.mkldnn.matmul.fp32_precision,
        "bf16",
    )
    try:
        assert not onednn_multiplies(torch.ones(1), 8, 8)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


@NOT_MKL
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.thinned(2)
def test_sums_are_those_of_whole_model_vmap(case: Case, library: str) -> None:
    torch.manual_seed(0)
    model = case.build()
    x, target = case.inputs(8, torch.float32)
    truth = vmap_gradients(model, x, target)
    clipping = Clipping(float(torch.cat([g.flatten(1) for g in truth], 1).norm(dim=1).median()))
    expected = clipped(truth, clipping, 8, "sum")
    sums = by_engine(model, x, target, clipping, capacity=8, reduction="sum")
    assert joint_norm([a - b for a, b in zip(sums, expected, strict=True)]) <= 5e-5 * joint_norm(
        expected
    )


def assert_sums_are_those_of_vmap(
    model: nn.Module, x: Tensor, target: Tensor, bound: float
) -> None:
    expected = clipped(vmap_gradients(model, x, target), Clipping(bound), len(x), "sum")
    sums = by_engine(model, x, target, Clipping(bound), capacity=len(x), reduction="sum")
    assert joint_norm([a - b for a, b in zip(sums, expected, strict=True)]) <= 5e-5 * joint_norm(
        expected
    )


class Adapted(nn.Module):
    """A frozen layer beside an adapter of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(20, 30).requires_grad_(False)
        self.down, self.up = nn.Linear(20, 4, bias=False), nn.Linear(4, 30, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


@pytest.mark.parametrize("library", LIBRARIES, indirect=True)
def test_frozen_layers_are_multiplied_alike_and_restored(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = counted(monkeypatch)
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(), nn.Tanh(), Adapted())
    model[2].down = nn.Linear(30, 4, bias=False)
    model[2].frozen = nn.Linear(30, 30).requires_grad_(False)
    x, target = torch.randn(8, 2, 20), torch.randn(8)
    truth = vmap_gradients(model, x, target)
    seen.clear()
    sums = by_engine(model, x, target, Clipping(1.0), capacity=8, reduction="sum")
    # four layers forward, two back to their inputs
    assert seen.count(30) == (6 if library in ("oneDNN", "rows") else 0)
    assert not any("forward" in vars(module) for module in model.modules())
    expected = clipped(truth, Clipping(1.0), 8, "sum")
    assert joint_norm([a - b for a, b in zip(sums, expected, strict=True)]) <= 5e-5 * joint_norm(
        expected
    )


@NOT_MKL
def test_frozen_layers_do_what_they_did(library: str, tmp_path: Path) -> None:
    """Second derivatives, other weights, compilation, saving: as without the faster products."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 9).requires_grad_(False), nn.Linear(9, 2))
    frozen, x = model[0], torch.randn(5, 8, requires_grad=True)
    engine = Engine(model, Clipping(1.0), capacity=6, reduction="sum")
    engine.attach()
    (first,) = torch.autograd.grad(frozen(x).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    y = x @ frozen.weight.T + frozen.bias
    torch.testing.assert_close(second, (6 * y * frozen.weight.sum(1)) @ frozen.weight)
    other = torch.randn(9, 8, requires_grad=True)
    torch.func.functional_call(frozen, {"weight": other}, (x,)).sum().backward()
    torch.testing.assert_close(other.grad, x.detach().sum(0).expand(9, 8))
    assert torch.equal(frozen(input=x), F.linear(x, frozen.weight, frozen.bias))
    with pytest.raises(TypeError):
        frozen(other=x)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        frozen(x[:, 1:])
    torch.save(frozen, tmp_path / "frozen.pt")
    assert torch.equal(
        torch.load(tmp_path / "frozen.pt", weights_only=False)(x),
        F.linear(x, frozen.weight, frozen.bias),
    )
    torch.testing.assert_close(torch.compile(frozen, backend="eager")(x), y)
    engine.detach()


@pytest.mark.parametrize("library", LIBRARIES, indirect=True)
@pytest.mark.parametrize("shape", [(5, 8), (256, 8), (5, 3, 8), (4, 64, 8)], ids=str)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_may_be_changed_in_place(
    library: str, shape: tuple[int, ...], frozen: bool, bias: bool
) -> None:
    torch.manual_seed(0)
    found = []
    for inplace in (True, False):
        torch.manual_seed(0)
        first = nn.Linear(8, 9, bias=bias).requires_grad_(not frozen)
        model = nn.Sequential(first, nn.ReLU(inplace=inplace), nn.Linear(9, 4), nn.Tanh())
        x, target = torch.randn(shape), torch.randn(shape[0])
        found.append(by_engine(model, x, target, Clipping(0.1), capacity=shape[0], reduction="sum"))
    for once, again in zip(*found, strict=True):
        torch.testing.assert_close(once, again)


@ONEDNN
def test_deep_copies_of_attached_models_are_as_fast(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(8, 9).requires_grad_(False), nn.Linear(9, 2))
    engine = Engine(model, Clipping(1.0), capacity=6, reduction="sum")
    engine.attach()
    twin = copy.deepcopy(model)
    engine.detach()
    again = Engine(twin, Clipping(1.0), capacity=6, reduction="sum")
    again.attach()
    seen = counted(monkeypatch)
    twin[0](torch.randn(4, 8))
    assert seen == [9]
    again.detach()


@ONEDNN
def test_a_frozen_layer_with_a_forward_pass_of_its_own_keeps_it(library: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))
    own = model[0].forward = lambda x: x + 1  # type: ignore[method-assign]
    engine = Engine(model, Clipping(1.0), capacity=6, reduction="sum")
    engine.attach()
    assert model[0].forward is own
    engine.detach()
    assert model[0].forward is own


class Token(nn.Module):
    """A bare parameter that passes a frozen layer and one that trains before it meets data."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(3, 20))
        self.frozen, self.main, self.head = (
            nn.Linear(20, 30).requires_grad_(False),
            nn.Linear(20, 30),
            nn.Linear(30, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(
            torch.tanh(self.frozen(self.token) + self.main(x + self.token) + self.frozen(x))
        )


class Mapped(nn.Module):
    """torch.func over a frozen layer, inside a model."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.head = nn.Linear(20, 30).requires_grad_(False), nn.Linear(30, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.vmap(self.frozen)(x))


@NOT_MKL
@pytest.mark.parametrize("build", [Token, Mapped])
def test_what_follows_tensors_through_a_model_passes_frozen_layers(
    build: type[nn.Module], library: str
) -> None:
    """oneDNN's products know no tensors that record what happens to them: gradients of a token
    were wrong by 7 %.
    """
    torch.manual_seed(0)
    assert_sums_are_those_of_vmap(build(), torch.randn(6, 3, 20), torch.randn(6), 0.1)


def test_large_products_by_mkl_are_those_of_torch_for_biases_that_torch_follows() -> None:
    """vmap over biases alone found no rule for products into memory of their own."""
    x, w, biases = torch.randn(200, 8), torch.randn(128, 8), torch.randn(3, 128)
    with torch.no_grad():
        found = torch.func.vmap(lambda bias: multiplication.by_mkl(x, w, bias, 1 << 8))(biases)
        line = multiplication.by_mkl(x[0], torch.ones(1 << 14, 8), None, 1 << 8)
    torch.testing.assert_close(found, F.linear(x, w) + biases[:, None])
    torch.testing.assert_close(line, x[0].sum().expand(1 << 14))


def test_numbers_whose_signs_are_kept_apart_are_not_read_from_memory() -> None:
    apart = torch.randn(1, 1, 1, 1, dtype=torch.complex64).conj().imag
    assert apart.is_contiguous()
    assert multiplication.plain(apart.clone().resolve_neg())
    assert not multiplication.plain(apart)
