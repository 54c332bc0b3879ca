"""The library of compiled functions, where the package was built with one.

It is compiled when the package is installed and a C compiler is there, and uses nothing of Python
or PyTorch. Without it, or on a processor that it was not made for, or with ``DPOPTIM_NATIVE=0`` in
the environment, PyTorch's and numpy's operations do the same, more slowly. `gradients.native` and
`noise.ziggurat` declare and call its functions.
"""

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LIBRARY = Path(__file__).with_name("_compiled.so")
SWITCH = "DPOPTIM_NATIVE"


@dataclass(frozen=True)
class Library:
    """The compiled functions, and the widest vectors of this processor that they may use.

    Attributes:
        level: as `dpoptim_level` in `record_gradients.c` returns it, at least 1.
    """

    functions: ctypes.CDLL
    level: int


@cache
def library() -> Library | None:
    """The compiled functions; None where there are none for this processor, or none are wanted."""
    if os.environ.get(SWITCH, "1") == "0" or not LIBRARY.exists():
        return None
    try:
        functions = ctypes.CDLL(str(LIBRARY))
    except OSError:  # of another system: reports of runs say that it is not used
        return None
    level = functions.dpoptim_level()
    return Library(functions, level) if level else None
