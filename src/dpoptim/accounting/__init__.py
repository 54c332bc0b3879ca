"""Privacy accounting: what an event costs, what noise a budget needs, what a guarantee says."""

from dpoptim.accounting.accountant import (
    compute_delta,
    compute_epsilon,
    privacy_curve,
    renyi_divergence,
    tradeoff_curve,
)
from dpoptim.accounting.calibration import calibrate_event, calibrate_noise_multiplier
from dpoptim.accounting.event_json import event_from_json, event_to_json
from dpoptim.accounting.gaussian import gdp_delta, gdp_epsilon, gdp_mu
from dpoptim.accounting.group_privacy import group_delta
from dpoptim.accounting.guarantee import Guarantee, neighboring_name, parse_neighboring

__all__ = [
    "Guarantee",
    "calibrate_event",
    "calibrate_noise_multiplier",
    "compute_delta",
    "compute_epsilon",
    "event_from_json",
    "event_to_json",
    "gdp_delta",
    "gdp_epsilon",
    "gdp_mu",
    "group_delta",
    "neighboring_name",
    "parse_neighboring",
    "privacy_curve",
    "renyi_divergence",
    "tradeoff_curve",
]
