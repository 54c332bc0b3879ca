"""Who vouches for what a guarantee takes on trust: names, line by line."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dpoptim.assumptions import Assumption
from dpoptim.printable import printable
from dpoptim.runs.assumptions import OTHER_WEIGHTS


def vouchers(
    basis: Iterable[Assumption], named: str | Mapping[str, str] | None
) -> dict[str, str] | None:
    """Who vouches for which line that is taken on trust, by the line's whole text.

    Args:
        named: one name for all lines; or names by a part of a line's text, which no other has.

    Raises:
        ValueError: a part that is in no line or in several, or a name that is empty.
    """
    lines = [item.text for item in basis if item.kind == "trusted"]
    if named is None:
        return None
    if isinstance(named, str):
        named = dict.fromkeys(lines, named)
    found = {}
    for part, name in named.items():
        of_part = [line for line in lines if line == part] or [
            line for line in lines if part in line
        ]
        if len(of_part) != 1 or not name.strip():
            raise ValueError(
                f"vouched_by: {printable(part)!r} must be a part of one line that is taken on "
                f"trust, and of no other, and have a name. Fix: parts of: {'; '.join(lines)}."
            )
        found[of_part[0]] = printable(name)
    return found


def vouched_in(written: dict[str, Any]) -> dict[str, str] | None:
    """Names by line on trust; ValueError for anything else."""
    named = written.get("vouched_by")
    if named is None:
        return None
    lines = set(written["basis"]["trusted"])
    if not named or not all(isinstance(n, str) and line in lines for line, n in named.items()):
        raise ValueError("a name")
    return dict(named)


def who_vouches(written: dict[str, Any]) -> Iterator[str]:
    """How many lines on trust somebody vouches for, and who; first who does for the weights."""
    lines, named = written["basis"]["trusted"], written.get("vouched_by", {})
    if (line := OTHER_WEIGHTS.text) in lines:
        who = (
            f"vouched for by {printable(str(named[line]))}" if line in named else "by nobody's word"
        )
        yield f"that {line}: {who}"
    if without := sum(line not in named for line in lines):
        yield (
            f"{without} of {len(lines)} lines that are taken on trust: the certificate names "
            "nobody who vouches for them; report.html has a place for each name"
        )
    for name in dict.fromkeys(named.values()):
        count = sum(each == name for each in named.values())
        yield f"that {printable(str(name))} vouches for {count} of {len(lines)} lines on trust"
