"""Values of a schema's entries: bounds, and lists of texts."""

from dpoptim.arguments import real_number
from dpoptim.data.dates import day_number

FILL_IN = "FILL-IN"  # what a draft holds where only its owner knows


def missing_bounds(name: str, kind: str) -> str:
    example = "[2020-01-01, 2024-12-31]" if kind == "date" else "[0, 120]"
    return (
        f"schema: column {name!r} has no bounds. Fix: write its lowest and highest possible "
        "value, as is publicly known, "
        f'such as bounds = {example}; or kind = "drop".'
    )


def bounds_of(name: str, kind: str, value: object) -> tuple[float, float]:
    if FILL_IN in (value if isinstance(value, list) else [value]):
        raise ValueError(missing_bounds(name, kind))
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(
            f"schema: column {name!r}: bounds must be [lowest, highest], got {value!r}."
        )
    read = day_number if kind == "date" else real_number
    low, high = (read(f"schema: column {name!r}: a bound", each) for each in value)
    if not -1e30 < low < high < 1e30:  # squares and differences stay finite
        raise ValueError(
            f"schema: column {name!r}: bounds must be two finite numbers, or dates, the lower "
            f"first, got {value!r}."
        )
    return low, high


def texts_of(name: str, entry: str, value: object) -> tuple[str, ...]:
    """A list of texts, or of whole numbers as text."""
    if FILL_IN in (value if isinstance(value, list) else [value]):
        raise ValueError(
            f'schema: column {name!r}: fill in its {entry}, a public list such as ["no", "yes"].'
        )
    plain = isinstance(value, list) and all(
        isinstance(each, str | int) and not isinstance(each, bool) for each in value
    )
    if not plain:
        raise ValueError(
            f"schema: column {name!r}: {entry} must be a list of texts in quotation marks, such as "
            f'["no", "yes"] or ["false", "true"], got {value!r}.'
        )
    assert isinstance(value, list)
    texts = tuple(str(each).strip() for each in value)
    if len(set(texts)) < len(texts):
        raise ValueError(f"schema: column {name!r}: {entry} names a value twice.")
    return texts
