# The public names and where they live: type checkers read this file, and __init__.py loads a name
# when it is first used.
from dpoptim import losses as losses
from dpoptim.accounting.guarantee import Guarantee as Guarantee
from dpoptim.accounting.ledger import BudgetExceeded as BudgetExceeded
from dpoptim.accounting.ledger import Ledger as Ledger
from dpoptim.errors import LedgerError as LedgerError
from dpoptim.errors import PrivacyError as PrivacyError
from dpoptim.errors import SamplesInteractError as SamplesInteractError
from dpoptim.gradients.layers.custom_rules import register_layer_rule as register_layer_rule
from dpoptim.methods import DPFTRL as DPFTRL
from dpoptim.methods import DPSGD as DPSGD
from dpoptim.methods import DiceSGD as DiceSGD
from dpoptim.methods import PlannedClipNorm as PlannedClipNorm
from dpoptim.methods import PrivateQuantile as PrivateQuantile
from dpoptim.methods import ScaledClipNorm as ScaledClipNorm
from dpoptim.methods import SparseSGD as SparseSGD
from dpoptim.methods import ValueClippedSGD as ValueClippedSGD
from dpoptim.methods import register_method as register_method
from dpoptim.methods.low_quantile import private_low_quantile as private_low_quantile
from dpoptim.plan import Plan as Plan
from dpoptim.replace import replace_batchnorm as replace_batchnorm
from dpoptim.runs.certify import certify as certify
from dpoptim.runtime.freed_memory import keep_freed_memory as keep_freed_memory
from dpoptim.summaries.counts import private_count as private_count
from dpoptim.summaries.counts import private_histogram as private_histogram
from dpoptim.summaries.mean import private_mean as private_mean
from dpoptim.summaries.quantile import private_quantile as private_quantile
from dpoptim.summaries.total import private_sum as private_sum
from dpoptim.training.attach import attach as attach
from dpoptim.training.checkpoints.earlier_part import released_weights as released_weights
from dpoptim.training.losses.per_sample import per_sample as per_sample
from dpoptim.training.other_runs import OtherRunsWarning as OtherRunsWarning
from dpoptim.training.private_schedules import (
    PrivateScheduleWarning as PrivateScheduleWarning,
)
from dpoptim.training.private_training import PrivateTraining as PrivateTraining
from dpoptim.training.trials.check import check as check
from dpoptim.training.trials.isolation import IsolationWarning as IsolationWarning
from dpoptim.training.trials.loss_check import LossNotCheckedWarning as LossNotCheckedWarning
from dpoptim.training.trials.loss_check import OwnMeansWarning as OwnMeansWarning
from dpoptim.training.trials.memory import physical_batch_size as physical_batch_size
from dpoptim.version import __version__ as __version__
