"""Whose code a class is: this library's own, or somebody else's, which it cannot vouch for."""

import sys

LIBRARY = "dpoptim"


def written_as(kind: type) -> str:
    """The class as ``"module:Class"``, by which it can be told from another of its name."""
    return f"{kind.__module__}:{kind.__qualname__}"


def package_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def of_this_library(kind: type) -> bool:
    """Whether the class is found in this library under its own name: to say so is not enough."""
    if package_of(kind) != LIBRARY:
        return False
    found: object = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kind
