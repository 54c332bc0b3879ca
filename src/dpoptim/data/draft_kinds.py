"""Kinds that the owner of a table names for its columns, before a draft of a schema is written."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from dpoptim.data.column_names import abridged


def named_kinds(names: Sequence[str], said: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Kinds by column.

    Args:
        names: of all columns.
        said: by kind, names and patterns of columns, such as ``"lab_*"``, separated by commas.

    Raises:
        ValueError: a name or pattern that fits no column, or a column with two kinds.

    **Guarantee.** Depends on names alone.
    """
    kinds: dict[str, str] = {}
    for kind, texts in said.items():
        for text in texts:
            for pattern in [text] if text in names else text.split(","):
                found = fitting(names, pattern.strip())
                if not found:
                    raise ValueError(
                        f"--{kind} {pattern.strip()!r} fits no column; there are {abridged(names)}."
                    )
                if twice := [name for name in found if kinds.get(name, kind) != kind]:
                    raise ValueError(
                        f"--{kind} and --{kinds[twice[0]]} both name column {twice[0]!r}; choose "
                        "one."
                    )
                kinds |= dict.fromkeys(found, kind)
    return kinds


def fitting(names: Sequence[str], pattern: str) -> list[str]:
    """The column of this name, or those that a pattern fits."""
    return [pattern] if pattern in names else [name for name in names if fnmatchcase(name, pattern)]
