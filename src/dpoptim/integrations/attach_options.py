"""Arguments of `dpoptim.attach` that a trainer takes, and hands on as they are."""

import inspect
from collections.abc import Mapping
from typing import Any

from dpoptim.training.attach import attach


def options_of_attach() -> list[str]:
    """Names of the keyword arguments of `attach`."""
    arguments = inspect.signature(attach).parameters.values()
    return [each.name for each in arguments if each.kind is each.KEYWORD_ONLY]


def take_options(owner: type, own: Mapping[str, str], given: dict[str, Any]) -> dict[str, Any]:
    """Take the arguments of `attach` out of a trainer's keywords.

    Args:
        own: names that `attach` takes, and this trainer does not, with the fix.
        given: keywords; those of `attach` are removed.

    Raises:
        TypeError: one of ``own``.
    """
    for name in own:
        if name in given:
            raise TypeError(f"{owner.__name__}() takes no {name}. Fix: {own[name]}.")
    return {name: given.pop(name) for name in options_of_attach() if name in given}


def refuse_rows_twice(options: Mapping[str, Any], rows: int) -> None:
    """Refuse persons, or other rows, of records that are several rows of a batch already.

    Args:
        rows: of a batch, that the trainer makes of a record.
    """
    named = [name for name in ("persons", "rows_per_record") if options.get(name) is not None]
    if rows > 1 and named:
        raise ValueError(
            f"{named[0]}: this trainer makes several rows of a batch of each record, which are "
            f"clipped as one, and has no place for it. Fix: leave it out; give each person one "
            "record, if anybody has several."
        )
