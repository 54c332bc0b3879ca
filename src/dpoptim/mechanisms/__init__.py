"""How a run's noise is made, what the run costs by it, and which audits attack it."""

from dpoptim.mechanisms.correlated import CorrelatedNoise
from dpoptim.mechanisms.independent import IndependentNoise
from dpoptim.mechanisms.mechanism import Mechanism, RunShape, StepMechanism
from dpoptim.mechanisms.selected_rows import RowSelection

__all__ = [
    "CorrelatedNoise",
    "IndependentNoise",
    "Mechanism",
    "RowSelection",
    "RunShape",
    "StepMechanism",
]
