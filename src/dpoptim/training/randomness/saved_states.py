"""States of random generators in the checkpoints that Accelerate writes inside a private loop."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dpoptim.training.randomness.secret_randomness import own_states


class _SaveState:
    """A stand-in for ``Accelerator.save_state``, while generators are seeded in secret."""

    honest: Callable[..., Any] | None = None
    users = 0


@contextmanager
def own_states_saved() -> Iterator[None]:
    """Let ``accelerator.save_state`` write down the program's own states, not the secret ones.

    Whoever has a state of torch's generator can run it backwards, and knows each record's mask of
    dropout and its augmentation. What is written is what generators get back when the loop ends.
    """
    module: Any = sys.modules.get("accelerate.accelerator")
    if module is None:
        yield
        return
    patched = module.Accelerator
    if _SaveState.users == 0:
        _SaveState.honest = patched.save_state
        patched.save_state = without_secrets(patched.save_state)
    _SaveState.users += 1
    try:
        yield
    finally:
        _SaveState.users -= 1
        if _SaveState.users == 0:
            patched.save_state = _SaveState.honest


def without_secrets(save: Callable[..., Any]) -> Callable[..., Any]:
    """Run ``save`` with `own_states`."""

    @functools.wraps(save)
    def saved(*args: Any, **kwargs: Any) -> Any:
        with own_states():
            return save(*args, **kwargs)

    return saved
