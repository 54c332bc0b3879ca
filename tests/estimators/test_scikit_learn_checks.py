"""scikit-learn's own checks, of everything public that has its manners, and which of them cannot
hold where records are protected.
"""

from typing import Any

import pytest
from sklearn.base import BaseEstimator
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import parametrize_with_checks

from dpoptim import estimators, preprocessing, tuning
from dpoptim.estimators import (
    DPLinearRegression,
    DPLogisticRegression,
    DPSGDClassifier,
    DPSGDRegressor,
)
from dpoptim.preprocessing import (
    DPClassCounts,
    DPImputer,
    DPMinMaxScaler,
    DPOneHot,
    DPStandardScaler,
    PrivatePipeline,
)
from dpoptim.tuning import DPSearchCV

# scikit-learn's toy tables have a few dozen records, so epsilon is large
SEEDED: Any = {"delta": 1e-3, "noise_seed": 0}
FIT: Any = {"epsilon": 1e4, **SEEDED}
STEP: Any = {"lower": -100, "upper": 100, "epsilon": 1e3, **SEEDED}
SEARCH: Any = {"param_grid": {"l2": [0.0]}, "epsilon": 300.0, "mean_trials": 2, **SEEDED}


def piped(last: Any) -> PrivatePipeline:
    steps = [("scale", DPStandardScaler(-100, 100, noise_seed=0)), ("model", last)]
    return PrivatePipeline(steps, epsilon=1e4, delta=1e-3)


CHECKED = [
    DPLogisticRegression(**FIT),
    DPSGDClassifier(**FIT, random_state=0, epochs=10, learning_rate=1.5),
    DPStandardScaler(**STEP),
    DPStandardScaler(**STEP, with_mean=False),
    DPImputer(**STEP),
    DPMinMaxScaler(-100, 100),
    DPMinMaxScaler(**STEP, quantile=0.1),
    DPOneHot(epsilon=1e3, **SEEDED),
    DPOneHot(epsilon=1e3, **SEEDED, sparse_output=True),
]
ALIKE = [  # share their code with one above, or hand most of it on to what is around
    DPLinearRegression(**FIT, target_bound=500.0),
    DPSGDRegressor(**FIT, random_state=0, epochs=20, learning_rate=2.0, target_bound=10.0),
    piped(DPLogisticRegression(noise_seed=0)),
    DPSearchCV(DPLogisticRegression(), **SEARCH),
]
AROUND_ANOTHER = [  # what is around them is checked around DPLogisticRegression, and they alone
    piped(DPLinearRegression(noise_seed=0, target_bound=100.0)),
    DPSearchCV(DPLinearRegression(target_bound=500.0), **SEARCH),
]

REPEATED = (
    "a repeated row is a record of its own, with a bound and noise of its own; a weight is not"
)
OF_WEIGHTS = {
    "check_sample_weight_equivalence_on_dense_data": REPEATED,
    "check_sample_weight_equivalence_on_sparse_data": REPEATED,
    "check_all_zero_sample_weights_error": "an error would tell whether one record's weight is 0",
}
GIVEN_STEPS = "as scikit-learn's own, a pipeline fits the very steps that it was given"
ANY_TEXT = "any value with a text is a category, or none of them"
EXPECTED_FAILURES: dict[type, dict[str, str]] = {
    **dict.fromkeys(
        (DPLogisticRegression, DPLinearRegression, DPSGDClassifier, DPSGDRegressor, DPSearchCV),
        OF_WEIGHTS,
    ),
    PrivatePipeline: {
        "check_estimators_overwrite_params": GIVEN_STEPS,
        "check_dont_overwrite_parameters": GIVEN_STEPS,
    },
    DPOneHot: {"check_complex_data": ANY_TEXT, "check_dtype_object": ANY_TEXT},
}


def expected_failures(estimator: Any) -> dict[str, str]:
    return EXPECTED_FAILURES.get(type(estimator), {})


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(CHECKED, expected_failed_checks=expected_failures)
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def some_checks(*, of_their_own: bool) -> pytest.MarkDecorator:
    """Of numbers as labels, parameters, clones and what `fit` leaves, which each class of `ALIKE`
    has of its own; or the others.
    """
    words = ("regress", "param", "clone", "init", "fit_return", "overwrite", "pickle", "n_features")
    checks = parametrize_with_checks(ALIKE, expected_failed_checks=expected_failures)
    names, cases = checks.args

    def named(case: Any) -> bool:
        check = getattr(case, "values", case)[1].func.__name__
        return any(word in check for word in words)

    cases = [case for case in cases if named(case) == of_their_own]
    return pytest.mark.parametrize(names, cases, **checks.kwargs)


@pytest.mark.filterwarnings("ignore")
@some_checks(of_their_own=True)
def test_scikit_learns_checks_of_what_is_their_own(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.variants
@pytest.mark.filterwarnings("ignore")
@some_checks(of_their_own=False)
def test_scikit_learns_other_checks(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.variants
@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(AROUND_ANOTHER, expected_failed_checks=expected_failures)
def test_scikit_learns_own_checks_around_another_model(estimator: Any, check: Any) -> None:
    check(estimator)


def test_everything_that_takes_a_table_is_checked() -> None:
    public = [getattr(m, name) for m in (estimators, preprocessing, tuning) for name in m.__all__]
    learn = {it for it in public if isinstance(it, type) and issubclass(it, BaseEstimator)}
    assert learn - {type(one) for one in CHECKED + ALIKE} == {DPClassCounts}
    assert not get_tags(DPClassCounts()).input_tags.two_d_array  # labels alone, as LabelEncoder's
