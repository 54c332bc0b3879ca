"""Privacy bugs of calibration: the noise that a budget asks for."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import dp_accounting as dp

from dpoptim.accounting import calibration

Fault = AbstractContextManager[Any]


def a_search_that_ends_above_its_target() -> Fault:
    """By up to three hundredths, as its rough part may."""
    honest = calibration._descend

    def descend(
        value: Callable[[float], float], start: float, low: float, high: float, *, slope: float
    ) -> tuple[float, float]:
        return honest(value, start, low, max(high, 3e-2), slope=slope)

    return patch.object(calibration, "_descend", descend)


def remembered_noise_believed() -> Fault:
    """What is known by an event's name is not priced again."""
    honest, known = calibration.calibrate_remembered, dict[tuple[str, float], float]()

    def calibrate(event_of: Callable[[float], dp.DpEvent], **options: Any) -> float:
        name = repr(event_of(1.0)), options["epsilon"]
        if name not in known:
            known[name] = honest(event_of, **options)
        return known[name]

    return patch.object(calibration, "calibrate_remembered", calibrate)
