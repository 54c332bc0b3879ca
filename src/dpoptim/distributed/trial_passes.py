"""Passes of a model that is tried, all ranks together."""

import sys
from typing import Any

from torch import nn

from dpoptim.distributed.ranks import Ranks
from dpoptim.errors import RankError, quoted


class TrialPasses:
    """Forward passes that communicate by themselves: all ranks begin each one together.

    Where one rank's pass raises, the others wait in theirs for it. If that rank went on to another
    pass, messages of two passes would meet, of other lengths; gloo ends the process then. So it
    waits until the others have given up, and no rank runs the model again.

    Args:
        ranks: that try the model.
        model: whose forward passes these are.
    """

    def __init__(self, ranks: Ranks, model: nn.Module) -> None:
        self._ranks = ranks
        self._begun = 0
        self._handled = sys.exception()  # by the caller, of whom a pass knows nothing
        self._raised: Exception | None = None  # by the pass before, on this rank
        self._failure: RankError | None = None
        self._hooks = [
            model.register_forward_pre_hook(self._begin, prepend=True),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, *ignored: Any) -> None:
        if self._failure is None:
            try:
                self._ranks.begin_trial(self._begun)
            except RankError as error:
                self._failure = error
        if self._failure is not None:  # for which who tries models may see no reason to stop
            raise self._failure
        self._begun += 1
        self._forget()

    def _forget(self) -> None:
        """Forget what this rank raised: the passes of all ranks did."""
        if self._raised is not None:
            self._ranks.tell_failure(failed=False)
            self._raised = None

    def _end(self, *ignored: Any) -> None:
        error = sys.exception()
        if not isinstance(error, Exception) or error is self._handled:
            return
        self._failure = self._failure or self._ranks.lost(error)
        if self._failure is None:
            self._raised = error
            self._ranks.tell_failure(failed=True)

    def close(self) -> None:
        """Let the model go.

        Raises:
            RankError: the ranks did not run the same passes.
        """
        for hook in self._hooks:
            hook.remove()
        if self._failure is None:
            self._forget()
            return
        if self._raised is None:
            raise self._failure
        raise RankError(
            f"rank {self._ranks.rank} could not run the model on made-up records, as others could: "
            f"{quoted(self._raised)}. Nothing was released. Fix: the same model on every rank."
        ) from self._raised
