"""The training algorithm of ``dpoptim train`` where none is named, from public numbers."""

import math
from dataclasses import replace

from dpoptim.data import Data
from dpoptim.estimators.solving import sums_are_sharp
from dpoptim.registry import entry
from dpoptim.runs.options import TrainRequest
from dpoptim.runs.train_solver import FIND_RANGE
from dpoptim.solvers.budget import Budget
from dpoptim.solvers.linear_model import LinearModel

SINGLE_PASS_SOLVERS = ("accelerated-srgd",)
AUTO, STEPWISE = "auto", "dp-sgd"
# options of methods that train step by step, which solvers have not
OF_STEPS = (
    "setting",
    "clip_norm",
    "clip_quantile",
    "batch_size",
    "epochs",
    "learning_rate",
    "momentum",
    "betas",
    "projection",
    "max_time",
)
BY_ITSELF = {"optimizer": "sgd", "clipping": "flat", "iterate": "average", "resume": False}


def with_method(
    options: TrainRequest, data: Data, kept: str | None, *, epsilon: float, delta: float
) -> TrainRequest:
    """The options with their method by name.

    By default a linear model of numbers is what `DPLinearRegression` fits: noise is as large as the
    public range of the target allows, so a part of the budget finds where targets lie in it. All
    else is trained by `STEPWISE`, and so is what is told options of that.

    Args:
        kept: the relation of the ledger; solvers have no add-or-remove-one.
        epsilon, delta: of the budget.
    """
    if options.method != AUTO or options.single_pass:
        return options if options.method != AUTO else replace(options, method=one_pass(options))
    hidden = "zero-out" if options.n is None else "add-or-remove-one"
    relation = options.neighboring or kept or hidden
    linear = data.target_bounds is not None and options.model == "softmax"
    if not linear or relation == "add-or-remove-one" or asks_for_steps(options):
        return replace(options, method=STEPWISE)
    noise = options.noise_multiplier
    budget = Budget(delta=delta, **({"epsilon": epsilon} if noise is None else {"mu": 1 / noise}))
    model = LinearModel("squared", math.prod(data.x.shape[1:]))
    sharp = sums_are_sharp(model, data.units, budget)
    method = "sufficient-statistics" if sharp else "momentum-gd"
    return replace(options, method=method, setting=[f"{FIND_RANGE}=true"])


def asks_for_steps(options: TrainRequest) -> bool:
    """Whether an option is given that only methods which train step by step have."""
    told = any(getattr(options, name) is not None for name in OF_STEPS)
    told = told or any(getattr(options, name) != usual for name, usual in BY_ITSELF.items())
    return told or options.noise_multiplier == 0


def one_pass(options: TrainRequest) -> str:
    """The method of ``--single-pass`` by default: accelerated SRGD if the model is linear."""
    return "accelerated-srgd" if options.model == "softmax" else "dp-ftrl"


def checked_method(options: TrainRequest) -> str:
    """The method, checked against --single-pass."""
    if not options.single_pass:
        return options.method
    if options.epochs not in (None, 1):
        raise ValueError(
            f"--single-pass sees every record once; leave out --epochs {options.epochs:g}."
        )
    if options.method == STEPWISE:
        return one_pass(options)
    if entry(options.method).solver and options.method not in SINGLE_PASS_SOLVERS:
        raise ValueError(
            f"--method {options.method} needs many looks at the data; leave out --single-pass."
        )
    return options.method
