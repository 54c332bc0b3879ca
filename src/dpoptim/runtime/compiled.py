"""The library of compiled functions, where the package was built with one.

It is compiled when the package is installed and a C compiler is there, and uses nothing of Python
or PyTorch. Without it, or on a processor that it was not made for, or with ``DPOPTIM_NATIVE=0`` in
the environment, PyTorch's and numpy's operations do the same, more slowly. `per_sample.native`,
`noise.ziggurat` and `noise.keystream` declare and call its functions, as they are in the C files
that lie beside them: a library of other files, left from before an update, is not called.
"""

import ctypes
import hashlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

WHOLE, REAL, PLACE = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p  # types of arguments
PACKAGE = Path(__file__).parent.parent
LIBRARY = PACKAGE / "_compiled.so"
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
        functions.dpoptim_sources.restype = ctypes.c_char_p
        sources = functions.dpoptim_sources().decode()
    except OSError:  # of another system: reports of runs say that it is not used
        return None
    except AttributeError:  # of files that did not say
        sources = ""
    if sources != digest_of_sources():
        warnings.warn(
            "the compiled functions were built before this package's C files were changed, and are "
            "not used: steps take longer. Fix: install dpoptim again (pip install -e .).",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    level = functions.dpoptim_level()
    return Library(functions, level) if level else None


def function(name: str, *arguments: Any, result: Any = None) -> Callable[..., Any] | None:
    """One of the compiled functions, declared; None where there are none.

    Args:
        arguments: their ctypes, and ``result`` that of what is returned, if anything is.
    """
    found = library()
    if found is None:
        return None
    declared: Callable[..., Any] = getattr(found.functions, name)
    declared.argtypes, declared.restype = list(arguments), result  # type: ignore[attr-defined]
    return declared


def digest_of_sources() -> str:
    """SHA-256 of the package's C files, which every build and installation has."""
    files = sorted(PACKAGE.rglob("*.[ch]"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
