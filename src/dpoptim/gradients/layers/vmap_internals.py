"""``torch.func.vmap``, with a switch of it that is not public."""

from collections.abc import Callable
from typing import Any

import torch

# without it there are warnings, and nothing else
_warn_of_loops: Callable[[bool], None] = getattr(
    torch._C._functorch, "_set_vmap_fallback_warning_enabled", lambda enabled: None
)


def vmap(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``torch.func.vmap``, which says nothing of operations that it runs for one after the other.

    They are the caller's own doing, and nothing that a user could change.
    """

    def run(*args: Any) -> Any:
        _warn_of_loops(False)
        try:
            return torch.func.vmap(function, **options)(*args)
        finally:
            _warn_of_loops(True)  # as PyTorch begins; it does not tell what it was

    return run
