"""Sampling by turns: who takes part when, what it costs, and that the theorem's coins are the ones
that are tossed.
"""

import dp_accounting
import numpy as np
import pytest

import dpoptim
from dpoptim.gate import CorrelatedSum
from dpoptim.noise.correlated import BandedToeplitz
from dpoptim.noise.stream import KeyStream
from dpoptim.sampling import CyclicPoissonSampling, Position
from took_part import took_part


def test_a_record_takes_part_in_its_own_turns_alone() -> None:
    sampler = CyclicPoissonSampling(0.1, 4)
    found = took_part(sampler, 4000, 40)
    by_part = found.reshape(10, 4, 4000).any(0)
    assert (by_part.sum(0) <= 1).all()
    parts = np.bincount(by_part.argmax(0)[by_part.any(0)], minlength=4)
    assert abs(parts - 1000).max() < 5 * np.sqrt(750)
    rate = found.mean()
    assert abs(rate - 0.1) < 5 * np.sqrt(0.1 * 0.9 / found.size)


def test_turns_are_independent_coins_of_the_accounted_rate() -> None:
    sampler = CyclicPoissonSampling(0.2, 3)
    found = took_part(sampler, 9000, 30)
    # of each record, whether it came in each of its ten turns
    turns = found.reshape(10, 3, 9000).any(1)
    assert abs(turns.mean() - 0.6) < 5 * np.sqrt(0.24 / turns.size)
    again = (turns[1:] & turns[:-1]).mean()
    assert abs(again - 0.36) < 6 * np.sqrt(0.36 / turns.size) * 2


def test_a_run_goes_on_in_the_same_parts() -> None:
    sampler, position = CyclicPoissonSampling(0.2, 3), Position()
    drawn = sampler.batches(KeyStream.from_seed(1, "a"), 60, position)
    first = [next(drawn) for _ in range(3)]
    assert position.order is not None
    later = sampler.batches(
        KeyStream.from_seed(2, "b"), 60, Position(position.order.copy(), position.drawn)
    )
    for turn in range(3):
        members = set(np.flatnonzero(position.order == turn))
        assert set(first[turn]) <= members
        assert set(next(later)) <= members


def test_the_event_is_that_of_the_turns() -> None:
    plan = dpoptim.DPFTRL(1.0, sampling="cyclic-poisson", bands=4).plan(
        n=1000, batch_size=50, steps=10, noise_multiplier=0.9, delta=1e-6
    )
    assert plan.neighboring == "add-or-remove-one"
    step = dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(0.9))
    assert plan.event == dp_accounting.SelfComposedDpEvent(step, 3)
    query = plan.query
    assert isinstance(query, CorrelatedSum)
    assert query.standard_deviation == pytest.approx(0.9 * BandedToeplitz(4).sensitivity(10))
    assert dpoptim.Plan.from_json(plan.to_json()) == plan


def test_one_band_is_dp_sgd() -> None:
    arguments = {"n": 1000, "batch_size": 50, "steps": 10, "noise_multiplier": 0.9, "delta": 1e-6}
    banded = dpoptim.DPFTRL(1.0, sampling="cyclic-poisson", bands=1).plan(**arguments)
    assert banded.event == dpoptim.DPSGD(1.0).plan(**arguments).event
    assert banded.query.standard_deviation == pytest.approx(0.9, rel=1e-6)


def test_more_bands_than_parts_are_not_amplified() -> None:
    """A strategy that reaches further than the parts is charged without amplification, whatever
    its sampler.
    """
    from dpoptim.mechanisms import CorrelatedNoise, RunShape

    run = RunShape(CyclicPoissonSampling(0.05, 4), 1000, 50, 12, "add-or-remove-one")
    assert CorrelatedNoise(BandedToeplitz(4)).amplified(run)
    wide = CorrelatedNoise(BandedToeplitz(5))
    assert not wide.amplified(run)
    assert wide.event(run, 2.0) == dp_accounting.GaussianDpEvent(2.0)
    assert wide.query(run, 2.0, 1.0).participations == 3


@pytest.mark.set_aside("8.0")
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_bands_are_chosen_for_the_budget_and_beat_dp_sgd(epsilon: float) -> None:
    method = dpoptim.DPFTRL(1.0, sampling="cyclic-poisson")
    plan = method.plan(n=6000, batch_size=100, epochs=4, epsilon=epsilon, delta=1e-5)
    bands = plan.method.bands  # type: ignore[attr-defined]
    assert (bands >= 8) if epsilon == 8 else (1 <= bands <= 16)
    assert plan.guarantee.epsilon <= epsilon
    sgd = dpoptim.DPSGD(1.0).plan(n=6000, batch_size=100, epochs=4, epsilon=epsilon, delta=1e-5)
    error = (
        np.sqrt(np.mean(BandedToeplitz(bands).prefix_std(plan.steps) ** 2)) * plan.noise_multiplier
    )
    plain = np.sqrt((plan.steps + 1) / 2) * sgd.noise_multiplier
    assert error <= plain * 1.001
    if epsilon == 8:
        assert error < 0.7 * plain


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"bands": 40}, "leaves too few records for a batch"),
        ({"noise": "tree"}, "leave noise and order out"),
        ({"sampling": "fixed", "bands": 4}, "bands is for sampling='cyclic-poisson'"),
        ({"sampling": "cyclic"}, "sampling must be one of"),
        ({"bands": None}, "bands is missing"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, object], said: str) -> None:
    given = {"sampling": "cyclic-poisson", **settings}
    with pytest.raises(ValueError, match=said):
        dpoptim.DPFTRL(1.0, **given).plan(  # type: ignore[arg-type]
            n=1000, batch_size=50, steps=10, noise_multiplier=0.9, delta=1e-6
        )
