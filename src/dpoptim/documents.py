"""Strict JSON documents that show whether they were changed: plans and certificates.

A document's last entry, ``sha256``, covers all the others. It is not keyed: it shows damage and
careless hands; what the numbers of a plan determine is computed again, and a certificate can be
signed.
"""

import hashlib
import json
from typing import Any

DIGEST = "sha256"


def with_digest(document: dict[str, Any]) -> dict[str, Any]:
    """The document with its digest as the last entry, in place of one that it has."""
    bare = {name: value for name, value in document.items() if name != DIGEST}
    return {**bare, DIGEST: digest(bare)}


def digest(document: dict[str, Any]) -> str:
    """SHA-256 of a document, whatever its spaces and the order of its names."""
    text = json.dumps(
        document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_of(text: str) -> str:
    """SHA-256 of a text as `write_atomically` writes it."""
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()


def dump(document: dict[str, Any]) -> str:
    """The document as indented text."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)


def load(text: str, *, what: str, format: str, fix: str) -> dict[str, Any]:
    """Read what `dump` wrote of a document `with_digest`.

    Args:
        what: the kind of document, for messages, such as "plan".
        format: what its entry ``format`` must say.
        fix: what to do about a wrong one.

    Raises:
        ValueError: it is not JSON, no such document, or was changed.
    """
    try:
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        reason = "too deeply nested" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"text is not JSON ({reason}); {fix}.") from None
    if not isinstance(data, dict) or data.get("format") != format:
        raise ValueError(
            f"text is not a {what} in the format {format!r}; {fix}, or make a new {what}."
        )
    if data.get(DIGEST) != digest({name: value for name, value in data.items() if name != DIGEST}):
        raise ValueError(
            f"text is a damaged {what}, or it was edited: its {DIGEST} is of another one. Do not "
            f"trust it; make a new {what}, or take the one that was first written."
        )
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")
