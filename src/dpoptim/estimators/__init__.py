"""Estimators for tables, in scikit-learn's manner."""

from dpoptim.estimators.linear import DPLinearRegression, DPLogisticRegression
from dpoptim.estimators.networks import DPSGDClassifier, DPSGDRegressor
from dpoptim.estimators.repeats import RepeatedFitWarning
from dpoptim.estimators.table import ReadOffWarning

__all__ = [
    "DPLinearRegression",
    "DPLogisticRegression",
    "DPSGDClassifier",
    "DPSGDRegressor",
    "ReadOffWarning",
    "RepeatedFitWarning",
]
