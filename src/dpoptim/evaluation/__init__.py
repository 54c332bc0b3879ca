"""Scores of a model on private records, with noise, confidence intervals and a guarantee."""

from dpoptim.evaluation.evaluate import (
    ClassifierScores,
    evaluate_classifier,
)
from dpoptim.evaluation.intervals import Interval
from dpoptim.evaluation.regressor import RegressorScores, evaluate_regressor

__all__ = [
    "ClassifierScores",
    "Interval",
    "RegressorScores",
    "evaluate_classifier",
    "evaluate_regressor",
]
