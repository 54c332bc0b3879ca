"""Persons divided or batched by where their rows stand, which whoever replaces one changes."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from dpoptim.estimators import linear_fit
from dpoptim.noise.stream import KeyStream
from dpoptim.training import prepared
from dpoptim.tuning.search import DPSearchCV


def parts_by_public_coins() -> AbstractContextManager[Any]:
    return patch.object(DPSearchCV, "_coins", lambda *_: KeyStream.from_seed(0, "public parts"))


@contextmanager
def single_passes_in_the_tables_order() -> Iterator[None]:
    honest = linear_fit.of_persons

    def in_order(*args: Any, **options: Any) -> Any:
        return honest(*args, **{**options, "in_order": False})

    with patch.object(linear_fit, "of_persons", in_order):
        yield


def given_order_of_persons_served() -> AbstractContextManager[Any]:
    return patch.object(prepared, "refuse_places_of_persons", lambda *_, **__: None)
