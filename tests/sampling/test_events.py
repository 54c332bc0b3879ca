"""An event has every step of a run, each with its own noise and rate."""

from collections import Counter

import dp_accounting
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dpoptim.sampling.sampler import composed_gaussians

STEPS = st.lists(
    st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([0.1, 0.2, 1.0])), max_size=20
)


def steps_of(event: dp_accounting.DpEvent) -> Counter[tuple[float, float]]:
    """How many steps an event has of each noise and rate."""
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return sum(map(steps_of, event.events), Counter())
    assert isinstance(event, dp_accounting.SelfComposedDpEvent)
    step, rate = event.event, 1.0
    if isinstance(step, dp_accounting.PoissonSampledDpEvent):
        step, rate = step.event, step.sampling_probability
    assert isinstance(step, dp_accounting.GaussianDpEvent)
    return Counter({(step.noise_multiplier, rate): event.count})


@given(STEPS)
def test_every_step_is_counted_once_with_its_noise_and_rate(
    steps: list[tuple[float, float]],
) -> None:
    """In stretches or not; with a step missed, or given its neighbour's rate, less is charged."""
    noise, rates = np.array([*zip(*steps, strict=True)]).reshape(2, -1)
    assert steps_of(composed_gaussians(noise, rates)) == Counter(steps)


@given(STEPS.filter(bool))
def test_one_rate_is_that_of_all_steps(steps: list[tuple[float, float]]) -> None:
    noise = np.array([each for each, _ in steps])
    rate = steps[0][1]
    assert steps_of(composed_gaussians(noise, rate)) == Counter(
        (each, rate) for each in noise.tolist()
    )


def test_the_order_of_steps_changes_nothing() -> None:
    noise, rates = np.array([1.0, 1.0, 2.0, 1.0]), np.array([0.1, 0.2, 0.1, 0.1])
    back = slice(None, None, -1)
    assert composed_gaussians(noise, rates) == composed_gaussians(noise[back], rates[back])
