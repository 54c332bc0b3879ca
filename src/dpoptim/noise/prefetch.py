"""Normal draws made ahead, in a spare thread, while the thread that trains does something else.

A step's noise is known long before its sums are: it depends on nothing but the stream. Whoever
draws ahead gets what the gate would have drawn, to the last bit, because the branches of the
stream come in the same order (`KeyStream.reserve`).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dpoptim.noise.stream import KeyStream, this_process

Fill = Callable[[KeyStream, Tensor], None]


class DrawnAhead:
    """Draws that wait for the branches of streams whose turn comes, each to be taken once.

    Args:
        fill: overwrites a float64 vector with a branch's draws.

    **Guarantee.** What `take` returns is handed out once, to this process alone, and for the
    branch that it was drawn from: whatever interrupts a step, or forks the process, no two sums
    get the same noise. What is never taken is forgotten with its branch.
    """

    def __init__(self, fill: Fill) -> None:
        self._fill = fill
        self._process: tuple[int, int] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._drawn: WeakKeyDictionary[KeyStream, Future[Tensor]] = WeakKeyDictionary()

    def begin(self, stream: KeyStream, sizes: Sequence[int]) -> None:
        """Draw for the next branches of ``stream``, as many numbers as ``sizes`` says for each.

        Nothing where draws of it wait.
        """
        if stream.reserved:
            return
        if self._process != this_process():  # a forked child has neither the thread nor the draws
            self._process, self._drawn = this_process(), WeakKeyDictionary()
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="noise")
        assert self._pool is not None
        for size in sizes:
            branch = stream.reserve()
            try:
                self._drawn[branch] = self._pool.submit(self._draw, branch, size)
            except RuntimeError:  # no thread to be had: it is drawn when its turn comes
                return

    def take(self, branch: KeyStream, size: int) -> Tensor | None:
        """The draws of this branch, float64, shape (size,), or None if none were begun; once.

        Where another number was drawn they are lost, and the branch goes on behind them.
        """
        if self._process != this_process():
            return None
        waiting = self._drawn.pop(branch, None)  # first: an interrupted step must not find it again
        if waiting is None:
            return None
        drawn = waiting.result()
        return drawn if len(drawn) == size else None

    def _draw(self, branch: KeyStream, size: int) -> Tensor:
        drawn = torch.empty(size, dtype=torch.float64, device="cpu")
        self._fill(branch, drawn)
        return drawn
