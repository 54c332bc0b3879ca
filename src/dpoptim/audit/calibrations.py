"""Calibrations held against their budgets: what is found, and what is remembered."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import dp_accounting as dp

from dpoptim.accounting import calibration, compute_epsilon
from dpoptim.audit.min_separation import MixturesOfPatterns

EPSILON, DELTA, RELATION = 2.0, 1e-5, "zero-out"
Family = Callable[[float], dp.DpEvent]


def calibrations() -> str:
    """Compare calibrated noise with its budget: text where it costs more. Exact, but for rounding.

    One search is by sampled prices (b-min-sep), one by an exact price. Then a noise multiplier is
    remembered of an event that costs less than the one it is asked for.
    """
    apart = MixturesOfPatterns(
        0.2, 9, column=(0.8, 0.5, 0.33), rows=(1.0,) * 9, gap=3, chance=0.2 / (1 - 2 * 0.2)
    )

    def dearer(noise_multiplier: float) -> dp.DpEvent:
        """By its name, which is what it is at 1, a Gaussian; else one of half the noise."""
        return dp.GaussianDpEvent(noise_multiplier / (1 if noise_multiplier == 1 else 2))

    with own_cache():
        return (
            over_budget("b-min-sep batches", apart.event)
            or over_budget("a Gaussian", dp.GaussianDpEvent)
            or over_budget("what was remembered of another event", dearer)
        )


def over_budget(what: str, family: Family) -> str:
    """Calibrate; text if the noise costs more than `EPSILON`."""
    noise = calibration.calibrate_remembered(
        family, epsilon=EPSILON, delta=DELTA, neighboring=RELATION
    )
    cost = compute_epsilon(family(noise), DELTA, RELATION).epsilon
    if cost <= EPSILON:
        return ""
    return f"refuted: calibration of {what}: epsilon {cost:.4g} where {EPSILON:g} was asked for"


@contextmanager
def own_cache() -> Iterator[None]:
    """An empty folder of calibrations, which is removed again."""
    name = "DPOPTIM_CACHE_DIR"
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
