"""The auditor: every promise of the library attacked through its own code.

Two worlds (`audit_two_worlds`), sensitivity (`audit_sensitivity`), replay (`audit_replay`), noise
(`audit_noise`), participation (`audit_participation`) and charging (`audit_charging`) each return
a result with a ``verdict``, ``"consistent"`` or ``"refuted"``. `DETECTORS` are these at small
fixed settings (tests/mutants holds the seeded bugs that show that they can find something).
`AUDITS` attack every method by name, `one_run` a training run of the user's own. An audit can
refute a claim; it can never prove one.
"""

from dpoptim.audit.attached_run import attached_run
from dpoptim.audit.attack_families import run_audits
from dpoptim.audit.bounds import (
    Errors,
    clopper_pearson_lower,
    clopper_pearson_upper,
    epsilon_lower_bound,
    gdp_lower_bound,
)
from dpoptim.audit.charging import ChargingResult, audit_charging
from dpoptim.audit.detectors import DETECTORS
from dpoptim.audit.finding import Finding
from dpoptim.audit.layer_rules import check_layer_rule
from dpoptim.audit.named_audits import AUDITS
from dpoptim.audit.noise import NoiseResult, audit_noise
from dpoptim.audit.one_run import OneRunResult, one_run
from dpoptim.audit.participation import ParticipationResult, audit_participation
from dpoptim.audit.replay import ReplayResult, audit_replay
from dpoptim.audit.sampled_gaussians import SampledGaussians
from dpoptim.audit.sensitivity import SensitivityResult, audit_sensitivity
from dpoptim.audit.two_worlds import AuditResult, audit_two_worlds

__all__ = [
    "AUDITS",
    "DETECTORS",
    "AuditResult",
    "ChargingResult",
    "Errors",
    "Finding",
    "NoiseResult",
    "OneRunResult",
    "ParticipationResult",
    "ReplayResult",
    "SampledGaussians",
    "SensitivityResult",
    "attached_run",
    "audit_charging",
    "audit_noise",
    "audit_participation",
    "audit_replay",
    "audit_sensitivity",
    "audit_two_worlds",
    "check_layer_rule",
    "clopper_pearson_lower",
    "clopper_pearson_upper",
    "epsilon_lower_bound",
    "gdp_lower_bound",
    "one_run",
    "run_audits",
]
