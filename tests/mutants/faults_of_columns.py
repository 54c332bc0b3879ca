"""Privacy bugs of raw columns, put into this library for as long as a ``with`` lasts: values,
labels and owners. For testing detectors only.
"""

import csv
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from dpoptim.data import encoding, numbers, table_files
from dpoptim.missing_values import is_missing
from dpoptim.preprocessing import one_hot
from dpoptim.preprocessing.one_hot import DPOneHot
from dpoptim.training import hold_out_scores
from dpoptim.training.batches import privacy_units
from dpoptim.training.batches.privacy_units import Persons


@contextmanager
def values_as_their_column_holds_them() -> Iterator[None]:
    """1, 1.0 and "1.0" are three categories, so a word in a column moves all numbers of it."""
    with patch.object(one_hot, "text_of", str):
        yield


@contextmanager
def labels_as_their_column_holds_them() -> Iterator[None]:
    """A word among labels makes text of all of them, which are in no class then."""
    with patch.object(numbers, "label_text", lambda label: label):
        yield


@contextmanager
def texts_up_to_the_next_quotation_mark() -> Iterator[None]:
    """A stray quotation mark takes the records with it that follow, up to the next one."""

    def reader(lines: Any, delimiter: str, strict: bool) -> Any:
        return csv.reader(lines, delimiter=delimiter)

    anything = re.compile(".*", re.DOTALL)
    with (
        patch.object(table_files, "csv", SimpleNamespace(**vars(csv) | {"reader": reader})),
        patch.object(table_files, "whole_record", lambda separator: anything),
    ):
        yield


@contextmanager
def categories_that_occur_added() -> Iterator[None]:
    """Values beyond the public categories become columns of their own."""
    honest = DPOneHot.fit

    def fit(step: DPOneHot, x: Any, y: Any = None) -> Any:
        honest(step, x, y)
        found = step._columns(x, reset=False)
        for place, known in enumerate(step.categories_):
            known += sorted(set(found[:, place]) - {one_hot.text_of(name) for name in known})
        return step

    with patch.object(DPOneHot, "fit", fit):
        yield


@contextmanager
def unknown_values_in_all_categories() -> Iterator[None]:
    """A value that is no category has a one in each column, instead of in none."""
    honest = DPOneHot.transform

    def transform(step: DPOneHot, x: Any) -> Any:
        made = honest(step, x)
        made[~made.any(1)] = step.scale
        return made

    with patch.object(DPOneHot, "transform", transform):
        yield


def nobodys_rows_taken() -> AbstractContextManager[Any]:
    """Rows whose owner is an empty text or NA are one person's."""
    return patch.object(privacy_units, "is_missing", lambda name: False)


def nobodys_rows_of_tables_taken() -> AbstractContextManager[Any]:
    """Rows of a file without a person are one person's."""
    return patch.object(encoding, "is_missing", lambda name: False)


def nobodys_rows_of_hold_outs_taken() -> AbstractContextManager[Any]:
    """Rows of a hold-out without an owner are one person's, whose first one counts."""

    class Named(Persons):
        @classmethod
        def of(cls, owners: Any, rows: int, most: int, data: str = "train_set") -> Persons:
            known = ["nobody" if is_missing(str(name)) else name for name in owners]
            return Persons.of(np.array(known), rows, most, data)

    return patch.object(hold_out_scores, "Persons", Named)
