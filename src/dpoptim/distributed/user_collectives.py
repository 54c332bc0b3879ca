"""Communication of a user's model or loss with other ranks, which is refused.

On made-up records all ranks have the same, equally many ones, so that trials cannot show what a
rank's numbers do to the records of another: a sum over ranks of how many rows there are looks like
a constant there, and in the run it scales the gradients of all records.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn

from dpoptim.distributed.c10d_internals import CALLED_THROUGH, WRAPPERS, sending_calls
from dpoptim.errors import PrivacyError

REFUSED = (
    "{} communicates with other ranks, by torch.distributed's {}: what it makes of one record may "
    "depend on records of other ranks, which trials on made-up records cannot show. Fix: each "
    "record's own loss, computed on its own rank, l.sum() or the vector of losses; dpoptim divides "
    "by the expected batch size of all ranks. What is only logged is gathered after "
    "optimizer.step()."
)


@dataclass
class _Watch:
    """One region in which user code may not communicate.

    Attributes:
        what: communicates there, in words.
        concerns: whether a call with these frames, the innermost first, is made in it.
        refusal: of the first such call.
    """

    what: str
    concerns: Callable[[list[FrameType]], bool]
    refusal: PrivacyError | None = None
    thread: int = field(default_factory=threading.get_ident)


class _Calls:
    """Stand-ins for what sends something."""

    honest: ClassVar[list[tuple[Any, str, Any]]] = []
    watches: ClassVar[list[_Watch]] = []

    @staticmethod
    def stand_in(honest: Any, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not (args and isinstance(args[0], dist.ProcessGroup) and args[0].size() == 1):
                refuse_users(name)
            return honest(*args, **kwargs)

        return call

    @staticmethod
    def put_in() -> None:
        for owner, name in sending_calls():
            _Calls.honest.append((owner, name, vars(owner)[name]))
            setattr(owner, name, _Calls.stand_in(getattr(owner, name), name))

    @staticmethod
    def take_out() -> None:
        while _Calls.honest:
            setattr(*_Calls.honest.pop())


def refuse_users(name: str) -> None:
    """Refuse a call that a user's code makes where it may not."""
    frames = frames_above(sys._getframe(2))
    if not by_user(frames):
        return
    for watch in _Calls.watches:
        if watch.thread == threading.get_ident() and watch.concerns(frames):
            watch.refusal = watch.refusal or PrivacyError(REFUSED.format(watch.what, name))
            raise watch.refusal


def frames_above(frame: FrameType | None) -> list[FrameType]:
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def by_user(frames: list[FrameType]) -> bool:
    """Whether neither this package nor a wrapper of PyTorch's makes the call."""
    for frame in frames:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(CALLED_THROUGH):
            return not module.startswith(WRAPPERS)
    return True


def inside_of(model: nn.Module) -> Callable[[list[FrameType]], bool]:
    """Whether a call is made in a forward pass of this model, or of a part of it."""

    def concerns(frames: list[FrameType]) -> bool:
        called = [
            frame.f_locals.get("self")
            for frame in frames
            if frame.f_code.co_filename == nn.modules.module.__file__
        ]
        return any(module is own for own in model.modules() for module in called)

    return concerns


@contextmanager
def user_collectives_refused(
    what: str, concerns: Callable[[list[FrameType]], bool] = lambda frames: True
) -> Iterator[None]:
    """Refuse what user code sends to other ranks meanwhile; regions may overlap.

    A refusal that somebody caught in between is raised again at the end. Wrappers (fully_shard,
    DistributedDataParallel) and this package communicate as they do.

    Args:
        what: may send something there, in words.
        concerns: whether a call is one of those meant, by its frames.

    Raises:
        PrivacyError: it did; with what to write instead.
    """
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    watch = _Watch(what, concerns)
    if not _Calls.watches:
        _Calls.put_in()
    _Calls.watches.append(watch)
    try:
        yield
    except Exception as error:
        if watch.refusal is None or error is watch.refusal:
            raise
        raise watch.refusal from error
    else:
        if watch.refusal is not None:
            raise watch.refusal
    finally:
        _Calls.watches.remove(watch)
        if not _Calls.watches:
            _Calls.take_out()
