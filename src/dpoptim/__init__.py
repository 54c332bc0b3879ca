"""dpoptim: train PyTorch models with differential privacy."""

from dpoptim import losses
from dpoptim.accounting.guarantee import Guarantee
from dpoptim.accounting.ledger import BudgetExceeded, Ledger, LedgerError
from dpoptim.errors import PrivacyError, SamplesInteractError
from dpoptim.low_quantile import private_low_quantile
from dpoptim.methods import DPFTRL, DPSGD, DiceSGD, PrivateQuantile, ValueClippedSGD
from dpoptim.plan import Plan
from dpoptim.replace import replace_batchnorm
from dpoptim.training.attach import attach
from dpoptim.training.check import check
from dpoptim.training.memory import physical_batch_size
from dpoptim.training.private_training import PrivateTraining
from dpoptim.version import __version__

__all__ = [
    "DPFTRL",
    "DPSGD",
    "BudgetExceeded",
    "DiceSGD",
    "Guarantee",
    "Ledger",
    "LedgerError",
    "Plan",
    "PrivacyError",
    "PrivateQuantile",
    "PrivateTraining",
    "SamplesInteractError",
    "ValueClippedSGD",
    "__version__",
    "attach",
    "check",
    "losses",
    "physical_batch_size",
    "private_low_quantile",
    "replace_batchnorm",
]
