"""Words that Opacus' users bring along, and what they are called here: for error messages."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

NAMES = {
    "PrivacyEngine": "plan = dpoptim.DPSGD(clip_norm=...).plan(...), then dpoptim.attach(plan, "
    "model, optimizer, train_set)",
    "make_private": "dpoptim.attach(plan, model, optimizer, train_set)",
    "make_private_with_epsilon": "dpoptim.DPSGD(clip_norm=...).plan(epsilon=..., ...), then "
    "dpoptim.attach(plan, ...)",
    "GradSampleModule": "nothing: the model stays as it is inside dpoptim.attach",
    "DPOptimizer": "nothing: your own optimizer, given to dpoptim.attach",
    "DPDataLoader": "private.batches()",
    "BatchMemoryManager": "private.batches(physical_batch_size=...)",
    "ModuleValidator": "dpoptim.replace_batchnorm(model), the only layer that must go",
    "RDPAccountant": "plan.guarantee, known before the run; private.spent()",
    "PRVAccountant": "plan.guarantee, known before the run; private.spent()",
    "register_grad_sampler": "dpoptim.register_layer_rule, needed for speed only",
}
KEYWORDS = {
    "max_grad_norm": "DPSGD(clip_norm=...)",
    "target_epsilon": "DPSGD(...).plan(epsilon=...)",
    "target_delta": "DPSGD(...).plan(delta=...)",
    "sample_rate": "DPSGD(...).plan(n=..., batch_size=...)",
    "module": "attach(plan, model=...)",
    "data_loader": "attach(..., train_set=the data set itself), which draws Poisson batches",
    "poisson_sampling": "nothing: what is accounted as sampled is sampled; DPFTRL takes fixed "
    "batches",
    "max_physical_batch_size": "private.batches(physical_batch_size=...)",
    "batch_first": "attach(..., batch_axis=...)",
    "grad_sample_mode": "nothing: the cheapest exact way is chosen for each layer",
    "criterion": "attach(..., loss=...)",
    "accountant": "nothing: plans are accounted by PLD",
    "secure_mode": "nothing: noise is cryptographic unless noise_seed is given",
}


def hint_of_name(name: str) -> str:
    """What to add to the error about an unknown name of the package; empty if nothing is known."""
    return f" Fix: what Opacus calls {name} is here {NAMES[name]}." if name in NAMES else ""


def knows_opacus(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function's error about an unknown keyword say what Opacus' word for it is here."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known and name in KEYWORDS:
                raise TypeError(
                    f"{function.__qualname__}() has no {name!r}. Fix: what Opacus calls {name} is "
                    f"here {KEYWORDS[name]}."
                )
        return function(*args, **kwargs)

    return called
