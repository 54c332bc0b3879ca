"""Layers in which a record is a single row: measured and summed by compiled functions."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpoptim import clipping
from dpoptim.audit.sensitivity import clipped_sums
from dpoptim.clipping import Clipping, Style, Units
from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.arithmetic.norms import LONG_BLOCK, NORM_BLOCK
from dpoptim.gradients.arithmetic.products import GROUP_ROWS
from dpoptim.gradients.clipped_sum import ClippedSum
from dpoptim.gradients.per_sample import single_rows
from dpoptim.gradients.per_sample.per_sample_grads import Bias, Outer
from dpoptim.gradients.per_sample.single_rows import SingleRows
from dpoptim.runtime import compiled_work
from support import joint_norm

BUILT = single_rows.functions() is not None
built = pytest.mark.skipif(not BUILT, reason="this package was built without compiled functions")
U = 2.0**-24


def level_of(level: int, patch: pytest.MonkeyPatch) -> None:
    """Narrower vectors than this processor may have."""
    found = single_rows.functions()
    if level > found.level:
        pytest.skip("this processor has no such vectors")
    patch.setattr(single_rows, "functions", lambda: replace(found, level=level))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def together(*sides: tuple[Tensor, Tensor]) -> SingleRows:
    """A weight and a bias of each layer, all in one unit."""
    outers = [Outer(g, a) for g, a in sides]
    gradients = dict(enumerate([*outers, *map(Bias, outers)]))
    found = SingleRows.among(gradients, [""] * len(gradients))
    assert found is not None
    assert sorted(found.places) == sorted(gradients)
    return found


def added(
    rows: SingleRows, weights: Tensor, groups: Sequence[Sequence[int]], *shapes: Sequence[int]
) -> list[Tensor]:
    sums = [Sums(shape) for shape in shapes]
    rows.measure(LONG_BLOCK)
    rows.add({"": weights[None]}, sums, groups)
    return [each.take()[0] for each in sums]


@built
@pytest.mark.parametrize("block", [NORM_BLOCK, LONG_BLOCK])
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("entries", [1, 10, 16, 47, 64, 511, 512, 1000, 5000])
@pytest.mark.parametrize("size", [0, 1e-42, 1e-30, 1e-12, 1.0, 1e18, 1e30, math.inf, math.nan])
def test_norms_are_never_read_low(
    size: float, entries: int, level: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    level_of(level, monkeypatch)
    torch.manual_seed(0)
    g, a = torch.rand(3, 7) + 0.5, torch.randn(3, entries) + 5
    g[1] *= size
    a[2] *= size
    rows = together((g, a))
    norms, longest = rows.measure(block), rows.longest()
    left, right = (x.double().square().sum(1) for x in (g, a))
    for found, exact in zip(norms[""].tolist(), (left * right + left).tolist(), strict=True):
        if math.isfinite(exact) and found != math.inf:
            assert exact <= found <= exact * (1 + 1e-3)
        else:
            assert not math.isfinite(found)
    assert math.isnan(size) or bool((left <= longest).all())


@built
@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, GROUP_ROWS), min_size=1, max_size=4),
    rows=st.integers(1, 40),
    columns=st.integers(1, 100),
    seed=st.integers(0, 99),
)
def test_groups_are_chains_that_err_by_little_anywhere(
    sizes: list[int], rows: int, columns: int, seed: int
) -> None:
    """Within the theorem's bound; with the same bits in any layout, vectors and threads."""
    torch.manual_seed(seed)
    records = sum(sizes) or 1
    sizes = sizes if sum(sizes) else [1]
    g, a, weights = torch.randn(records, rows), torch.randn(records, columns), torch.rand(records)
    weights[records // 2] = 0
    weights = weights.double()
    left_out = [(g.clone(), a.clone())]
    g[records // 2] = a[records // 2] = math.nan
    shapes = (rows, columns), (rows,)
    found = added(together((g, a)), weights, [sizes], *shapes)
    exact, terms = (
        torch.mm((of(left_out[0][0].double()) * weights[:, None]).T, of(left_out[0][1].double()))
        for of in (lambda t: t, torch.abs)
    )
    steps = GROUP_ROWS + len(sizes) + 2
    assert ((found[0] - exact).abs() <= steps * U / (1 - steps * U) * terms).all()
    assert found[1].dtype == torch.float64
    torch.testing.assert_close(
        found[1], (weights[:, None] * left_out[0][0].double()).sum(0), rtol=1e-12, atol=1e-12
    )
    wider_g, wider_a = torch.randn(records, rows + 3), torch.randn(records, columns + 5)
    wider_g[:, 1 : rows + 1], wider_a[:, 2 : columns + 2] = g, a
    views = wider_g[:, 1 : rows + 1], wider_a[:, 2 : columns + 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_work, "WORTH_A_THREAD", 1)
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            again = added(together(views), weights, [sizes], *shapes)
            assert all(map(torch.equal, again, found))
        level_of(1, patch)
        again = added(together((g.T.contiguous().T, a)), weights, [sizes], *shapes)
        assert all(map(torch.equal, again, found))


@built
def test_a_group_that_is_too_large_leaves_the_others_as_they_are() -> None:
    """Its record more may change its own product, and no other."""
    torch.manual_seed(0)
    sizes = [100, GROUP_ROWS, 90]
    g, a = torch.randn(sum(sizes) + 1, 12), torch.randn(sum(sizes) + 1, 50)
    weights = torch.rand(len(g), dtype=torch.float64)
    place = 100 + GROUP_ROWS  # of the record more
    others = torch.arange(len(g)) != place
    shapes = (12, 50), (12,)
    large = added(together((g, a)), weights, [[100, GROUP_ROWS + 1, 90]], *shapes)
    usual = added(together((g[others], a[others])), weights[others], [sizes], *shapes)
    own = weights[place] * torch.outer(g[place].double(), a[place].double())
    assert float((large[0] - usual[0] - own).norm()) <= 2.0**-8 * float(own.norm())
    weights[place], g[place] = 0, math.nan
    without = added(together((g, a)), weights, [[100, GROUP_ROWS + 1, 90]], *shapes)
    torch.testing.assert_close(without[0], usual[0].double(), rtol=1e-5, atol=1e-5)


@built
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("style", ["flat", "automatic", "per-layer"])
@pytest.mark.parametrize("records", [1, 7, 200, 700])
def test_sums_are_those_of_other_operations(
    records: int, style: Style, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Extreme records included, to rounding; a frozen weight and a frozen bias, too."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(30, 33), nn.Tanh(), nn.Linear(33, 20), nn.Tanh(), nn.Linear(20, 5))
    )
    model[2].weight.requires_grad_(False)
    model[4].bias.requires_grad_(False)
    x = torch.randn(records, 30)
    if records > 5:
        x[2], x[3], x[4] = 0, math.nan, 1e30

    def loss(module: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        squares = module(batch[0]).square()
        return squares.sum() if reduction == "sum" else squares.sum(1).mean()

    def sums() -> list[Tensor]:
        rule = Clipping(0.7, style)
        return clipped_sums(model, (x,), loss, rule, capacity=records, reduction=reduction)

    found = sums()
    with monkeypatch.context() as patch:
        patch.setattr(single_rows, "functions", lambda: None)
        others = sums()
    assert all(each.isfinite().all() for each in found)
    difference = joint_norm([a - b for a, b in zip(found, others, strict=True)])
    assert difference <= 1e-6 * joint_norm(others)


@built
@pytest.mark.parametrize("units", [["", "", "", ""], ["p", "q", "p", "q"]], ids=["one", "two"])
@pytest.mark.parametrize("rule", [Clipping(0.9), Clipping(0.9, "automatic"), Clipping(math.inf)])
@pytest.mark.parametrize("groups", [[[50, 60, 11]], [[50, 60], [0, 11]], [[1]] * 121])
def test_one_call_does_what_several_do(
    groups: list[list[int]],
    rule: Clipping,
    units: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the last bit, with any number of threads, a record left out of all units or of none."""
    torch.manual_seed(0)
    sides = [
        (torch.randn(121, 12), torch.randn(121, 70)),
        (torch.randn(121, 5), torch.randn(121, 9)),
    ]
    sides[0][0][3], sides[1][1][7], sides[1][0][9] = math.nan, 1e25, 0
    outers = [Outer(g, a) for g, a in sides]
    gradients = dict(enumerate([*outers, *map(Bias, outers)]))
    rules = Units(dict.fromkeys(units, rule), units)
    shapes = [(12, 70), (5, 9), (12,), (5,)]

    def clipped() -> tuple[list[Tensor], list[Tensor]]:
        sums, seen = [Sums(shape) for shape in shapes], list[Tensor]()
        ClippedSum(rules, 2.0**-8, None, 121, torch.device("cpu"), groups, False).add(
            dict(gradients),
            sums,
            lambda whole, tapers, squared: seen.extend([whole, *squared.values()]),
        )
        return [each.take()[0] for each in sums], seen

    with monkeypatch.context() as patch:
        patch.setattr(SingleRows, "clip_and_add", forbidden)
        patch.setattr(Units, "in_c", lambda self, margin: None)
        apart = clipped()
    assert all(each.isfinite().all() for each in apart[0])
    monkeypatch.setattr(SingleRows, "add", forbidden)
    monkeypatch.setattr(compiled_work, "WORTH_A_THREAD", 1)
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        at_once = clipped()
        for found, expected in zip(at_once[0] + at_once[1], apart[0] + apart[1], strict=True):
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def forbidden(*given: object) -> None:
    raise AssertionError("it must not be asked")


@built
def test_one_record_moves_the_sum_by_no_more_than_the_bound() -> None:
    """Aligned records, whose errors add up, with and without an adversary's."""
    torch.manual_seed(0)
    g, a = torch.randn(1, 9).repeat(601, 1), torch.randn(1, 70).repeat(601, 1)
    g, a = g * (1 + 1e-3 * torch.rand(601, 1)), a * (1 + 1e-3 * torch.rand(601, 1))
    groups = [[150, 160, 141], [150]]
    largest = 0.0
    for distorted in (1.0, -1e3, 1e-6, 1e25):
        g[0] = distorted * g[600]
        sums = []
        for first in (0, 1):
            rows = together((g[first:], a[first:]))
            norms = rows.measure(LONG_BLOCK)
            weights = Clipping(1.0).factors(norms[""], 2.0**-8 + 2.0**-32 * 601)
            of_world = [[150 - first, *groups[0][1:]], *groups[1:]]
            terms = [Sums((9, 70)), Sums((9,))]
            rows.add({"": weights[None]}, terms, of_world)
            sums.append([each.take()[0].double() for each in terms])
        largest = max(largest, joint_norm([p - q for p, q in zip(*sums, strict=True)]))
    assert 0.99 < largest <= 1


@pytest.mark.parametrize("records", [1, 7, 1000])
@pytest.mark.parametrize("style", ["flat", "automatic"])
@pytest.mark.parametrize("norm", [1e-6, 0.3, 1e8, math.inf])
def test_factors_never_carry_a_record_beyond_its_bound(
    norm: float, style: Style, records: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In exact arithmetic, rounded to float32; the same by other operations, to rounding."""
    if style == "automatic" and math.isinf(norm):
        return
    torch.manual_seed(0)
    squared = torch.rand(records, dtype=torch.float64) * 10 ** (40 * torch.rand(records) - 20)
    if records > 6:
        extremes = [0, 5e-324, 1e-300, 1e300, math.inf, math.nan]
        squared[: len(extremes)] = torch.tensor(extremes, dtype=torch.float64)
    rule = Clipping(norm, style)
    factors = rule.factors(squared, 2.0**-8)
    for factor, square in zip(factors.float().tolist(), squared.tolist(), strict=True):
        if not math.isfinite(square):
            assert factor == 0
        elif math.isfinite(norm):
            bound = Fraction(norm) * (1 - Fraction(1, 256))
            assert Fraction(factor) ** 2 * Fraction(square) <= bound**2
    with monkeypatch.context() as patch:
        patch.setattr(clipping, "compiled_factors", lambda *given: None)
        others = rule.factors(squared, 2.0**-8)
    torch.testing.assert_close(factors, others, rtol=1e-14, atol=0)


def test_rules_that_clip_in_ways_of_their_own_are_asked() -> None:
    """Also where they are derived from the usual ones, which compiled functions know."""

    class Halved(Clipping):
        def factors(self, squared_norms: Tensor, margin: float) -> Tensor:
            return super().factors(squared_norms, margin) / 2

    class Swapped(Units):
        def factors(self, squared_norms: Any, margin: float) -> dict[str, Tensor]:
            return {unit: each / 2 for unit, each in super().factors(squared_norms, margin).items()}

    torch.manual_seed(0)
    outer = Outer(torch.randn(9, 4), torch.randn(9, 6))
    usual = Clipping(1.0)

    def clipped(units: Units) -> Tensor:
        sums = [Sums((4, 6))]
        ClippedSum(units, 0.0, None, 9, torch.device("cpu"), [[9]], False).add(
            {0: outer}, sums, None
        )
        return sums[0].take()[0]

    whole = clipped(Units({"": usual}, [""]))
    for own in (Units({"": Halved(1.0)}, [""]), Swapped({"": usual}, [""])):
        torch.testing.assert_close(clipped(own), whole / 2)
