"""Private state beside Lightning's checkpoints: it goes where the last of these goes."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import Strategy

from dpoptim.training.checkpoints.rank_files import remove_other_rank_files

KEY = "dpoptim_private_checkpoint"  # of a checkpoint; its value is a path


class PrivateFiles:
    """Files of private state that checkpoints of a Trainer name.

    A ``ModelCheckpoint`` that keeps the best few has the strategy remove the others. A file is
    removed with the last checkpoint that names it; what other processes wrote before stays.
    """

    def __init__(self) -> None:
        self._named: dict[str, Path] = {}  # by the path of a checkpoint

    def note(self, checkpoint: str | os.PathLike[str], private: Path) -> None:
        """A checkpoint names a file."""
        self._named[os.path.abspath(checkpoint)] = private

    def follow(self, strategy: Strategy) -> Callable[[], None]:
        """Be told of the checkpoints that a strategy writes and removes; returns what ends it."""
        own = vars(strategy)
        own["save_checkpoint"] = functools.partial(self._save, strategy, strategy.save_checkpoint)
        own["remove_checkpoint"] = functools.partial(
            self._remove, strategy, strategy.remove_checkpoint
        )

        def end() -> None:
            for name in ("save_checkpoint", "remove_checkpoint"):
                own.pop(name, None)

        return end

    def _save(
        self,
        strategy: Strategy,
        save: Callable[..., None],
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        *rest: Any,
        **options: Any,
    ) -> None:
        save(checkpoint, filepath, *rest, **options)
        own = checkpoint.get(KEY)
        if self._named.get(os.path.abspath(filepath)) != (None if own is None else Path(own)):
            self._forget(strategy, filepath)
        if own is not None:
            self.note(filepath, Path(own))

    def _remove(
        self,
        strategy: Strategy,
        remove: Callable[..., None],
        filepath: str | os.PathLike[str],
    ) -> None:
        remove(filepath)
        self._forget(strategy, filepath)

    def _forget(self, strategy: Strategy, filepath: str | os.PathLike[str]) -> None:
        private = self._named.pop(os.path.abspath(filepath), None)
        if private is not None and private not in self._named.values() and strategy.is_global_zero:
            private.unlink(missing_ok=True)
            remove_other_rank_files(private, [])
