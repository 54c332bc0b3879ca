"""Group privacy by the privacy curve: an upper bound wherever the truth is known."""

import math

import dp_accounting as dp
import pytest

from dpoptim.accounting import compute_delta, gdp_delta, group_delta


@pytest.mark.parametrize("relation", ["zero-out", "add-or-remove-one", "replace-one"])
@pytest.mark.parametrize("size", [1, 2, 3, 10])
@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_it_is_above_that_of_gaussians(relation: str, size: int, epsilon: float) -> None:
    """k records move a Gaussian's mean k times as far."""
    moved = 2 if relation == "replace-one" else 1
    true = gdp_delta(size * moved / 10, epsilon)
    found = group_delta(dp.GaussianDpEvent(10.0), epsilon, size, relation)
    assert found >= true * (1 - 1e-9)
    if size == 1:
        assert found == pytest.approx(true, rel=1e-6)


def test_it_is_next_to_nothing_where_a_guarantee_is_pure() -> None:
    event = dp.LaplaceDpEvent(10.0)  # epsilon 0.1 for one
    assert group_delta(event, 0.5, 5, "zero-out") < 1e-300
    assert group_delta(event, 0.45, 5, "zero-out") > 0


def test_it_is_above_the_sum_over_three_steps() -> None:
    """By hand, for three records: d + e^e d + e^(2 e) d."""
    event = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(1.0)), 10)
    delta = compute_delta(event, 1.0, "add-or-remove-one").delta
    by_hand = delta * (1 + math.e + math.e**2)
    found = group_delta(event, 3.0, 3, "add-or-remove-one")
    assert by_hand <= found <= by_hand * (1 + 1e-9)


@pytest.mark.parametrize(("size", "epsilon"), [(1000, 7000.0), (100, 701.0), (20, 600.0)])
def test_a_delta_too_small_for_a_number_is_not_none(size: int, epsilon: float) -> None:
    true = gdp_delta(size / 5.6, epsilon)
    assert group_delta(dp.GaussianDpEvent(5.6), epsilon, size, "zero-out") >= true


def test_it_never_promises_more_than_there_is() -> None:
    event = dp.GaussianDpEvent(1.0)
    assert group_delta(event, 0.1, 50, "zero-out") == 1.0
    assert group_delta(event, 1000.0, 500, "zero-out") == 1.0
    for size in (0, -1, 1.5):
        with pytest.raises((ValueError, TypeError), match="size"):
            group_delta(event, 1.0, size, "zero-out")  # type: ignore[arg-type]
