"""Privacy bugs of what estimators hold beside released numbers. For testing detectors only."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from dpoptim.estimators import atomic_fits
from dpoptim.preprocessing import pipeline, steps_within


def what_a_refused_fit_read_kept() -> AbstractContextManager[Any]:
    """Labels of a table whose fit was refused are the estimator's classes."""
    return patch.object(atomic_fits, "as_before_where_it_fails", nullcontext)


def tables_sparse_by_their_entries() -> AbstractContextManager[Any]:
    """A share of entries beside 0, which nobody paid for, decides whether a table is sparse."""
    honest = steps_within.is_named

    def is_named(name: str, setting: str) -> bool:
        return setting != "sparse_threshold" and honest(name, setting)

    return patch.object(steps_within, "is_named", is_named)


def steps_of_others_that_learn_let_go() -> AbstractContextManager[Any]:
    """What scikit-learn's transformers learn from private records is released with a pipeline."""
    return patch.object(pipeline, "notes_on_others", lambda steps: [])
