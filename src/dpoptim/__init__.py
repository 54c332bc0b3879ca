"""dpoptim: train PyTorch models with differential privacy.

Names are imported when they are first used (PEP 562), so that the command line starts at once;
``__init__.pyi`` lists them.
"""

import ast
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def _homes() -> dict[str, str]:
    """The module of each public name, from the stub file beside this one."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


_HOMES = _homes()
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if _HOMES.get(name, __name__) != __name__:
        value = getattr(import_module(_HOMES[name]), name)
    elif not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        value = import_module(f"{__name__}.{name}")
    else:
        from dpoptim.opacus_words import hint_of_name

        hint = hint_of_name(name)
        if hint and sys._getframe(1).f_code.co_name == "_handle_fromlist":
            # `from dpoptim import ...` asks so; it would hide what an AttributeError says
            raise ImportError(f"cannot import name {name!r} from {__name__!r}.{hint}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{hint}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*_HOMES, *(name for name in globals() if name.startswith("__"))})
