"""`self_composed` gives what `dp_accounting` gives, to the last bit, from bounds of its own."""

import numpy as np
import pytest
from dp_accounting.pld import common
from dp_accounting.pld import privacy_loss_distribution as pld

from dpoptim.accounting.self_composition import TAILS, bounds_of_sum, self_composed


@pytest.mark.parametrize("count", [1, 2, 30, 20_000])
@pytest.mark.parametrize("interval", [1e-3, 0.1])
@pytest.mark.parametrize("rate", [1e-4, 0.2, 1.0])
def test_it_is_the_composition_of_dp_accounting(rate: float, interval: float, count: int) -> None:
    losses = pld.from_gaussian_mechanism(
        1.5, sampling_prob=rate, value_discretization_interval=interval
    )
    assert losses._symmetric == (rate == 1.0)
    for ours, theirs in zip(
        directions(self_composed(losses, count)),
        directions(losses.self_compose(count)),
        strict=True,
    ):
        assert type(ours) is type(theirs)
        assert vars(ours).keys() == vars(theirs).keys()
        for name, value in vars(theirs).items():
            assert np.array_equal(vars(ours)[name], value), name


def directions(losses: pld.PrivacyLossDistribution) -> list[object]:
    return [losses._pmf_remove, losses._pmf_add]


def test_few_points_stay_few() -> None:
    losses = pld.from_randomized_response(0.5, 2, value_discretization_interval=0.1)
    assert vars(self_composed(losses, 3)._pmf_remove) == vars(losses.self_compose(3)._pmf_remove)


@pytest.mark.parametrize("count", [1, 7, 400])
def test_what_lies_outside_the_bounds_is_hardly_ever_seen(count: int) -> None:
    probabilities = np.array([0.3, 0.0, 0.1, 0.0, 0.0, 0.6])
    low, high = bounds_of_sum(probabilities, count)
    assert (low, high) == common.compute_self_convolve_bounds(probabilities, count, TAILS)
    sums = np.array([1.0])
    for _ in range(count):
        sums = np.convolve(sums, probabilities)
    assert 0 <= low < high <= len(sums) - 1
    assert sums[:low].sum() + sums[high + 1 :].sum() <= TAILS


def test_the_bounds_are_those_of_sums_however_many() -> None:
    """No moment overflows, of long grids or of many releases; without probability there is none."""
    long = np.full(100_000, 1e-5)
    for probabilities in (long, long[:3], np.array([0.0, 1.0])):
        for count in (2, 10**6):
            theirs = common.compute_self_convolve_bounds(probabilities, count, TAILS)
            assert bounds_of_sum(probabilities, count) == pytest.approx(theirs, rel=1e-12)
    assert bounds_of_sum(np.zeros(3), 5) == (0, 10)
