"""Unknown words, such as Opacus' and DataLoader's, and what they are called here."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import ParamSpec, Self, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

LOSS_TAKES = (
    "loss takes (model, batch) and returns one value a record: def loss(model, batch): x, y = "
    "batch; return F.cross_entropy(model(x), y, reduction='none')"
)
KNOWN = "plan.guarantee, known before the run; private.spent()"
PLAN = "DPSGD(clip_norm=...).plan(epsilon=..., ...)"
NAMES = {
    "PrivacyEngine": "plan = dpoptim.DPSGD(clip_norm=...).plan(...), then dpoptim.attach(plan, "
    "model, optimizer, train_set)",
    "make_private": "dpoptim.attach(plan, model, optimizer, train_set)",
    "make_private_with_epsilon": f"dpoptim.{PLAN}, then dpoptim.attach(plan, ...)",
    "DPDataLoader": "private.batches()",
    "BatchMemoryManager": "private.batches(physical_batch_size=...)",
    "ModuleValidator": "dpoptim.replace_batchnorm(model).model; no other layer must go",
    **dict.fromkeys(("RDPAccountant", "PRVAccountant", "GaussianAccountant"), KNOWN),
    "register_grad_sampler": "dpoptim.register_layer_rule, needed for speed only",
    "get_noise_multiplier": f"dpoptim.{PLAN}.noise_multiplier",
    "AdaClipDPOptimizer": "dpoptim.DPSGD(clip_norm=dpoptim.PrivateQuantile(...))",
    **dict.fromkeys(
        ("StepNoise", "ExponentialNoise", "LambdaNoise"),
        "dpoptim.DPSGD(noise_schedule=(...)), the noise in equal stretches of the run, over the "
        "plan's noise multiplier",
    ),
    # of others
    "PrivacyArguments": f"a plan, dpoptim.{PLAN}",
    "compute_dp_sgd_privacy": "dpoptim.DPSGD(clip_norm=1.0).plan(noise_multiplier=..., "
    "...).guarantee",
}
NOT_NEEDED = {
    "GradSampleModule": "the model stays as it is inside dpoptim.attach",
    **dict.fromkeys(
        ("DPOptimizer", "DistributedDPOptimizer"), "dpoptim.attach takes your own optimizer"
    ),
    **dict.fromkeys(
        ("DPLSTM", "DPGRU", "DPRNN", "DPMultiheadAttention"),
        "dpoptim.attach takes torch's own layer",
    ),
    **dict.fromkeys(
        ("DPDDP", "DifferentiallyPrivateDistributedDataParallel"),
        "dpoptim.attach takes torch's DistributedDataParallel, or the bare model in each process",
    ),
}
KEYWORDS = {
    "max_grad_norm": "DPSGD(clip_norm=...)",
    "l2_norm_clip": "DPSGD(clip_norm=...)",
    "target_epsilon": "DPSGD(...).plan(epsilon=...)",
    "target_delta": "DPSGD(...).plan(delta=...)",
    **dict.fromkeys(("sample_size", "num_examples"), "DPSGD(...).plan(n=...)"),
    "expected_batch_size": "DPSGD(...).plan(batch_size=...)",
    "iterations": "DPSGD(...).plan(steps=...)",
    "module": "attach(plan, model=...)",
    "data_loader": "attach(..., train_set=the data set itself), which draws Poisson batches",
    "max_physical_batch_size": "private.batches(physical_batch_size=...)",
    "batch_first": "attach(..., batch_axis=...)",
    "author_mapping": "attach(..., persons=the author of each record), as PrivateTrainer takes it",
    "privacy_args": "PrivateTrainer(plan=DPSGD(clip_norm=...).plan(...))",
    # scikit-learn's and diffprivlib's
    "C": "l2 = 1 / (C n)",
    "bounds_X": "data_norm=the largest norm of a row, known without the data",
    "bounds_y": "target_bound=(lowest, highest), known without the data",
    # of this package, at another door
    "clip_norm": "DPSGD(clip_norm=...)",
    "epsilon": "DPSGD(...).plan(epsilon=...)",
    "delta": "DPSGD(...).plan(delta=...)",
    "noise_multiplier": "DPSGD(...).plan(noise_multiplier=...)",
    "batch_size": "DPSGD(...).plan(batch_size=...)",
    "epochs": "DPSGD(...).plan(epochs=...)",
    "physical_batch_size": "private.batches(physical_batch_size=...)",
}
FIXES = {
    "criterion": f"attach(..., loss=loss), where {LOSS_TAKES}",
    "sample_rate": "DPSGD(...).plan(batch_size=n * sample_rate): the expected number of records",
}
LEAVE_OUT = {
    "poisson_sampling": "what is accounted as sampled is sampled; DPFTRL takes fixed batches",
    "grad_sample_mode": "the cheapest exact way is chosen for each layer",
    "accountant": "plans are accounted by PLD",
    "secure_mode": "noise is cryptographic unless noise_seed is given",
    "num_microbatches": "each record is clipped by itself, and for memory there is "
    "private.batches(physical_batch_size=...)",
    "rescale_to_unit_norm": "gradients keep their scale, and a learning rate over clip_norm does "
    "the same",
    "numerical_stability_constant": 'clipping="automatic" has its own, 0.01',
    # scikit-learn's and diffprivlib's
    "max_iter": "how many steps there are is chosen with their noise; steps= says it",
    "tol": "when to stop would be read off the data; steps= says it",
    # DataLoader's
    "shuffle": "the plan's method says who takes part, and in which order",
    "drop_last": "a step takes the batch that the plan's method draws",
    **dict.fromkeys(
        ("sampler", "batch_sampler"),
        "who takes part is drawn by the plan's method, as its guarantee says; class weights that "
        "are public, in the loss, do what oversampling does",
    ),
    "generator": "who takes part is drawn from the operating system's randomness",
}
LOOP = (
    "a private training is no loader, and not several things to unpack: model and optimizer stay "
    "those that you have. Fix: with dpoptim.attach(...) as private: for batch in private.batches()"
)
ATTRIBUTES = {  # of private trainings
    "get_epsilon": "private.spent(delta).epsilon",
    "make_private": "dpoptim.attach(plan, model, optimizer, train_set)",
}
KNOWN_WORDS = {*KEYWORDS, *FIXES, *LEAVE_OUT}


def hint_of_name(name: str) -> str:
    """Addition to the error about an unknown name of the package; empty if nothing is known."""
    if name in NOT_NEEDED:
        return f" Fix: leave {name} out: {NOT_NEEDED[name]}."
    return f" Fix: what others call {name} is here {NAMES[name]}." if name in NAMES else ""


def hint_of_attribute(name: str) -> str:
    """The same of an unknown attribute of a private training."""
    return f" Fix: {ATTRIBUTES[name]}." if name in ATTRIBUTES else ""


def refuse_unknown(function: Callable[..., object], given: Iterable[str]) -> None:
    """Refuse keywords that a function does not take.

    Raises:
        TypeError: with what is to be given instead.
    """
    arguments = inspect.signature(function).parameters
    passes_on = any(a.kind is a.VAR_KEYWORD for a in arguments.values())
    for name in given:
        if name in arguments or (passes_on and name not in KNOWN_WORDS):
            continue
        raise TypeError(
            f"{function.__qualname__}() got an unexpected keyword argument {name!r}."
            f"{hint_of_keyword(name, list(arguments))}"
        )


def hint_of_keyword(name: str, known: list[str]) -> str:
    """Substitute for an unknown keyword, to a function that knows these."""
    if name in FIXES:
        return f" Fix: {FIXES[name]}."
    if name in LEAVE_OUT:
        return f" Fix: leave {name} out: {LEAVE_OUT[name]}."
    meant = KEYWORDS.get(name, "")
    argument = meant.rpartition("(")[2].partition("=")[0]
    if argument in known:
        return f" Fix: what others call {name} is here {argument}=...."
    if meant:
        return f" Fix: {name} is here {meant}."
    begun = [argument for argument in known if argument.startswith(name)]
    similar = begun or difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f" Fix: {similar[0]}=...?" if similar else ""


def refuse_other_places(
    function: Callable[..., object], args: Iterable[object], kwargs: Mapping[str, object]
) -> None:
    """Refuse arguments that are missing, or too many, with the order in which they come.

    Raises:
        TypeError: Python's, and the fix.
    """
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = [
            name if each.kind is each.POSITIONAL_OR_KEYWORD else f"{name}=..."
            for name, each in signature.parameters.items()
            if name != "self" and each.default is each.empty
        ]
        shown = ", ".join([*names, "..."])
        name = function.__qualname__.rpartition(".")[2]
        raise TypeError(f"{function.__qualname__}(): {error}. Fix: {name}({shown}).") from None


def knows_opacus(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function's error about an unknown keyword say what is to be given instead."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_unknown(function, kwargs)
        refuse_other_places(function, args, kwargs)
        return function(*args, **kwargs)

    return called


class KnowsOpacus:
    """Lets classes' errors about unknown keywords say what is to be given instead."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        refuse_unknown(cls.__init__, kwargs)
        return super().__new__(cls)
