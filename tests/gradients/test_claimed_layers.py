"""Layers whose norms are claimed together: as one by one to the last bit, and held to claims."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.arithmetic.norms import LONG_BLOCK
from dpoptim.gradients.arithmetic.products import GROUP_ROWS
from dpoptim.gradients.choose_formula import PublicSizes
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.per_sample import claimed_layers, native
from dpoptim.gradients.per_sample.claimed_layers import ClaimedLayers
from dpoptim.gradients.per_sample.per_sample_grads import PerSampleGrad
from dpoptim.gradients.per_sample.sequence_outer import SequenceOuter
from dpoptim.runtime import compiled_work

BUILT = claimed_layers.functions() is not None
pytestmark = pytest.mark.skipif(not BUILT, reason="built without compiled functions")
SHAPES = ((9, 64, 64), (33, 768, 48), (1, 5, 3), (12, 130, 300))  # positions, rows, columns
UNITS = ["first", "second", "first", "second"]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def layers(records: int, seed: int = 0) -> dict[int, SequenceOuter]:
    torch.manual_seed(seed)
    return {
        place: SequenceOuter(
            torch.randn(records, T, p), torch.randn(records, T, d), ghost_norms=True, alone=True
        )
        for place, (T, p, d) in enumerate(SHAPES)
    }


def together(gradients: Mapping[int, PerSampleGrad]) -> ClaimedLayers:
    found = ClaimedLayers.among(gradients, UNITS)
    assert found is not None
    assert found.places == [*gradients]
    return found


def sums() -> list[Sums]:
    return [Sums([p * d]) for _, p, d in SHAPES]


def added(taken: ClaimedLayers, weights: Mapping[str, Tensor], sizes: list[int]) -> list[Tensor]:
    found = sums()
    taken.add(weights, found, [sizes])
    return [each.settle()[0] for each in found]


@settings(max_examples=25)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 2, 7, GROUP_ROWS + 1]), min_size=1, max_size=3),
    at_once=st.sampled_from([1, 1 << 20]),
    seed=st.integers(0, 99),
)
def test_norms_and_sums_are_those_of_one_layer_after_the_other(
    sizes: list[int], at_once: int, seed: int
) -> None:
    records = sum(sizes) or 1
    sizes = sizes if sum(sizes) else [1]
    several = layers(records, seed)
    weights = {unit: torch.rand(1, records, dtype=torch.float64) for unit in ("first", "second")}
    weights["second"][0, records // 2] = 0.0
    taken, apart = together(several), sums()
    squared = taken.measure(LONG_BLOCK)
    claims = [each.squared_norms([sizes], LONG_BLOCK) for each in several.values()]
    for unit, (one, other) in {"first": (0, 2), "second": (1, 3)}.items():
        torch.testing.assert_close(squared[unit], claims[one] + claims[other], rtol=1e-13, atol=0)
    longest = torch.stack([each.longest() for each in several.values()]).amax(0)
    assert torch.equal(taken.longest(), longest)
    for place, each in several.items():
        each.add_weighted_sums(apart[place], weights[UNITS[place]], [sizes])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claimed_layers, "AT_ONCE", at_once)
        for total, expected in zip(added(taken, weights, sizes), apart, strict=True):
            assert torch.equal(total, expected.settle()[0])


def test_nothing_depends_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_work, "WORTH_A_THREAD", 1)
    weights = {unit: torch.rand(1, 9, dtype=torch.float64) for unit in ("first", "second")}
    found = []
    for threads in (1, 2, 4, 7):
        torch.set_num_threads(threads)
        taken = together(layers(9))
        squared = taken.measure(LONG_BLOCK)
        found.append([*squared.values(), *added(taken, weights, [9])])
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


def test_what_is_longer_than_claimed_is_shortened_and_leaves_the_bits_of_all_others() -> None:
    """Whatever made the claim too short; in its own layer alone."""
    several, weights = layers(7), torch.rand(1, 7, dtype=torch.float64)
    of_units = {"first": weights, "second": weights}
    honest, low = together(several), together(several)
    honest.measure(LONG_BLOCK)
    low.measure(LONG_BLOCK)
    low._claims[1, 3] /= 4
    low._claims[1, 5] = math.nan  # whose weight is zero: it is not looked at
    weights[0, 5] = 0.0
    expected, found = added(honest, of_units, [7]), added(low, of_units, [7])
    for place in (0, 2, 3):
        assert torch.equal(found[place], expected[place])
    formed = several[1].form(slice(0, 7)).double()
    torch.testing.assert_close(
        expected[1] - found[1], weights[0, 3] * formed[3] / 2, rtol=1e-3, atol=1e-4
    )
    without = together({1: replace(several[1])})
    without.measure(LONG_BLOCK)
    without._claims[0, 3] /= 4
    again = added(without, of_units, [7])
    assert torch.equal(again[1], found[1])


@pytest.mark.parametrize("odd", [math.nan, math.inf, 1e30])
def test_a_record_that_is_not_finite_counts_for_nothing(odd: float) -> None:
    several, weights = layers(4), torch.ones(1, 4, dtype=torch.float64)
    several[0].g[2, 3, 4] = odd
    taken = together(several)
    squared = taken.measure(LONG_BLOCK)
    assert squared["second"].isfinite().all()
    assert squared["first"].isfinite().tolist() == [True, True, False, True]
    weights[0, 2] = 0.0
    total = added(taken, {"first": weights, "second": weights}, [4])[0]
    formed = several[0].form(slice(0, 4)).double()
    torch.testing.assert_close(total, formed[[0, 1, 3]].sum(0), rtol=1e-4, atol=1e-4)


def test_small_layers_are_claimed_where_each_record_adds_to_one_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By public numbers; with several sums, a common factor or without a compiler as before."""
    outer = SequenceOuter(torch.empty(2, 32, 64), torch.empty(2, 32, 64))
    public = PublicSizes(32, 32, 1 << 20, 32)
    chosen = outer.chosen(public)
    assert chosen.alone
    assert chosen.ghost_norms
    for other in (public._replace(sums=2), public._replace(common_factor=True)):
        assert not outer.chosen(other).alone
    monkeypatch.setattr(native, "library", lambda: None)
    assert not outer.chosen(public).alone


def test_a_small_model_is_clipped_as_by_ordinary_backward_passes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24)) for _ in range(4)])
    x, targets = torch.randn(6, 20, 24), torch.randn(6, 20, 24)
    engine = Engine(
        model,
        Clipping(1.0),
        capacity=6,
        reduction="sum",
        positions={name: 20 for name, _ in model.named_modules()},
    )
    taken: list[ClaimedLayers] = []
    with pytest.MonkeyPatch.context() as patch:
        honest = ClaimedLayers.measure
        patch.setattr(
            ClaimedLayers,
            "measure",
            lambda self, block: taken.append(self) or honest(self, block),
        )
        engine.attach()
        engine.begin_microbatch(6)
        (model(x) - targets).square().mean((1, 2)).sum().backward()
        engine.detach()
    assert [len(each.places) for each in taken] == [4]
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(6):
        loss = (model(x[i : i + 1]) - targets[i : i + 1]).square().mean()
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        for total, g in zip(expected, gradients, strict=True):
            total += g * min(1.0, float(1 / norm))
    found = engine.split(engine.take_sums()[0])
    for total, of in zip(found, expected, strict=True):
        torch.testing.assert_close(total.float(), of, rtol=1e-2, atol=1e-4)


def test_a_claim_does_not_depend_on_the_place_in_the_batch() -> None:
    """Those of many layers are added in one order, also at the end of a batch."""
    torch.manual_seed(0)
    sides = [(torch.randn(64, 9, 20), torch.randn(64, 9, 30)) for _ in range(9)]

    def claimed(records: int) -> Tensor:
        several = {
            place: SequenceOuter(g[:records], a[:records], ghost_norms=True, alone=True)
            for place, (g, a) in enumerate(sides)
        }
        found = ClaimedLayers.among(several, ["all"] * 9)
        assert found is not None
        return found.measure(LONG_BLOCK)["all"]

    whole = claimed(64)
    for records in range(1, 64):
        assert torch.equal(claimed(records), whole[:records])
