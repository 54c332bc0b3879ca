"""Unknown words, such as Opacus' and DataLoader's, and what they are called here."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, Self, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

LOSS_TAKES = (
    "loss takes (model, batch) and returns one value a record: def loss(model, batch): x, y = "
    "batch; return F.cross_entropy(model(x), y, reduction='none')"
)
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
    "ModuleValidator": "dpoptim.replace_batchnorm(model).model; no other layer must go",
    "RDPAccountant": "plan.guarantee, known before the run; private.spent()",
    "PRVAccountant": "plan.guarantee, known before the run; private.spent()",
    "register_grad_sampler": "dpoptim.register_layer_rule, needed for speed only",
}
KEYWORDS = {
    "max_grad_norm": "DPSGD(clip_norm=...)",
    "l2_norm_clip": "DPSGD(clip_norm=...)",
    "target_epsilon": "DPSGD(...).plan(epsilon=...)",
    "target_delta": "DPSGD(...).plan(delta=...)",
    "sample_rate": "DPSGD(...).plan(batch_size=...), of n",
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
    # scikit-learn's and diffprivlib's
    "C": "l2 = 1 / (C n)",
    "max_iter": "nothing: how many steps there are is chosen with their noise; steps= says it",
    "tol": "nothing: when to stop would be read off the data; steps= says it",
    "bounds_X": "data_norm=the largest norm of a row, known without the data",
    "bounds_y": "target_bound=(lowest, highest), known without the data",
    # DataLoader's
    "shuffle": "nothing: the plan's method says who takes part, and in which order",
    "drop_last": "nothing: a step takes the batch that the plan's method draws",
    **dict.fromkeys(
        ("sampler", "batch_sampler"),
        "nothing: who takes part is drawn by the plan's method, as its guarantee says; class "
        "weights that are public, in the loss, do what oversampling does",
    ),
    "generator": "nothing: who takes part is drawn from the operating system's randomness",
    # of this package, at another door
    "clip_norm": "DPSGD(clip_norm=...)",
    "epsilon": "DPSGD(...).plan(epsilon=...)",
    "delta": "DPSGD(...).plan(delta=...)",
    "noise_multiplier": "DPSGD(...).plan(noise_multiplier=...)",
    "batch_size": "DPSGD(...).plan(batch_size=...)",
    "epochs": "DPSGD(...).plan(epochs=...)",
    "physical_batch_size": "private.batches(physical_batch_size=...)",
}


def hint_of_name(name: str) -> str:
    """Addition to the error about an unknown name of the package; empty if nothing is known."""
    return f" Fix: what Opacus calls {name} is here {NAMES[name]}." if name in NAMES else ""


def refuse_unknown(function: Callable[..., object], given: Iterable[str]) -> None:
    """Refuse keywords that a function does not take.

    Raises:
        TypeError: with what is to be given instead.
    """
    arguments = inspect.signature(function).parameters
    passes_on = any(a.kind is a.VAR_KEYWORD for a in arguments.values())
    for name in given:
        if name in arguments or (passes_on and name not in KEYWORDS):
            continue
        raise TypeError(
            f"{function.__qualname__}() got an unexpected keyword argument {name!r}."
            f"{hint_of_keyword(name, list(arguments))}"
        )


def hint_of_keyword(name: str, known: list[str]) -> str:
    """Substitute for an unknown keyword, to a function that knows these."""
    meant = KEYWORDS.get(name, "")
    argument = meant.rpartition("(")[2].partition("=")[0]
    if argument in known:
        return f" Fix: what others call {name} is here {argument}=...."
    if meant:
        return f" Fix: {name} is here {meant}."
    begun = [argument for argument in known if argument.startswith(name)]
    similar = begun or difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f" Fix: {similar[0]}=...?" if similar else ""


def knows_opacus(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function's error about an unknown keyword say what is to be given instead."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_unknown(function, kwargs)
        return function(*args, **kwargs)

    return called


class KnowsOpacus:
    """Lets classes' errors about unknown keywords say what is to be given instead."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        refuse_unknown(cls.__init__, kwargs)
        return super().__new__(cls)
