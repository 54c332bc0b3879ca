"""Scores of a model on private records, with noise, confidence intervals and a guarantee."""

from dpoptim.evaluation.evaluate import (
    ClassifierScores,
    RegressorScores,
    evaluate_classifier,
    evaluate_regressor,
)
from dpoptim.evaluation.intervals import Interval

__all__ = [
    "ClassifierScores",
    "Interval",
    "RegressorScores",
    "evaluate_classifier",
    "evaluate_regressor",
]
