"""Estimators for tables, in scikit-learn's manner."""

from dpoptim.estimators.linear import DPLinearRegression, DPLogisticRegression
from dpoptim.estimators.networks import DPSGDClassifier, DPSGDRegressor

__all__ = ["DPLinearRegression", "DPLogisticRegression", "DPSGDClassifier", "DPSGDRegressor"]
