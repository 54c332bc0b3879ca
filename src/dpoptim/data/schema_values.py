"""Values of a schema's entries: bounds, and lists of texts."""

from dpoptim.arguments import real_number
from dpoptim.data.numbers import day_number, day_text, keeps_day

FILL_IN = "FILL-IN"  # what a draft holds where only its owner knows


def is_left_open(value: object) -> bool:
    """Whether a draft's owner has not filled in a value, or part of a list."""
    return FILL_IN in (value if isinstance(value, list) else [value])


def missing_bounds(name: str, kind: str) -> str:
    example = "[2020-01-01, 2024-12-31]" if kind == "date" else "[0, 120]"
    return (
        f"schema: column {name!r} has no bounds. Fix: write its lowest and highest possible "
        "value, as is publicly known, "
        f'such as bounds = {example}; or kind = "drop".'
    )


def bounds_of(name: str, kind: str, value: object) -> tuple[float, float]:
    if is_left_open(value):
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


def texts_of(where: str, entry: str, value: object) -> tuple[str, ...]:
    """A list of texts, or of whole numbers as text.

    Args:
        where: ``"column 'a': "``, or nothing.
    """
    if is_left_open(value):
        raise ValueError(
            f'schema: {where}fill in its {entry}, a public list such as ["no", "yes"].'
        )
    plain = isinstance(value, list) and all(
        isinstance(each, str | int) and not isinstance(each, bool) for each in value
    )
    if not plain:
        raise ValueError(
            f"schema: {where}{entry} must be a list of texts in quotation marks, such as "
            f'["no", "yes"] or ["false", "true"], got {value!r}.'
        )
    assert isinstance(value, list)
    texts = tuple(str(each).strip() for each in value)
    if len(set(texts)) < len(texts):
        raise ValueError(f"schema: {where}{entry} names a value twice.")
    return texts


def flag_of(where: str, entry: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"schema: {where}{entry} must be true or false, got {value!r}.")
    return value


def refuse_format(name: str, format: object, bounds: tuple[float, float]) -> None:
    """Refuse a format in which the first or last day cannot be written and read back."""
    if not isinstance(format, str):
        raise ValueError(
            f'schema: column {name!r}: format must be text such as "%d.%m.%Y", got {format!r}.'
        )
    lost = next((day for day in bounds if not keeps_day(format, day)), None)
    if lost is not None:
        raise ValueError(
            f"schema: column {name!r}: the day {day_text(lost)} cannot be written and read back in "
            f"the format {format!r}. Fix: day, month and year as datetime.strptime has them, such "
            'as "%d.%m.%Y" for 31.12.2024 or "%m/%d/%Y" for 12/31/2024; years of two digits (%y) '
            "are 1969 to 2068."
        )
