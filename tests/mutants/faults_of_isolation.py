"""Seeded bugs in what keeps records apart, and what they write inside."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from dpoptim.gradients.values import Values
from dpoptim.training import loss_check


@contextmanager
def values_unseen() -> Iterator[None]:
    """As `_version` saw it: writes through ``.data`` leave no trace."""
    with patch.object(Values, "changed", lambda self: None):
        yield


@contextmanager
def padding_unseen() -> Iterator[None]:
    """Records are compared in the company of records as long as they are."""
    honest = loss_check.compare

    def compare(program: object, records: object) -> object:
        return honest(program, [next(iter(records))] * 2)  # type: ignore[arg-type,call-overload]

    with (
        patch.object(loss_check, "with_padding", lambda records, *, sequences: iter(())),
        patch.object(loss_check, "compare", compare),
    ):
        yield
