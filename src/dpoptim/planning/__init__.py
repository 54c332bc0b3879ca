"""Settings chosen before any data is touched, by public numbers only."""

from dpoptim.planning.choice import Plans, choose, warnings_about_plan
from dpoptim.planning.ranking import learning_rate, predicted_error
from dpoptim.planning.sweep import Question, Setting, StepCost, sweep
from dpoptim.planning.targets import EpsilonAtMost, Target

__all__ = [
    "EpsilonAtMost",
    "Plans",
    "Question",
    "Setting",
    "StepCost",
    "Target",
    "choose",
    "learning_rate",
    "predicted_error",
    "sweep",
    "warnings_about_plan",
]
