"""Gradients that Triton kernels measure and add up, tile by tile, for several layers at once.

On a GPU where there is one; in Triton's interpreter, if it is there and asked for
(``TRITON_INTERPRET=1``), which cannot multiply bfloat16; else with `outer_by_reference` in the
place of the kernels.
"""

import contextlib
import importlib.util
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.arithmetic.norms import NORM_BLOCK
from dpoptim.gradients.choose_formula import PublicSizes
from dpoptim.gradients.layers import convolution
from dpoptim.gradients.layers.geometry import Convolution
from dpoptim.gradients.per_sample import fused_calls, fused_outer
from dpoptim.gradients.per_sample.fused_factors import (
    Factors,
    FusedLayer,
    Lookups,
    Way,
)
from dpoptim.gradients.per_sample.fused_outer import FusedOuter
from dpoptim.gradients.per_sample.per_sample_grads import PerSampleGrad
from dpoptim.gradients.per_sample.sequence_outer import SequenceOuter
from dpoptim.gradients.per_sample.sparse import Rows
from dpoptim.gradients.per_sample.tied import TiedHead
from outer_by_reference import KERNELS, by_reference
from support import by_engine, joint_norm

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if GPU else "cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# the interpreter's, which needs NumPy before 2.4 for that
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning"
)
DTYPES = [torch.float32, torch.bfloat16 if GPU else torch.float16]
# records, positions, rows, columns
SHAPES = [(5, 7, 20, 33), (3, 70, 130, 70), (9, 1, 8, 300), (2, 3, 1, 5), (1, 33, 17, 1)]
SHAPES += [(2, 3, 135, 131)]
WAYS: list[Way] = ["kept", "claimed", "twice"]


@pytest.fixture(autouse=True, params=["described", "by address"] if INTERPRETED else ["as it is"])
def _on_a_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter's tensors lie on the CPU, and the reference's; it reads them in both ways."""
    if GPU:
        yield
        return
    monkeypatch.setattr(fused_outer, "serves", lambda x: x.dtype in (torch.float32, torch.float16))
    if INTERPRETED:
        there = replace(fused_calls.placeholders(DEVICE), described=request.param == "described")
        monkeypatch.setattr(fused_calls, "placeholders", lambda device: there)
        monkeypatch.setattr(fused_calls, "on_device_of", lambda x: contextlib.nullcontext())
        yield
    else:
        with by_reference(KERNELS):
            yield


def sides(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Both sides, and the gradients that they make, in float64."""
    torch.manual_seed(0)
    B, T, p, d = shape
    g, a = (torch.randn(B, T, n, device=DEVICE).to(dtype) for n in (p, d))
    return g, a, torch.einsum("btp,btd->bpd", g.double(), a.double())


def one(g: Tensor, a: Tensor, table: Lookups | None = None, way: Way = "twice") -> FusedOuter:
    """Gradients of one layer."""
    return FusedOuter({0: FusedLayer.of(Factors.of(g, a, table), way)}, ["all"])


def norms(fused: FusedOuter) -> Tensor:
    """Squared."""
    return fused.measure(NORM_BLOCK)["all"]


def added(fused: FusedOuter, weights: Tensor, group: slice) -> Tensor:
    """The weighted sum of some records, in float64."""
    (entries,) = fused._entries
    sums = Sums([entries], DEVICE)
    counted = torch.zeros_like(weights, dtype=torch.float64)
    counted[group] = weights[group].double()
    groups = [[each] for each in (group.start, group.stop - group.start, len(weights) - group.stop)]
    fused.add({"all": counted[None]}, [sums], groups)
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
@pytest.mark.parametrize(
    ("way", "looked_up"),
    [*[(way, False) for way in WAYS], ("kept", True), ("twice", True)],
)
def test_norms_and_sums_are_those_of_the_gradients(
    shape: tuple[int, ...], dtype: torch.dtype, way: Way, looked_up: bool
) -> None:
    g, a, exact = sides(shape, dtype)
    table = None
    if looked_up:
        table, exact = lookups(shape, exact)
    fused = one(g, a, table, way)
    weights = torch.rand(len(g), device=DEVICE)
    squared = exact.flatten(1).square().sum(1)
    slack = 4e-5 if way != "claimed" else 1e-4
    torch.testing.assert_close(norms(fused), squared, rtol=slack, atol=0)
    for group in (slice(0, len(g)), slice(1, len(g)), slice(0, 0)):
        found = added(fused, weights, group)
        expected = torch.einsum("b,bpd->pd", weights[group].double(), exact[group]).flatten()
        scale = squared.sum().sqrt()
        torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ["kept", "twice"])
def test_what_is_measured_is_what_is_added_in_any_company(way: Way, dtype: torch.dtype) -> None:
    """Positions cancel, so that what is left is rounding, which another order would change."""
    shape = (6, 70, 40, 24)
    g, a, _ = sides(shape, dtype)
    g[:, 35:], a[:, 35:] = -g[:, :35], a[:, :35]
    a[:, 35:] *= 1 + 2**-6
    table = Lookups.of(
        torch.randint(0, 40, (6, 9), device=DEVICE), torch.randn(6, 9, 24, device=DEVICE)
    )
    together = one(g, a, table, way)
    squared = norms(together)
    for i in range(len(g)):
        here = slice(i, i + 1)
        alone = one(g[here], a[here], Lookups(table.index[here], table.values[here]), way)
        assert torch.equal(norms(alone), squared[here])
        ones = torch.ones(len(g), device=DEVICE)
        summed = added(together, ones, here)
        assert torch.equal(summed, added(alone, ones[:1], slice(0, 1)))
        measured = summed.square().sum()
        assert measured <= squared[i] <= measured * (1 + 2**-15) + 2**-100


def test_ghost_norms_are_held_to() -> None:
    """Whatever a claim was, no more than it is added; and nobody else is touched."""
    g, a, exact = sides((5, 70, 40, 24), torch.float32)
    fused, ones = one(g, a, way="claimed"), torch.ones(5, device=DEVICE)
    claims = norms(fused)
    true = added(fused, ones, slice(0, 5))
    assert fused._claims is not None
    lengths = exact.flatten(1).norm(dim=1)
    for low in (0.25, 0.0, torch.nan):
        fused._claims.copy_(claims)
        fused._claims[0, 3] *= low
        there = added(fused, ones, slice(3, 4)).norm()
        least = 0.0 if low != low else low
        torch.testing.assert_close(there, lengths[3] * least**0.5, rtol=1e-4, atol=1e-9)
        assert there.square() <= claims[3] * least
        others = added(fused, ones, slice(0, 5)) - added(fused, ones, slice(3, 4))
        torch.testing.assert_close(others, true - exact[3].flatten(), rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's
def test_records_that_are_not_finite_are_not_claimed() -> None:
    g, a, _ = sides((4, 5, 6, 7), torch.float32)
    g[2, 1, 3] = torch.inf
    fused = one(g, a, way="claimed")
    assert norms(fused).isfinite().tolist() == [True, True, False, True]
    weights = torch.ones(4, device=DEVICE)
    weights[2] = 0
    assert bool(added(fused, weights, slice(0, 4)).isfinite().all())


def test_negated_views_are_read_with_their_signs() -> None:
    g, a, exact = sides((2, 3, 4, 5), torch.float32)
    fused = one(torch._neg_view(g), a)
    norms(fused)
    found = added(fused, torch.ones(2, device=DEVICE), slice(0, 2))
    torch.testing.assert_close(found, -exact.sum(0).flatten(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("gap", [3, 4, 16])
def test_parts_of_wider_rows_are_read_alone(way: Way, gap: int) -> None:
    """Whatever lies between the rows: as where one product's columns are several layers'."""
    g, a, exact = sides((3, 20, 24, 13), torch.float32)
    wide_g, wide_a = (
        torch.cat([x, torch.full((3, 20, gap), torch.nan, device=DEVICE)], 2) for x in (g, a)
    )
    fused = one(wide_g[:, :, :24], wide_a[:, :, :13], way=way)
    squared = exact.flatten(1).square().sum(1)
    torch.testing.assert_close(norms(fused), squared, rtol=1e-4, atol=0)
    found = added(fused, torch.ones(3, device=DEVICE), slice(0, 3))
    torch.testing.assert_close(found, exact.sum(0).flatten(), rtol=0, atol=1e-4)


def test_shares_are_few_and_cover_all() -> None:
    for records in (1, 7, 64, 500):
        for tiles in (1, 36, 144, 5000):
            for overhead in (0.25, 1.5):
                share = fused_calls.records_per_program(records, tiles, 264, overhead)
                assert 1 <= -(-records // share) <= min(records, 32)


@pytest.mark.parametrize("way", WAYS)
def test_records_without_weight_need_not_be_finite(way: Way) -> None:
    g, a, exact = sides((4, 5, 6, 7), torch.float32)
    g[2] = torch.nan
    weights = torch.tensor([1.0, 2.0, 0.0, 0.5], dtype=torch.float64, device=DEVICE)
    sums, fused = Sums([42], DEVICE), one(g, a, way=way)
    assert norms(fused).isfinite().tolist() == [True, True, False, True]
    fused.add({"all": weights[None]}, [sums], [[3], [1]])
    (found,) = sums.settle()
    expected = torch.einsum("b,bpd->pd", weights[[0, 1, 3]], exact[[0, 1, 3]]).flatten()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_large_groups_are_added_in_float64(way: Way) -> None:
    """As the theorem asks of more than 160 records."""
    g = torch.ones(400, 1, 2, device=DEVICE)
    a = torch.ones(400, 1, 3, device=DEVICE)
    a[1:] = 2.0**-24  # which one after the other would not change 1
    sums, fused = Sums([6], DEVICE), one(g, a, way=way)
    norms(fused)
    fused.add({"all": torch.ones(1, 400, dtype=torch.float64, device=DEVICE)}, [sums], [[400]])
    (found,) = sums.settle()
    torch.testing.assert_close(
        found, torch.full_like(found, 1 + 399 * 2.0**-24), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("units", [["all"] * 3, ["a", "b", "a"]])
def test_several_layers_units_and_ways_to_weigh_are_kept_apart(units: list[str], way: Way) -> None:
    """Layers of several sizes in one call; each weighed as its unit is."""
    shapes = [(4, 5, 70, 50), (4, 33, 130, 70), (4, 2, 65, 90)]
    each = [sides(shape, torch.float32) for shape in shapes]
    fused = FusedOuter(
        {i: FusedLayer.of(Factors.of(g, a), way) for i, (g, a, _) in enumerate(each)}, units
    )
    weights = {
        unit: torch.rand(2, 4, dtype=torch.float64, device=DEVICE) for unit in sorted({*units})
    }
    measured = fused.measure(NORM_BLOCK)
    for unit, found in measured.items():
        of_unit = [exact for (*_, exact), own in zip(each, units, strict=True) if own == unit]
        squared = torch.stack([exact.flatten(1).square().sum(1) for exact in of_unit]).sum(0)
        torch.testing.assert_close(found, squared, rtol=1e-4, atol=0)
    sums = [Sums([p * d], DEVICE, ((1.0, 0.0), (0.0, 1.0))) for _, _, p, d in shapes]
    fused.add(weights, sums, [[3], [1]])
    for (*_, exact), unit, found in zip(each, units, sums, strict=True):
        expected = torch.einsum("kb,bpd->kpd", weights[unit], exact).flatten(1)
        torch.testing.assert_close(torch.stack(found.settle()), expected, rtol=0, atol=1e-4)


PUBLIC = PublicSizes(8, 8, 1 << 30, 64)


@pytest.mark.parametrize(
    ("T", "p", "d", "way"),
    [(None, 8, 8, "twice"), (1024, 64, 64, "kept"), (8, 64, 64, "claimed"), (30, 96, 96, "twice")],
)
def test_the_way_is_chosen_by_public_sizes(T: int | None, p: int, d: int, way: Way) -> None:
    g, a = (torch.zeros(2, 3, n, device=DEVICE) for n in (p, d))  # whatever their own length
    chosen = SequenceOuter(g, a).chosen(PUBLIC._replace(positions=T))
    assert chosen.fused == way
    if T == 8:
        assert (
            SequenceOuter(g, a).chosen(PUBLIC._replace(positions=T, common_factor=True)).fused
            == "twice"
        )


def test_layers_are_taken_together_by_their_tiles_and_what_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each once, in their order; one that is looked up in, alone."""
    monkeypatch.setattr(fused_outer, "KEPT_AT_ONCE", 2 * 4 * 64 * 64)
    sizes = [(64, 64)] * 5 + [(8, 64)] * 2 + [(64, 64)]
    gradients: dict[int, PerSampleGrad] = {
        place: SequenceOuter(*(torch.ones(4, 3, n, device=DEVICE) for n in size), fused="kept")
        for place, size in enumerate(sizes)
    }
    table = Rows(torch.zeros(4, 2, dtype=torch.long), torch.ones(4, 2, 64), 64)
    head = gradients[7]
    assert isinstance(head, SequenceOuter)
    gradients[7] = TiedHead(head.g, head.a, fused="kept", table=table)
    gradients[8] = SequenceOuter(*(torch.ones(4, 3, 64, device=DEVICE) for _ in range(2)))
    found = [each.places for each in fused_outer.fused_among(gradients, ["all"] * 9)]
    assert found == [[0, 1], [2, 3], [4], [5, 6], [7]]


class Tied(nn.Module):
    """A language model of two words' width."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(19, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 19, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.words(x))))


def words() -> tuple[nn.Module, Tensor]:
    """A model, and a batch of seven for it."""
    return Tied(), torch.randint(0, 19, (7, 5))


def images() -> tuple[nn.Module, Tensor]:
    """Convolutions with and without steps, gaps, padding of several kinds, groups and biases."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh()),
        *(nn.Conv2d(8, 6, (2, 3), stride=2, dilation=(2, 1), bias=False), nn.Tanh()),
        *(nn.Conv2d(6, 6, 3, padding="same", padding_mode="reflect"), nn.Tanh()),
        *(nn.Conv2d(6, 4, 3, padding=1, groups=2), nn.Flatten(2)),
        *(nn.Conv1d(4, 5, 4, stride=3, padding=2), nn.Tanh()),
        *(nn.Unflatten(2, (1, 3, 3)), nn.Conv3d(5, 2, (1, 2, 3)), nn.Flatten()),
    )
    return model, torch.randn(7, 3, 13, 9).contiguous(memory_format=torch.channels_last)


def rows_of_images() -> tuple[nn.Module, Tensor]:
    """Images of which one has nothing to tell, in layers whose gradients are large or small."""
    model = nn.Sequential(nn.Conv2d(1, 40, 1), nn.Tanh(), nn.Conv2d(40, 20, 3), nn.Flatten())
    x = torch.randn(7, 1, 4, 4)
    x[3] = 0.0
    return model, x


@pytest.mark.parametrize("style", ["flat", "automatic", "per-layer"])
@pytest.mark.parametrize("made", [words, images, rows_of_images])
def test_engines_sum_as_without_it(
    made: Callable[[], tuple[nn.Module, Tensor]], style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, taken = [], list[str]()

    def seen(self: FusedOuter, block: int) -> dict[str, Tensor]:
        taken.extend([self.way] * len(self.places))
        return measured(self, block)

    measured = FusedOuter.measure
    monkeypatch.setattr(FusedOuter, "measure", seen)
    for fused in (True, False):
        torch.manual_seed(0)
        model, x = (each.to(DEVICE) for each in made())
        target = torch.randn(7, device=DEVICE)
        if not fused:
            monkeypatch.setattr(fused_outer, "serves", lambda x: False)
        found.append(by_engine(model, x, target, Clipping(0.5, style), capacity=7))
    difference = joint_norm([a - b for a, b in zip(*found, strict=True)])
    assert 0 < difference < 1e-5 * joint_norm(found[1])
    assert len(taken) == {words: 2, images: 5, rows_of_images: 2}[made]


def test_patches_are_made_when_they_are_needed_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many layers at a time as memory has room for, where gradients are kept."""
    made, alive = list[int](), list[weakref.ref[Tensor]]()
    once = convolution.patches_in_rows

    def note(x: Tensor, module: Convolution) -> Tensor:
        made.append(sum(each() is not None for each in alive))
        found = once(x, module)
        alive.append(weakref.ref(found))
        return found

    monkeypatch.setattr(convolution, "patches_in_rows", note)
    monkeypatch.setattr(fused_outer, "FORMED_AT_ONCE", 0)
    model = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)), nn.Flatten())
    x = torch.randn(7, 4, 9, 9, device=DEVICE)
    positions = {"0": 81, "1": 81, "2": 81}
    model, target = model.to(DEVICE), torch.randn(7, device=DEVICE)
    by_engine(model, x, target, Clipping(0.5), capacity=7, positions=positions)
    assert made == [0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_device_is_tried_before_it_is_used(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_outer, "KINDS", (DEVICE.type,))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    tried = fused_outer.compiles_on.__wrapped__
    assert tried(DEVICE, dtype)

    def wrong(self: FusedOuter, block: int) -> dict[str, Tensor]:
        return {unit: each * 1.01 for unit, each in measured(self, block).items()}

    measured = FusedOuter.measure
    monkeypatch.setattr(FusedOuter, "measure", wrong)
    with pytest.warns(RuntimeWarning, match="compute something else"):
        assert not tried(DEVICE, dtype)

    def fails(self: FusedOuter, *given: object) -> Tensor:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(FusedOuter, "measure", fails)
    with pytest.warns(RuntimeWarning, match="no such instruction"):
        assert not tried(DEVICE, dtype)


def test_other_devices_are_left_alone() -> None:
    assert not fused_outer.compiles_on.__wrapped__(torch.device("meta"), torch.float32)
