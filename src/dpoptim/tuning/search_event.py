"""The event of a private search: a random number of Gaussian trials, the best of which leaves."""

import math
from typing import Any

import dp_accounting
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from dpoptim.accounting.calibration import calibrate_event
from dpoptim.arguments import positive_number

SHAPE = 0.0  # of the number of trials: logarithmic, the cheapest of the family for Gaussian trials


def search_event(epsilon: float, delta: float, neighboring: str, mean_trials: float) -> Any:
    """The event of a search within (epsilon, delta), its trials Gaussians as sharp as may be."""
    mean = positive_number("mean_trials", mean_trials)
    if not 1 < mean <= 1e4:
        raise ValueError(f"mean_trials must be above 1 and at most 10,000, got {mean_trials!r}.")

    def event(noise_multiplier: float) -> dp_accounting.DpEvent:
        return RepeatAndSelectDpEvent(dp_accounting.GaussianDpEvent(noise_multiplier), mean, SHAPE)

    start = math.sqrt(mean) / epsilon
    return event(
        calibrate_event(event, epsilon=epsilon, delta=delta, neighboring=neighboring, start=start)
    )
