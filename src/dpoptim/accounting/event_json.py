"""Privacy events as JSON.

An event says what a mechanism released (`dp_accounting.DpEvent`); plans, checkpoints and the
ledger keep events, never epsilons, so that a stored run can be evaluated again by a better
accountant. Only the events that this library charges have a JSON form.
"""

import json
import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

import dp_accounting as dp
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from dpoptim.accounting.balls_in_bins import BallsInBinsDpEvent
from dpoptim.accounting.min_separation import MinSeparationDpEvent


class _Codec(NamedTuple):
    """How one field travels: to a JSON value and back."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"expected a finite number, got {value!r}")
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
        raise ValueError(f"expected an integer >= 0, got {value!r}")
    return int(value)


def _events(data: Any) -> list[dp.DpEvent]:
    # the value of a field is wrong, as for a number: ValueError throughout
    if not isinstance(data, list):
        raise ValueError(f"expected a list of events, got {data!r}")
    return [event_from_json(item) for item in data]


def _numbers(value: Any) -> list[float]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"expected a list of numbers, got {value!r}")
    return [_number(each) for each in value]


def _counts(value: Any) -> list[int]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"expected a list of whole numbers, got {value!r}")
    return [_count(each) for each in value]


def event_to_json(event: dp.DpEvent) -> dict[str, Any]:
    """The event as a dictionary for `json.dumps`; `event_from_json` gives an equal event back.

    Args:
        event: any that this package makes.

    Returns:
        a dictionary of numbers, texts, lists and dictionaries.

    Raises:
        TypeError: an event without a JSON form.
        ValueError: a field that is not a finite number (or, for a count, not an integer >= 0).

    Examples:
        >>> import dp_accounting as dp
        >>> from dpoptim.accounting import event_from_json, event_to_json
        >>> event = dp.GaussianDpEvent(2.0)
        >>> event_from_json(event_to_json(event)) == event
        True
    """
    name = _NAME_OF.get(type(event))
    if name is None:
        raise TypeError(
            f"event: {type(event).__name__} has no JSON form; use one of "
            + ", ".join(sorted(cls.__name__ for cls in _NAME_OF))
        )
    _, fields = _FORMAT[name]
    return {
        "type": name,
        **{
            field: _apply(codec.encode, getattr(event, field), name, field)
            for field, codec in fields.items()
        },
    }


def event_from_json(data: Mapping[str, Any]) -> dp.DpEvent:
    """The event that `event_to_json` wrote.

    Args:
        data: as `json.loads` gives it.

    Returns:
        an event equal to the one that was written.

    Raises:
        TypeError: ``data`` is no mapping, or its "type" is unknown.
        ValueError: a missing, surplus or malformed field: a stored charge is never guessed at.

    Examples:
        >>> from dpoptim.accounting import event_from_json
        >>> event_from_json({"type": "Gaussian", "noise_multiplier": 2.0})
        GaussianDpEvent(noise_multiplier=2.0)
    """
    if not isinstance(data, Mapping):
        raise TypeError(f"data: expected an event as a JSON object, got {data!r}")
    name = data.get("type")
    if not isinstance(name, str) or name not in _FORMAT:
        raise TypeError(
            f"data: unknown event type {name!r}; known types are {', '.join(sorted(_FORMAT))}"
        )
    cls, fields = _FORMAT[name]
    if data.keys() != {"type", *fields}:
        raise ValueError(
            f"data: {name} has the fields {sorted(fields)}, got {sorted(data.keys() - {'type'})}"
        )
    return cls(
        **{field: _apply(codec.decode, data[field], name, field) for field, codec in fields.items()}
    )


def event_text(event: dp.DpEvent) -> str:
    """The event's stored form; equal texts are equal events."""
    return json.dumps(event_to_json(event), sort_keys=True)


def _apply(convert: Callable[[Any], Any], value: Any, name: str, field: str) -> Any:
    try:
        return convert(value)
    except ValueError as error:
        raise ValueError(f"{name}.{field}: {error}") from None


_NUMBER = _Codec(_number, _number)
_NUMBERS = _Codec(_numbers, lambda value: tuple(_numbers(value)))
_COUNT = _Codec(_count, _count)
_COUNTS = _Codec(_counts, lambda value: tuple(_counts(value)))
_EVENT = _Codec(event_to_json, event_from_json)
_EVENTS = _Codec(lambda events: [event_to_json(event) for event in events], _events)

# The whole format: the name in JSON, the class, and its fields in the order of its constructor.
_FORMAT: dict[str, tuple[type[dp.DpEvent], dict[str, _Codec]]] = {
    "NoOp": (dp.NoOpDpEvent, {}),
    "Gaussian": (dp.GaussianDpEvent, {"noise_multiplier": _NUMBER}),
    "Laplace": (dp.LaplaceDpEvent, {"noise_multiplier": _NUMBER}),
    "ZCDp": (dp.ZCDpEvent, {"rho": _NUMBER, "xi": _NUMBER}),
    "PoissonSampled": (
        dp.PoissonSampledDpEvent,
        {"sampling_probability": _NUMBER, "event": _EVENT},
    ),
    "SampledWithoutReplacement": (
        dp.SampledWithoutReplacementDpEvent,
        {"source_dataset_size": _COUNT, "sample_size": _COUNT, "event": _EVENT},
    ),
    "TruncatedSubsampledGaussian": (
        dp.TruncatedSubsampledGaussianDpEvent,
        {
            "dataset_size": _COUNT,
            "sampling_probability": _NUMBER,
            "truncated_batch_size": _COUNT,
            "noise_multiplier": _NUMBER,
        },
    ),
    "BallsInBins": (
        BallsInBinsDpEvent,
        {"noise_multiplier": _NUMBER, "gram": _NUMBERS, "samples": _COUNT},
    ),
    "MinSeparation": (
        MinSeparationDpEvent,
        {
            "noise_multiplier": _NUMBER,
            "column": _NUMBERS,
            "levels": _NUMBERS,
            "lengths": _COUNTS,
            "rate": _NUMBER,
            "separation": _COUNT,
            "samples": _COUNT,
        },
    ),
    "SelfComposed": (dp.SelfComposedDpEvent, {"event": _EVENT, "count": _COUNT}),
    "Composed": (dp.ComposedDpEvent, {"events": _EVENTS}),
    "RepeatAndSelect": (
        RepeatAndSelectDpEvent,
        {"event": _EVENT, "mean": _NUMBER, "shape": _NUMBER},
    ),
}
_NAME_OF = {cls: name for name, (cls, _) in _FORMAT.items()}
