"""Errors of a data set and a ``collate_fn`` while private records go through them.

Their texts may quote records, and reach logs, consoles and error trackers: what leaves is the
error's class, and where it was raised. It is raised anew where the records are read, in a worker's
process, too, and holds no reference to the original or to its frames.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import Dataset

import dpoptim
from dpoptim.errors import PrivacyError

SWITCH = "DPOPTIM_DEBUG_PRIVATE"  # in the environment: errors stay as they are


def folder_of(package: ModuleType) -> str:
    return str(Path(str(package.__file__)).parent) + os.sep


OURS, TORCHS = folder_of(dpoptim), folder_of(torch)


def shows_private() -> bool:
    """Whether the environment asks for errors as they are."""
    return os.environ.get(SWITCH, "0") != "0"


def without_text(error: Exception, doing: str) -> PrivacyError | None:
    """The error that is raised in the place of another; None: that may be seen.

    Args:
        doing: what raised it.

    **Guarantee.** The new error holds the class's name, and a file and a line of the program.
    """
    places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    if shows_private() or places[-1][0].startswith(OURS):
        return None  # this package's messages quote no record
    own = [place for place in places if not place[0].startswith((OURS, TORCHS))]
    file, line = (own or places)[-1]
    return PrivacyError(
        f"{doing} raised {type(error).__name__} at {file}, line {line}. What it said may quote "
        f"private records, and is left out. Fix: try it on public records; or, where nobody else "
        f"reads what the program prints, set {SWITCH}=1 in the environment."
    )


class Quiet(Dataset[Any]):
    """A data set whose errors do not quote its records. All else is the data set's own."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return quietly(self._dataset.__getitem__, index, "the data set")

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if (name.startswith("__") and name != "__getitems__") or name == "_dataset":
            raise AttributeError(name)  # while it is unpickled in a worker, say
        found = getattr(self._dataset, name)
        return QuietCall(found, "the data set") if name == "__getitems__" else found


@dataclass(frozen=True)
class QuietCall:
    """A function of records whose errors do not quote them."""

    function: Callable[[Any], Any]
    name: str

    def __call__(self, records: Any) -> Any:
        return quietly(self.function, records, self.name)


def quiet_collate(collate: Callable[[Any], Any] | None) -> QuietCall | None:
    """The collate function that was given, if one was, as a `QuietCall`."""
    return None if collate is None else QuietCall(collate, "collate_fn")


def quietly(function: Callable[[Any], Any], argument: Any, name: str) -> Any:
    """Call the function; see `without_text`."""
    try:
        return function(argument)
    except Exception as error:
        if (said := without_text(error, name)) is None:
            raise
    raise said  # outside of `except`, so that it has no context
