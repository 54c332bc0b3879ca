"""Gradients that a Triton kernel measures and adds up, tile by tile.

On a GPU where there is one; else in Triton's interpreter, if it is there and asked for
(``TRITON_INTERPRET=1``), which cannot multiply bfloat16.
"""

import contextlib
import importlib.util
import os

import pytest
import torch
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.gradients.adding.sums import Sums
from dpoptim.gradients.per_sample import fused_outer, fused_trial
from dpoptim.gradients.per_sample.fused_outer import FusedOuter, Lookups
from support import by_engine, joint_norm

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if GPU else "cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None or not (GPU or INTERPRETED),
        reason="needs Triton and a GPU, or its interpreter (TRITON_INTERPRET=1)",
    ),
    # the interpreter's, which needs NumPy before 2.4 for that
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
DTYPES = [torch.float32, torch.bfloat16 if GPU else torch.float16]
# records, positions, rows, columns
SHAPES = [(5, 7, 20, 33), (3, 70, 130, 70), (9, 1, 8, 300), (2, 3, 1, 5), (1, 33, 17, 1)]
SHAPES += [(2, 3, 135, 131)]


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's tensors lie on the CPU."""
    if not GPU:
        monkeypatch.setattr(
            fused_trial, "serves", lambda x: x.dtype in (torch.float32, torch.float16)
        )
        monkeypatch.setattr(fused_outer, "on_device_of", lambda x: contextlib.nullcontext())


def sides(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Both sides, and the gradients that they make, in float64."""
    torch.manual_seed(0)
    B, T, p, d = shape
    g, a = (torch.randn(B, T, n, device=DEVICE).to(dtype) for n in (p, d))
    return g, a, torch.einsum("btp,btd->bpd", g.double(), a.double())


def added(fused: FusedOuter, weights: Tensor, group: slice) -> Tensor:
    """The weighted sum of some records, in float64."""
    sums = Sums([fused._entries], DEVICE)
    counted = torch.zeros_like(weights, dtype=torch.float64)
    counted[group] = weights[group].double()
    groups = [[each] for each in (group.start, group.stop - group.start, len(weights) - group.stop)]
    fused.add_weighted_sums(sums, counted[None], groups)
    return sums.settle()[0]


def lookups(shape: tuple[int, ...], exact: Tensor) -> tuple[Lookups, Tensor]:
    """Of rows some of which come often, and the gradients with them."""
    B, _, p, d = shape
    index = torch.randint(0, p, (B, 11), device=DEVICE) // torch.tensor([1, 2] * 5 + [9]).to(DEVICE)
    values = torch.randn(B, 11, d, device=DEVICE)
    places = index[:, :, None].expand_as(values)
    return Lookups.of(index, values), exact.scatter_add(1, places, values.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("way", ["measured", "looked up", "claimed"])
def test_norms_and_sums_are_those_of_the_gradients(
    shape: tuple[int, ...], dtype: torch.dtype, way: str
) -> None:
    g, a, exact = sides(shape, dtype)
    table = None
    if way == "looked up":
        table, exact = lookups(shape, exact)
    fused = FusedOuter(g, a, table, ghost_norms=way == "claimed")
    weights = torch.rand(len(g), device=DEVICE)
    squared = exact.flatten(1).square().sum(1)
    slack = 1e-5 if way != "claimed" else 1e-4
    torch.testing.assert_close(fused.squared_norms(), squared, rtol=slack, atol=0)
    for group in (slice(0, len(g)), slice(1, len(g)), slice(0, 0)):
        found = added(fused, weights, group)
        expected = torch.einsum("b,bpd->pd", weights[group].double(), exact[group]).flatten()
        scale = squared.sum().sqrt()
        torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_measured_is_what_is_added_in_any_company(dtype: torch.dtype) -> None:
    """Positions cancel, so that what is left is rounding, which another order would change."""
    shape = (6, 70, 40, 24)
    g, a, _ = sides(shape, dtype)
    g[:, 35:], a[:, 35:] = -g[:, :35], a[:, :35]
    a[:, 35:] *= 1 + 2**-6
    table = Lookups.of(
        torch.randint(0, 40, (6, 9), device=DEVICE), torch.randn(6, 9, 24, device=DEVICE)
    )
    together = FusedOuter(g, a, table)
    squared = together.squared_norms()
    for i in range(len(g)):
        here = slice(i, i + 1)
        alone = FusedOuter(g[here], a[here], Lookups(table.index[here], table.values[here]))
        assert torch.equal(alone.squared_norms(), squared[here])
        ones = torch.ones(len(g), device=DEVICE)
        summed = added(together, ones, here)
        assert torch.equal(summed, added(alone, ones[:1], slice(0, 1)))
        measured = summed.square().sum() * (1 + 2**-30)
        torch.testing.assert_close(measured, squared[i], rtol=1e-12, atol=0)


def test_ghost_norms_are_held_to() -> None:
    """Whatever a claim was, no more than it is added; and nobody else is touched."""
    g, a, exact = sides((5, 70, 40, 24), torch.float32)
    fused, ones = FusedOuter(g, a, ghost_norms=True), torch.ones(5, device=DEVICE)
    claims = fused.squared_norms()
    true = added(fused, ones, slice(0, 5))
    assert fused._claims is not None
    norms = exact.flatten(1).norm(dim=1)
    for low in (0.25, 0.0, torch.nan):
        fused._claims.copy_(claims)
        fused._claims[3] *= low
        there = added(fused, ones, slice(3, 4)).norm()
        least = 0.0 if low != low else low
        torch.testing.assert_close(there, norms[3] * least**0.5, rtol=1e-4, atol=1e-9)
        assert there.square() <= claims[3] * least
        others = added(fused, ones, slice(0, 5)) - added(fused, ones, slice(3, 4))
        torch.testing.assert_close(others, true - exact[3].flatten(), rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's
def test_records_that_are_not_finite_are_not_claimed() -> None:
    g, a, _ = sides((4, 5, 6, 7), torch.float32)
    g[2, 1, 3] = torch.inf
    fused = FusedOuter(g, a, ghost_norms=True)
    assert fused.squared_norms().isfinite().tolist() == [True, True, False, True]
    weights = torch.ones(4, device=DEVICE)
    weights[2] = 0
    assert bool(added(fused, weights, slice(0, 4)).isfinite().all())


def test_negated_views_are_read_with_their_signs() -> None:
    g, a, exact = sides((2, 3, 4, 5), torch.float32)
    fused = FusedOuter(torch._neg_view(g), a)
    found = added(fused, torch.ones(2, device=DEVICE), slice(0, 2))
    torch.testing.assert_close(found, -exact.sum(0).flatten(), rtol=0, atol=1e-5)


def test_shares_are_few_and_cover_all() -> None:
    for records in (1, 7, 64, 500):
        for tiles in (1, 36, 144, 5000):
            for overhead in (0.25, 1.5):
                share = fused_outer.shared(records, tiles, 264, overhead)
                assert 1 <= -(-records // share) <= min(records, 32)


def test_records_without_weight_need_not_be_finite() -> None:
    g, a, exact = sides((4, 5, 6, 7), torch.float32)
    g[2] = torch.nan
    weights = torch.tensor([1.0, 2.0, 0.0, 0.5], dtype=torch.float64, device=DEVICE)
    sums = Sums([42], DEVICE)
    FusedOuter(g, a).add_weighted_sums(sums, weights[None], [[3], [1]])
    (found,) = sums.settle()
    expected = torch.einsum("b,bpd->pd", weights[[0, 1, 3]], exact[[0, 1, 3]]).flatten()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert not bool(FusedOuter(g, a).squared_norms()[2].isfinite())


def test_large_groups_are_added_in_float64() -> None:
    """As the theorem asks of more than 160 records."""
    g = torch.ones(400, 1, 2, device=DEVICE)
    a = torch.ones(400, 1, 3, device=DEVICE)
    a[1:] = 2.0**-24  # which one after the other would not change 1
    sums = Sums([6], DEVICE)
    ones = torch.ones(1, 400, dtype=torch.float64, device=DEVICE)
    FusedOuter(g, a).add_weighted_sums(sums, ones, [[400]])
    (found,) = sums.settle()
    torch.testing.assert_close(
        found, torch.full_like(found, 1 + 399 * 2.0**-24), rtol=1e-12, atol=0
    )


def test_sums_of_several_ways_to_weigh() -> None:
    g, a, exact = sides((4, 5, 6, 7), torch.float32)
    weights = torch.rand(2, 4, dtype=torch.float64, device=DEVICE)
    sums = Sums([42], DEVICE, ((1.0, 0.0), (0.0, 1.0)))
    FusedOuter(g, a).add_weighted_sums(sums, weights, [[4]])
    expected = torch.einsum("kb,bpd->kpd", weights, exact).flatten(1)
    torch.testing.assert_close(torch.stack(sums.settle()), expected, rtol=0, atol=1e-5)


class Tied(nn.Module):
    """A language model of two words' width."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(19, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 19, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.words(x))))


@pytest.mark.parametrize("style", ["flat", "automatic", "per-layer"])
def test_engines_sum_as_without_it(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for fused in (True, False):
        torch.manual_seed(0)
        model, x = Tied().to(DEVICE), torch.randint(0, 19, (7, 5), device=DEVICE)
        target = torch.randn(7, device=DEVICE)
        if not fused:
            monkeypatch.setattr(fused_trial, "serves", lambda x: False)
        found.append(by_engine(model, x, target, Clipping(0.5, style), capacity=7))
    difference = joint_norm([a - b for a, b in zip(*found, strict=True)])
    assert 0 < difference < 1e-5 * joint_norm(found[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_device_is_tried_before_it_is_used(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_trial, "KINDS", (DEVICE.type,))
    tried = fused_trial.compiles_on.__wrapped__
    assert tried(DEVICE, dtype)

    def wrong(self: FusedOuter, *given: object) -> Tensor:
        return summed(self, *given) * 1.01

    summed = FusedOuter._sum
    monkeypatch.setattr(FusedOuter, "_sum", wrong)
    with pytest.warns(RuntimeWarning, match="compute something else"):
        assert not tried(DEVICE, dtype)

    def fails(self: FusedOuter, *given: object) -> Tensor:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(FusedOuter, "_sum", fails)
    with pytest.warns(RuntimeWarning, match="no such instruction"):
        assert not tried(DEVICE, dtype)


def test_other_devices_are_left_alone() -> None:
    assert not fused_trial.compiles_on.__wrapped__(torch.device("meta"), torch.float32)
