"""Small gradients of many parameters, taken together: what they are apart."""

import pytest
import torch

from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.per_sample.joined import SMALL, SMALL_HERE, Joined
from dpoptim.gradients.per_sample.per_sample_grads import Dense

SIZES = {0: (3,), 2: (4, 5), 3: (700,), 7: (1,)}  # of parameters, by place
UNITS = ["first", "", "first", "second", "", "", "", "second"]
RECORDS, GROUPS = 6, [[2, 1], [3]]


def gradients(dtype: torch.dtype) -> dict[int, Dense]:
    torch.manual_seed(0)
    return {place: Dense(torch.randn(RECORDS, *size, dtype=dtype)) for place, size in SIZES.items()}


def sums_of(directions: tuple[tuple[float, ...], ...]) -> list[Sums]:
    return [Sums(SIZES.get(place, (2,)), None, directions) for place in range(len(UNITS))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ways", [1, 2])
def test_norms_and_sums_are_those_of_each(ways: int, dtype: torch.dtype) -> None:
    several = gradients(dtype)
    joined = Joined(several, UNITS)
    assert joined.places == [*SIZES]
    weights = {unit: torch.rand(ways, RECORDS, dtype=torch.float64) for unit in ("first", "second")}
    directions = ((1.0,),) if ways == 1 else ((1.0, 0.0), (0.0, 1.0))
    together, apart = sums_of(directions), sums_of(directions)
    for unit, squared in joined.measure(32).items():
        mine = [each for place, each in several.items() if UNITS[place] == unit]
        exact = sum(each.values.double().flatten(1).square().sum(1) for each in mine)
        torch.testing.assert_close(squared, exact, rtol=1e-5, atol=0)
        assert bool((squared >= exact * (1 - 1e-12)).all())
    joined.add(weights, together, GROUPS)
    for place, each in several.items():
        each.add_weighted_sums(apart[place], weights[UNITS[place]], GROUPS)
        for found, expected in zip(together[place].settle(), apart[place].settle(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert together[1].empty


def test_records_without_weight_need_not_be_finite() -> None:
    several = gradients(torch.float32)
    several[3].values[4] = torch.nan
    several[2].values[4] = torch.inf
    joined, sums = Joined(several, UNITS), sums_of(((1.0,),))
    assert [bool(each[4].isfinite()) for each in joined.measure(32).values()] == [False, False]
    weights = torch.ones(1, RECORDS, dtype=torch.float64)
    weights[0, 4] = 0
    joined.add({"first": weights, "second": weights}, sums, GROUPS)
    rest = [0, 1, 2, 3, 5]
    for place, each in several.items():
        expected = each.values[rest].double().sum(0)
        torch.testing.assert_close(sums[place].settle()[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("device", "most"), [("meta", SMALL), ("cpu", SMALL_HERE)])
def test_small_ones_of_one_kind_are_joined(device: str, most: int) -> None:
    there = {
        place: Dense(torch.empty(2, size, device=device))
        for place, size in enumerate((3, most + 1, 4))
    }
    joined = Joined.among(there, ["all"] * 3)
    assert joined is not None
    assert joined.places == [0, 2]
    assert Joined.among({0: there[0], 1: there[1]}, ["all"] * 2) is None
    of_two_kinds = {0: there[0], 2: Dense(torch.empty(2, 3, device=device, dtype=torch.float64))}
    assert Joined.among(of_two_kinds, ["all"] * 3) is None
