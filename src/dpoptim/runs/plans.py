"""From the options of ``dpoptim train`` to a plan: which method, on how many records, for what budget."""

import math
from typing import Protocol

from dpoptim.clipping import Style
from dpoptim.estimators.solving import SINGLE_PASS, SOLVERS
from dpoptim.methods import DPFTRL, DPSGD, DiceSGD, WholeRun
from dpoptim.plan import Plan
from dpoptim.recipes import Recipe

LOOP_METHODS = ("dp-sgd", "dice-sgd", "dp-ftrl")
SOLVER_METHODS = tuple(name for name in SOLVERS if name not in LOOP_METHODS)
WITHOUT_SAMPLING = ("dice-sgd", "dp-ftrl", *SOLVER_METHODS)


class Options(Protocol):
    """What a plan needs of the options; None where the default is to be worked out."""

    @property
    def model(self) -> str: ...
    @property
    def method(self) -> str: ...
    @property
    def single_pass(self) -> bool: ...
    @property
    def n(self) -> int | None: ...
    @property
    def epsilon(self) -> float | None: ...
    @property
    def delta(self) -> float | None: ...
    @property
    def noise_multiplier(self) -> float | None: ...
    @property
    def neighboring(self) -> str | None: ...
    @property
    def clip_norm(self) -> float | None: ...
    @property
    def clipping(self) -> Style: ...
    @property
    def batch_size(self) -> int | None: ...
    @property
    def epochs(self) -> float | None: ...


def plan_of(options: Options, records: int, *, bundled: bool, largest_gradient: float, defaults: Recipe) -> Plan:
    """The plan of the options; what is not given comes from the recipe.

    Args:
        records: of the data set.
        bundled: whether it is one of the bundled, public sets.
        largest_gradient: bound on a record's gradient at norm-1 records, for solvers that clip relative to it.
    """
    method = single_pass_method(options)
    relation = relation_of(options, method, bundled)
    epsilon = 2.0 if options.epsilon is None and options.noise_multiplier is None else options.epsilon
    delta = 1e-5 if options.delta is None and bundled else options.delta
    n = records if options.n is None else options.n
    clip_norm = defaults.clip_norm if options.clip_norm is None else options.clip_norm
    if method in SOLVER_METHODS:
        if options.model != "softmax":
            raise ValueError(f"--method {method} is for --model softmax; {', '.join(LOOP_METHODS)} train any model.")
        solver_clip = largest_gradient if options.clip_norm is None else options.clip_norm
        return WholeRun(method, solver_clip).plan(
            n=n, epsilon=epsilon, delta=delta, noise_multiplier=options.noise_multiplier, neighboring=relation
        )
    chosen: DPSGD | DiceSGD | DPFTRL
    if method == "dp-sgd":
        chosen = DPSGD(clip_norm=clip_norm, clipping=options.clipping)
    elif method == "dice-sgd":
        chosen = DiceSGD(clip_norm=clip_norm, clipping=options.clipping)
    else:
        chosen = DPFTRL(clip_norm=clip_norm, clipping=options.clipping)
    epochs = defaults.epochs if options.epochs is None else options.epochs
    if options.single_pass:
        epochs = 1
    elif method != "dp-sgd":
        epochs = math.ceil(epochs)
    return chosen.plan(
        n=n,
        batch_size=min(defaults.batch_size, n) if options.batch_size is None else options.batch_size,
        epochs=epochs,
        epsilon=epsilon,
        delta=delta,
        noise_multiplier=options.noise_multiplier,
        neighboring=relation,
    )


def single_pass_method(options: Options) -> str:
    """The method, checked against --single-pass: by default accelerated SRGD where the model is linear."""
    if not options.single_pass:
        return options.method
    if options.epochs not in (None, 1):
        raise ValueError(f"--single-pass sees every record once; leave out --epochs {options.epochs:g}.")
    if options.method == "dp-sgd":
        return "accelerated-srgd" if options.model == "softmax" else "dp-ftrl"
    if options.method not in (*SINGLE_PASS, "dp-ftrl", "dice-sgd"):
        raise ValueError(f"--method {options.method} needs many looks at the data; leave out --single-pass.")
    return options.method


def relation_of(options: Options, method: str, bundled: bool) -> str:
    if options.neighboring is not None:
        relation = options.neighboring
    elif method in WITHOUT_SAMPLING:
        relation = "zero-out"
    else:
        relation = "add-or-remove-one" if options.n is not None or bundled else "zero-out"
    if relation == "add-or-remove-one" and options.n is None and not bundled:
        raise ValueError(
            "--neighboring add-or-remove-one needs --n, a public number of records: taken from the file it would be "
            "private. Give --n, or use --neighboring zero-out."
        )
    return relation
