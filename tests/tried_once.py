"""Models are tried once, in tests that attach many of a kind and look at what they lead to."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from dpoptim.training import prepared


@contextmanager
def models_tried_once(found: dict[Hashable, Any], *kind: Hashable) -> Iterator[None]:
    """How the records of a model are kept apart is as in ``found``, or put there.

    Ranks try models together: all have to find the same ones, in the same order.

    Args:
        kind: of the model, beside its layers' text.
    """
    honest = prepared.choose_isolation

    def remembered(model: Any, rows: Any, choice: Any, axis: Any, *rest: Any, **more: Any) -> Any:
        key = kind, str(model), choice, axis
        if key not in found:
            found[key] = honest(model, rows, choice, axis, *rest, **more)
        return found[key]

    with patch.object(prepared, "choose_isolation", remembered):
        yield
