"""Estimators for tables, in scikit-learn's manner."""

from dpoptim.estimators.linear import DPLinearRegression, DPLogisticRegression

__all__ = ["DPLinearRegression", "DPLogisticRegression"]
