"""From the options of ``dpoptim train`` to a plan: method, number of records and budget."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpoptim.accounting.ledger import Ledger
from dpoptim.accounting.public_numbers import usual_delta
from dpoptim.data import Data, Schema
from dpoptim.estimators.solving import option_names
from dpoptim.methods import PrivateQuantile
from dpoptim.plan import Plan
from dpoptim.planning import EpsilonAtMost
from dpoptim.recipes import Recipe, planned, recipe
from dpoptim.registry import Entry, entries, entry
from dpoptim.runs.choose_method import checked_method
from dpoptim.runs.options import TrainRequest
from dpoptim.runs.train_solver import FIND_RANGE
from dpoptim.sampling import Sampler
from dpoptim.solvers.sufficient_statistics import LARGEST

DEFAULT_EPSILON = 2.0
BUNDLED_DELTA = 1e-5
# of a number, in half widths of its bounds: these are wider than values scatter
USUAL_SQUARE = 1 / 6
SMALL_DATA = 20_000  # records; below, images are planned like tables


def plan_by_numbers(
    method: str,
    *,
    n: int,
    batch_size: int | None,
    epochs: float | None,
    steps: int | None,
    neighboring: str | None,
    setting: Sequence[str] | None = None,
    **noise: float | None,
) -> Plan:
    """Return the plan of a method at clip norm 1, without data.

    Args:
        method: a name in the registry.
        setting: of the method, each ``NAME=VALUE``; of all others it has its own.
        n, batch_size, epochs, steps: public; a solver of whole runs takes n alone.
        neighboring: None: the method's own.
        noise: ``epsilon`` and ``delta``, or ``noise_multiplier`` and ``delta``.

    Raises:
        ValueError: numbers that are missing, or that a solver does not take; or a setting that the
            method does not have.
    """
    chosen = entry(method)
    given = dict(read_setting(text) for text in setting or ())
    if chosen.solver:
        if (batch_size, epochs, steps) != (None, None, None):
            raise ValueError(
                f"method={method!r} decides for itself when to stop, and is charged as a whole. "
                "Fix: leave out batch_size, epochs and steps."
            )
        relation = {} if neighboring is None else {"neighboring": neighboring}
        settings = of_solver(chosen, given)
        return chosen.make(method, 1.0, settings).plan(n=n, **noise, **relation)
    if batch_size is None:
        raise ValueError(f"batch_size is missing: method={method!r} trains in batches.")
    settings = {"clip_norm": 1.0, **chosen.checked("--set", given)}
    return chosen.make(**settings).plan(
        n=n, batch_size=batch_size, epochs=epochs, steps=steps, neighboring=neighboring, **noise
    )


def plan_of(
    options: TrainRequest,
    records: int,
    *,
    bundled: bool,
    largest_gradient: float,
    defaults: Recipe,
    kept: str | None,
) -> Plan:
    """The plan of the options; what is not given comes from the recipe.

    Args:
        records: of the data set.
        bundled: whether it is one of the bundled, public sets.
        largest_gradient: bound on a record's gradient at norm-1 records, for solvers that clip
            relative to it.
        kept: the relation of the ledger; see `relation_kept`.

    Raises:
        ValueError: an option that is out of range, or not one of this method's.
    """
    chosen = entry(checked_method(options))
    n = records if options.n is None else options.n
    clip_norm = defaults.clip_norm if options.clip_norm is None else options.clip_norm
    budget: dict[str, Any] = {
        "epsilon": epsilon_of(options) if options.noise_multiplier is None else options.epsilon,
        "delta": delta_of(options, n, bundled),
        "noise_multiplier": options.noise_multiplier,
    }
    if chosen.solver:
        refuse_for_solver(chosen, options)
        settings = solver_options(chosen, options)
        clip = largest_gradient if options.clip_norm is None else options.clip_norm
        made = chosen.make(
            chosen.name, LARGEST[0] if chosen.name == "sufficient-statistics" else clip, settings
        )
        relation = relation_of(options, bundled, ("zero-out", "replace-one"), kept)
        refuse_other_n(n, records, relation)
        plan: Plan = made.plan(n=n, **budget, neighboring=relation)
        return plan
    bound: float | PrivateQuantile = clip_norm
    if options.clip_quantile is not None:
        bound = PrivateQuantile(options.clip_quantile, start=clip_norm)
    method = chosen.make(clip_norm=bound, **settings_of(chosen, options))
    batch_size = options.batch_size
    if batch_size is None:
        batch_size = method.batch_within(defaults.batch_size, n)
    sampler = method.sampler(n, min(batch_size, n))
    epochs = epochs_of(chosen, options, sampler, defaults)
    relation = relation_of(options, bundled, sampler.relations, kept)
    refuse_other_n(n, records, relation)
    plan = method.plan(n=n, batch_size=batch_size, epochs=epochs, **budget, neighboring=relation)
    return plan


def epsilon_of(options: TrainRequest) -> float:
    return DEFAULT_EPSILON if options.epsilon is None else options.epsilon


def delta_of(options: TrainRequest, n: int, bundled: bool) -> float:
    """The budget's delta: as given, the literature's for bundled sets, else by the public n."""
    if options.delta is not None:
        return options.delta
    return BUNDLED_DELTA if bundled else usual_delta(n)


def refuse_other_n(n: int, records: int, relation: str) -> None:
    """Refuse another number than the data's where the relation takes that as public."""
    if relation != "add-or-remove-one" and n != records:
        raise ValueError(
            f"--n {n} is not the number of records (of persons, with a person column), which "
            f"{relation}, by --neighboring or the ledger, takes as public. Fix: leave --n out."
        )


def refuse_for_solver(chosen: Entry, options: TrainRequest) -> None:
    """Refuse options that are for methods that train step by step."""
    if options.model != "softmax":
        others = ", ".join(name for name, each in entries().items() if not each.solver)
        raise ValueError(
            f"--method {chosen.name} is for --model softmax; {others} train any model."
        )
    if options.clipping != "flat":
        raise ValueError(f"--method {chosen.name} clips flat; leave out --clipping.")
    if options.clip_quantile is not None:
        raise ValueError(
            f"--method {chosen.name} keeps one clip norm all along; leave out --clip-quantile."
        )
    if options.views > 1:
        raise ValueError(f"--method {chosen.name} takes each record as it is; leave out --views.")
    of_steps = ("learning_rate", "momentum", "betas")
    if options.optimizer != "sgd" or any(getattr(options, name) is not None for name in of_steps):
        raise ValueError(
            f"--method {chosen.name} moves by steps of its own, which its settings (--set) say; "
            "leave out --optimizer, --learning-rate, --momentum and --betas."
        )
    if options.iterate != "average" or options.projection is not None:
        raise ValueError(
            f"--method {chosen.name} knows itself which iterates are good, and where they may be; "
            "leave out --iterate and --projection."
        )


def solver_options(chosen: Entry, options: TrainRequest) -> dict[str, Any]:
    """Settings of a solver by --set.

    Raises:
        ValueError: it has no such option.
    """
    if options.clip_norm is not None and "clip_norm" not in option_names(chosen.name):
        raise ValueError(
            f"--method {chosen.name} clips rows, by the schema, and no gradients; leave out "
            "--clip-norm."
        )
    return of_solver(chosen, dict(read_setting(text) for text in options.setting or ()))


def of_solver(chosen: Entry, given: dict[str, Any]) -> dict[str, Any]:
    """The settings, if the solver has all of them.

    Raises:
        ValueError: naming the one that it does not have.
    """
    known = [*(name for name in option_names(chosen.name) if name != "clip_norm"), FIND_RANGE]
    if unknown := [name for name in given if name not in known]:
        raise ValueError(
            f"--set: the method {chosen.name} has no setting {unknown[0]!r}; it has "
            f"{', '.join(known)}."
        )
    return given


def epochs_of(chosen: Entry, options: TrainRequest, sampler: Sampler, defaults: Recipe) -> float:
    """Passes over the data: whole ones where the sampler wants that."""
    if options.single_pass:
        if not sampler.whole_passes:
            raise ValueError(
                f"--method {chosen.name} needs many looks at the data; leave out --single-pass."
            )
        return 1
    epochs = defaults.epochs if options.epochs is None else options.epochs
    return math.ceil(epochs) if sampler.whole_passes else epochs


def defaults_of(options: TrainRequest, data: Data, *, bundled: bool) -> Recipe:
    """Defaults: by the plan for classifiers that are linear, by the recipe for others.

    Large image sets keep the recipe, which was found on one of 60,000 images.
    """
    n = options.n or data.units
    size = math.prod(data.x.shape[1:])
    base = recipe(options.model, n, options.features, options.views, size)
    chosen = entry(checked_method(options))
    if chosen.solver or not is_small_and_linear(options, data, n):
        return base
    delta = delta_of(options, n, bundled)
    clip_norm = usual_length(data) if options.clip_norm is None else options.clip_norm
    if not 0 < clip_norm < math.inf:
        return base  # the plan, or the method, will say what is wrong
    return planned(
        base,
        chosen.make(clip_norm=1.0, **settings_of(chosen, options)),
        n,
        (math.prod(data.x.shape[-1:] if data.persons is not None else data.x.shape[1:]) + 1)
        * data.outputs,
        EpsilonAtMost(epsilon_of(options), delta),
        clip_norm=clip_norm,
        batch_size=None if options.batch_size is None else min(options.batch_size, n),
        epochs=1.0 if options.single_pass else options.epochs,
    )


def usual_length(data: Data) -> float:
    """How long a record of a table is, with a 1 for the intercept: the clip norm by default.

    By its schema, and no record. A shorter clip norm cuts the records that a model is wrong about
    and no others: rare classes are then said to be rarer than they are. A longer one is noise.
    Other records have norms of 1 to 10, and clip norm 1.
    """
    schema = data.encoding
    if not isinstance(schema, Schema) or schema.scaling == "none":
        return 1.0
    if schema.scaling == "unit-norm":
        return math.sqrt(2)
    of_columns = (1.0 if each.kind == "category" else USUAL_SQUARE for each in schema.features)
    return float(f"{math.sqrt(1 + sum(of_columns)):.2g}")


def is_small_and_linear(options: TrainRequest, data: Data, n: int) -> bool:
    """Whether this is a linear classifier of what a plan's defaults were tried on."""
    small = data.x.ndim == 2 or n < SMALL_DATA
    linear = options.model == "softmax" and options.features is None
    return small and linear and data.target_bounds is None


def settings_of(chosen: Entry, options: TrainRequest) -> dict[str, Any]:
    """The method's own settings: --clipping, and what --set gives as JSON values or else text.

    Raises:
        ValueError: the method has no such setting.
    """
    settings: dict[str, Any] = {}
    if options.clipping != "flat":
        settings["clipping"] = str(options.clipping)
    settings.update(read_setting(text) for text in options.setting or ())
    if "clip_norm" in settings:
        raise ValueError("--set clip_norm: it is an option of its own. Fix: --clip-norm NUMBER.")
    return chosen.checked("--set", settings)


def read_setting(text: str) -> tuple[str, Any]:
    """The name and the value of one --set."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set takes NAME=VALUE, got {text!r}.")
    return name.strip().replace("-", "_"), read_value(value.strip())


def read_value(text: str) -> Any:
    """A number, true, false or null as JSON writes it; ``inf``; else the text itself."""
    if text == "inf":
        return math.inf
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def relation_kept(ledger: Path | None) -> str | None:
    """The relation of a ledger that exists; None of others."""
    if ledger is None or not ledger.exists():
        return None
    with Ledger(ledger) as opened:
        return opened.neighboring


def why_this_relation(options: TrainRequest, bundled: bool, relation: str, kept: str | None) -> str:
    """The neighbouring relation, and what it follows from, in one line; see `relation_of`."""
    if options.neighboring is not None:
        why = "as --neighboring says"
    elif kept == relation:
        why = "as the ledger counts"
    elif relation == "add-or-remove-one":
        public = "these records are public" if bundled else "--n states a public number of records"
        why = f"since {public}"
    elif options.n is None:
        why = "since no --n states a public number of records"
    else:
        why = "since this method keeps no add-or-remove-one"
    return f"{relation}, {why}"


def relation_of(
    options: TrainRequest, bundled: bool, possible: Sequence[str], kept: str | None
) -> str:
    """The relation: as named, or the ledger's, if the sampler allows it.

    Of a new ledger add-or-remove-one, if the sampler allows it and n is public, else zero-out.
    """
    if options.neighboring is not None:
        relation = str(options.neighboring)
    elif kept in possible:
        relation = str(kept)
    elif "add-or-remove-one" in possible and (options.n is not None or bundled):
        relation = "add-or-remove-one"
    else:
        relation = "zero-out"
    if relation == "add-or-remove-one" and options.n is None and not bundled:
        raise ValueError(
            "--neighboring add-or-remove-one needs --n, a public number of records: taken from the "
            "file it would be private. Give --n, or use --neighboring zero-out."
        )
    return relation
