"""Private preprocessing: scikit-learn transformers that are charged, and a pipeline."""

from dpoptim.preprocessing.class_counts import DPClassCounts
from dpoptim.preprocessing.imputer import DPImputer
from dpoptim.preprocessing.min_max_scaler import DPMinMaxScaler
from dpoptim.preprocessing.one_hot import DPOneHot
from dpoptim.preprocessing.pipeline import PrivatePipeline
from dpoptim.preprocessing.standard_scaler import DPStandardScaler

__all__ = [
    "DPClassCounts",
    "DPImputer",
    "DPMinMaxScaler",
    "DPOneHot",
    "DPStandardScaler",
    "PrivatePipeline",
]
