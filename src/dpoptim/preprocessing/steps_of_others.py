"""Transformers of other libraries in a pipeline that is private: those that learn are refused.

A pipeline calls ``fit`` of each of its steps on the private records. What a step learns there
would be released with the pipeline, and move every row that the next step sees, by no bound.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.compose import ColumnTransformer, make_column_selector
from sklearn.feature_selection import SelectFromModel
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.pipeline import FeatureUnion, Pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    OneHotEncoder,
    OrdinalEncoder,
    PolynomialFeatures,
)
from sklearn.utils import get_tags

HASHED = "HashingVectorizer, which learns nothing"
LISTED = "with a list of categories and handle_unknown={!r}"
INSTEAD = {  # what does the same, by the name of what learns
    "StandardScaler": "DPStandardScaler(lower=, upper=)",
    "RobustScaler": "DPStandardScaler(lower=, upper=)",
    "MinMaxScaler": "DPMinMaxScaler(lower=, upper=)",
    "MaxAbsScaler": "DPMinMaxScaler(lower=, upper=)",
    "SimpleImputer": "DPImputer(lower=, upper=), or it with strategy='constant', "
    "keep_empty_features=True (a column without any value is kept) and add_indicator=False",
    "OneHotEncoder": f"DPOneHot(categories), or it {LISTED.format('ignore')}",
    "OrdinalEncoder": f"DPOneHot(categories), or it {LISTED.format('use_encoded_value')}",
    "TargetEncoder": "DPOneHot(categories)",
    "CountVectorizer": HASHED,
    "TfidfVectorizer": HASHED,
    "TfidfTransformer": "HashingVectorizer alone",
}


HOLDERS = (Pipeline, FeatureUnion, ColumnTransformer)


def has_public_categories(step: Any) -> bool:
    unknown = "ignore" if type(step) is OneHotEncoder else "use_encoded_value"
    return (
        not isinstance(step.categories, str)
        and step.handle_unknown == unknown
        and step.min_frequency is None
        and step.max_categories is None
    )


def fills_by_a_constant(step: Any) -> bool:
    # else a column in which all values are missing would be left out
    return step.strategy == "constant" and step.keep_empty_features and not step.add_indicator


# By these settings what ``fit`` keeps depends on columns and settings alone. Types as they are:
# one derived from them may learn.
BY_SETTINGS: dict[type, Callable[[Any], bool]] = {
    OneHotEncoder: has_public_categories,
    OrdinalEncoder: has_public_categories,
    PolynomialFeatures: lambda step: True,
    SelectFromModel: lambda step: isinstance(step.estimator, FrozenEstimator),
    SimpleImputer: fills_by_a_constant,
}


def steps_of_others(name: str, step: Any) -> Iterator[tuple[str, Any]]:
    """Steps that are fitted and not of this library, by name, in whatever holds them.

    So are functions that choose the columns of one.
    """
    if isinstance(step, Pipeline | FeatureUnion | ColumnTransformer):
        for inner, each in parts_of(step):
            yield from steps_of_others(f"{name}__{inner}", each)
        if type(step) in HOLDERS or is_own(step):
            return  # one derived from them may learn by itself
    fits = hasattr(step, "fit") or hasattr(step, "fit_transform")
    if chooses_columns(step) or (fits and not is_own(step)):
        yield name, step


def is_own(step: Any) -> bool:
    """Whether it is this library's: a class that is derived from one of these may learn."""
    return type(step).__module__.split(".")[0] == "dpoptim"


def chooses_columns(part: Any) -> bool:
    """Whether it is a function that may look at records; scikit-learn's may go by names alone."""
    by_names = type(part) is make_column_selector and (
        part.dtype_include is None and part.dtype_exclude is None  # types follow what is missing
    )
    fits = hasattr(part, "fit") or hasattr(part, "fit_transform")
    return callable(part) and not fits and not by_names


def parts_of(step: Pipeline | FeatureUnion | ColumnTransformer) -> list[tuple[str, Any]]:
    """Everything that is called on a table, by name."""
    if isinstance(step, ColumnTransformer):
        called = [(name, each) for name, *both in step.transformers for each in both]
        return [*called, ("remainder", step.remainder)]
    return list(step.steps if isinstance(step, Pipeline) else step.transformer_list)


def notes_on_others(steps: list[tuple[str, Any]]) -> list[str]:
    """Notes on trust in the steps before the last one.

    Raises:
        ValueError: one of them would learn from the records; naming what to use instead.
    """
    return [
        note
        for each in steps
        for name, step in steps_of_others(*each)
        for note in note_on(name, step)
    ]


def note_on(name: str, step: Any) -> Iterator[str]:
    """Notes on trust in one step; ValueError if it would learn."""
    kind = type(step).__name__
    if chooses_columns(step):
        yield f"on trust: the function that chooses columns for {name} looks at no record"
    elif isinstance(step, FrozenEstimator):
        inner = type(step.estimator).__name__
        also = ", or its own guarantee, which adds to this one, is stated beside it"
        own = also if is_own(step.estimator) else ""
        yield f"on trust: the frozen {inner} was not fitted to these records{own}"
    elif (learns_not := BY_SETTINGS.get(type(step))) is not None and learns_not(step):
        if isinstance(step, SelectFromModel):
            yield from note_on(name, step.estimator)
    elif not isinstance(step, BaseEstimator) or get_tags(step).requires_fit:
        raise ValueError(refusal(name, kind, step))
    elif type(step) is FunctionTransformer:
        if not is_elementwise(step.func):
            yield f"on trust: the function of {kind} treats each row by itself"
    elif type(step) in HOLDERS or not type(step).__module__.startswith("sklearn."):
        yield f"on trust: {kind} treats each row by itself, and needs no fit, as its tags say"


def is_elementwise(function: Any) -> bool:
    """Whether it can mix no rows: none, or one of NumPy's, of one argument."""
    if function is None:
        return True
    known = getattr(np, getattr(function, "__name__", ""), None) is function
    one = isinstance(function, np.ufunc) and function.nargs == 2 and function.signature is None
    return known and one


def refusal(name: str, kind: str, step: Any) -> str:
    of_scikit_learn = type(step).__module__.startswith("sklearn.")
    instead = [INSTEAD[kind]] if of_scikit_learn and kind in INSTEAD else []
    frozen = "fit it on public data, and give sklearn.frozen.FrozenEstimator(fitted)"
    declared = (
        "if its fit learns nothing, derive it from sklearn's BaseEstimator, and let its tags say "
        "requires_fit=False"
    )
    fixes = "; or ".join([*instead, frozen, *([] if of_scikit_learn else [declared])])
    return (
        f"step {name!r}, a {kind}, would learn from the private records as the pipeline fits it, "
        f"and nothing would protect what it learns. Fix: {fixes}."
    )
