"""Steps within pipelines and what else holds transformers: which learn, and how they are counted.

A pipeline states what everything that it fits has cost. So each fit within it must be one that it
pays for, made here and now: not by a transformer of others, from a cache, or in another process.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from numbers import Real
from typing import Any

from sklearn import config_context
from sklearn.base import BaseEstimator, clone
from sklearn.frozen import FrozenEstimator
from sklearn.pipeline import Pipeline

from dpoptim.accounting.guarantee import SEEDED
from dpoptim.arguments import real_number
from dpoptim.estimators.repeats import ALONE, ON_TRUST, RESTATED, CountsFits
from dpoptim.preprocessing.private_step import PrivateStep

EPSILON = "epsilon"
_parts: ContextVar[bool] = ContextVar("parts", default=False)
ANY_SHARE = 2.0  # of entries that are not 0: more than all, which scikit-learn would refuse


def private_steps(found: Any) -> Iterator[PrivateStep]:
    """Every transformer that learns privately, within pipelines and the like, fitted clones too."""
    if isinstance(found, PrivateStep):
        yield found
        return
    if isinstance(found, BaseEstimator):
        found = vars(found)
    if isinstance(found, Mapping):
        found = list(found.values())
    if isinstance(found, list | tuple):
        for each in found:
            yield from private_steps(each)


def charged_steps(pipeline: Pipeline) -> dict[str, PrivateStep]:
    """The transformers before the last step that pay for what they learn, by name.

    Raises:
        ValueError: something else of this library learns within a step, or a cache may stand for a
            fit.
    """
    fitted, last = settings_within(pipeline), pipeline.steps[-1][0]
    refuse_other_learners(fitted, last=last)
    charged = {
        name: step
        for name, step in fitted.items()
        if isinstance(step, PrivateStep) and step.charged and name != last
    }
    cached = [name for name, value in fitted.items() if is_named(name, "memory") and value]
    if charged and cached:
        raise ValueError(
            f"{cached[0]}: what step {next(iter(charged))!r} learnt may come from the cache, and "
            "its price would be missing in privacy_; nor are records in a cache protected. Fix: "
            f"{cached[0]}=None."
        )
    return charged


def settings_within(pipeline: Pipeline) -> dict[str, Any]:
    """Steps, and settings of all of them, by name; less what is frozen and never fitted."""
    everything = pipeline.get_params(deep=True)
    return {
        name: value
        for name, value in everything.items()
        if not isinstance(everything.get(name.rpartition("__")[0]), FrozenEstimator)
    }


def refuse_other_learners(steps: Mapping[str, Any], *, last: str) -> None:
    """Refuse estimators of this library within steps; a ValueError. Args: last: step's name."""
    for name, step in steps.items():
        if name == last or name.startswith(f"{last}__"):
            continue
        if isinstance(step, CountsFits) and not isinstance(step, PrivateStep | Pipeline):
            raise ValueError(
                f"step {name!r}, a {type(step).__name__}, would learn from the records, and is "
                "none of the transformers that share the budget. Fix: fit it by itself, on a "
                "ledger that both name, and give sklearn.frozen.FrozenEstimator(fitted)."
            )


def shares_as_given(
    given: Mapping[str, Any], charged: Mapping[str, PrivateStep]
) -> dict[str, float]:
    """Shares of a budget by step.

    Raises:
        ValueError: they are not of the charged steps, not in (0, 1), nothing is left for the last
            step, or one transformer has two.
    """
    if set(given) != set(charged):
        raise ValueError(
            f"shares must name the charged steps {sorted(charged)}, got {sorted(given)}."
        )
    shares = {name: real_number("shares", share) for name, share in given.items()}
    if not all(share > 0 for share in shares.values()) or sum(shares.values()) >= 1:
        raise ValueError(
            "shares must be above 0, and less than 1 together: the rest is for the last step."
        )
    of_objects = {(id(charged[name]), share) for name, share in shares.items()}
    if len(of_objects) > len({step for step, _ in of_objects}):
        raise ValueError(
            "shares must be the same for one transformer under two names. Fix: clone it, for a "
            "step of its own."
        )
    return shares


@contextmanager
def as_parts(pipeline: Pipeline) -> Iterator[None]:
    """Fit all steps one after the other meanwhile, whatever ``n_jobs`` they have.

    Elsewhere a ledger in memory is out of reach, and nobody knows that steps are only tried. Inner
    pipelines have no ``epsilon`` meanwhile, and so fit their steps by the budgets these have here.

    **Guarantee.** Whether a `ColumnTransformer` gives a sparse table, which it keeps, depends on
    which of its steps do and on ``sparse_threshold``, 0 or not, and not on how many entries are 0,
    as there it would.
    """
    held = settings_within(pipeline)
    given: dict[str, Any] = {
        name: value for name, value in held.items() if is_named(name, "n_jobs")
    }
    thresholds: dict[str, Any] = {
        name: value
        for name, value in held.items()
        if is_named(name, "sparse_threshold") and isinstance(value, Real) and 0 < float(value) <= 1
    }
    inner = {
        f"{name}__{EPSILON}": getattr(step, EPSILON)
        for name, step in held.items()
        if isinstance(step, Pipeline) and hasattr(step, EPSILON)
    }
    pipeline.set_params(
        **dict.fromkeys(given, 1), **dict.fromkeys(inner), **dict.fromkeys(thresholds, ANY_SHARE)
    )
    token = _parts.set(True)
    try:
        with config_context(skip_parameter_validation=True) if thresholds else nullcontext():
            yield
    finally:
        _parts.reset(token)
        pipeline.set_params(**given, **inner, **thresholds)


def is_part(pipeline: Any) -> bool:
    """Whether another pipeline fits this one, and has given its steps their budgets."""
    return _parts.get() and pipeline.epsilon is None


def is_named(name: str, setting: str) -> bool:
    """Whether a name among ``get_params`` is that of this setting, of any step."""
    return name.rpartition("__")[2] == setting


def steps_with(epsilons: Mapping[str, float], pipeline: Pipeline) -> list[tuple[Any, float]]:
    """The steps of these names, with their budgets."""
    steps = pipeline.get_params(deep=True)
    return [(steps[name], epsilon) for name, epsilon in epsilons.items()]


def with_state(estimator: Any) -> Any:
    """A clone that goes on from what the estimator has learnt, if it would."""
    made, of = clone(estimator), estimator.get_params(deep=False)
    made.__dict__ |= {name: x for name, x in vars(estimator).items() if name not in of}
    return made


def own_notes(estimator: Any) -> tuple[str, ...]:
    """Notes of a step's guarantee, but for its scope and budget: the pipeline's count."""
    return tuple(
        note
        for note in (() if estimator.privacy_ is None else estimator.privacy_.notes)
        if not note.startswith(("all ", "epsilon ", "delta ", RESTATED))
        and note not in (ALONE, ON_TRUST)
    )


def seeded_notes(pipeline: Any) -> tuple[str, ...]:
    """The note that noise is repeatable, if that of any private step is."""
    seeds = (getattr(step, "noise_seed", None) for step in private_steps(pipeline))
    return (SEEDED,) if any(seed is not None for seed in seeds) else ()
