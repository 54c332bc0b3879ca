"""The training algorithms, each a frozen set of public settings with a ``plan``."""

from dpoptim.methods.dice_sgd import DiceSGD
from dpoptim.methods.dp_ftrl import DPFTRL
from dpoptim.methods.dp_sgd import DPSGD
from dpoptim.methods.method import TrainingMethod
from dpoptim.methods.planned_clip_norm import PlannedClipNorm
from dpoptim.methods.private_quantile import PrivateQuantile
from dpoptim.methods.scaled_clip_norm import ScaledClipNorm
from dpoptim.methods.sparse_sgd import SparseSGD
from dpoptim.methods.value_clipped_sgd import ValueClippedSGD
from dpoptim.methods.whole_run import WholeRun
from dpoptim.registry import register_method

__all__ = [
    "DPFTRL",
    "DPSGD",
    "DiceSGD",
    "PlannedClipNorm",
    "PrivateQuantile",
    "ScaledClipNorm",
    "SparseSGD",
    "TrainingMethod",
    "ValueClippedSGD",
    "WholeRun",
    "register_method",
]
