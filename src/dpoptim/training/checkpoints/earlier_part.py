"""The part of a run that a checkpoint was saved after, if there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpoptim.accounting.ledger import Ledger
from dpoptim.distributed.agreement import digest
from dpoptim.distributed.checkpoints import own_state
from dpoptim.distributed.ranks import Ranks
from dpoptim.gradients.accumulation.boxes import changed, is_large, whole
from dpoptim.gradients.accumulation.summation_groups import Indices
from dpoptim.gradients.accumulation.totals import Totals
from dpoptim.training.checkpoints.checkpoint import (
    checkpoint_to_resume,
    read_checkpoint,
    refuse_other_training,
)
from dpoptim.training.checkpoints.rank_files import with_parts


@dataclass(frozen=True)
class TakenOut:
    """The place of a tensor that travels by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def taken_out(tensors: list[Tensor], _: str, value: Any) -> Any:
    """Move a large tensor of a checkpoint to ``tensors``."""
    if not is_large(value):
        return value
    tensors.append(value.detach())
    return TakenOut(tuple(value.shape), value.dtype)


def handed_on(tensors: list[Tensor], ranks: Ranks, _: str, value: Any) -> Any:
    """The tensor of this place, from rank 0, where ``tensors`` has it first; all ranks together.

    One after the other, so that no rank has a checkpoint more than once.
    """
    if not isinstance(value, TakenOut):
        return value
    tensor = (
        tensors.pop(0).contiguous()
        if ranks.rank == 0
        else torch.empty(value.shape, dtype=value.dtype)
    )
    return ranks.broadcast(tensor)


def released_weights(
    checkpoint: str | Path, *, checkpoint_key: bytes | None = None
) -> dict[str, Tensor]:
    """The model's state dict in a checkpoint of a run that cannot go on, or need not.

    Args:
        checkpoint: what `PrivateTraining.save` wrote, after some of the run's steps.
        checkpoint_key: as `attach` had it.

    Returns:
        for ``model.load_state_dict``.

    Raises:
        FileNotFoundError, ValueError: there is no checkpoint, it was changed, or is sealed with
            another key.

    **Guarantee.** That of its run, whatever became of it: these weights had been released. All else
    in the file stays secret.

    Examples:
        >>> import dpoptim
        >>> try:
        ...     dpoptim.released_weights("run.checkpoint")
        ... except FileNotFoundError as error:
        ...     print(error)
        resume: there is no checkpoint at run.checkpoint. Fix: give what private.save(path) wrote.
    """
    path = Path(checkpoint)
    contents, _ = read_checkpoint(path, key=checkpoint_key)
    return dict(whole(with_parts(contents, path, checkpoint_key)["model"]))


class EarlierPart:
    """The part of a run that it goes on from; without a checkpoint it begins.

    Args:
        contents: of the checkpoint, **secret**; None: there is none.
        digest: its SHA-256.
    """

    def __init__(self, contents: dict[str, Any] | None, digest: str = "") -> None:
        self.contents, self.digest = contents, digest

    @classmethod
    def read(cls, path: str | Path | None, key: bytes | None, ranks: Ranks) -> EarlierPart:
        """Read, on rank 0, what all ranks go on from; errors as for `read_checkpoint`.

        Raises:
            RankError: some ranks alone would go on, or with another key. What they would save,
                nobody could read.
        """
        ranks.agree(
            {
                "resume (a path on all ranks, or on none)": str(path is not None),
                "checkpoint_key": digest(repr(key)),
            }
        )
        tensors: list[Tensor] = []  # on rank 0

        def without_tensors() -> tuple[dict[str, Any] | None, str]:
            contents, found = checkpoint_to_resume(path, key)
            return changed(contents, partial(taken_out, tensors)), found

        contents, found = ranks.from_first(without_tensors)
        if path is None or contents is None:
            return cls(None, found)
        contents = changed(contents, partial(handed_on, tensors, ranks))
        return cls(with_parts(contents, Path(path), key), found)

    def of_this_rank(
        self,
        identity: dict[str, Any],
        ledger: Ledger,
        ranks: Ranks,
        totals: Totals,
        deal: Callable[[Indices], Indices],
        records: int | None,
    ) -> EarlierPart:
        """Return this rank's share of the part; see `distributed.checkpoints.own`.

        Raises:
            ValueError: the part is of another training than ``identity``.
        """
        if self.contents is None:
            return self
        refuse_other_training(self.contents, identity, ledger)
        return EarlierPart(own_state(self.contents, ranks, totals, deal, records), self.digest)

    @property
    def gate(self) -> dict[str, Any] | None:
        """The gate's state."""
        return None if self.contents is None else self.contents["gate"]

    @property
    def reservation(self) -> str | None:
        """The charge of the run so far; None where there is none, or no earlier part."""
        return None if self.gate is None else self.gate["reservation"]

    @property
    def caveats(self) -> dict[str, bool]:
        """This part's caveats of the guarantee; public."""
        return {} if self.contents is None else self.contents["caveats"]

    @property
    def steps_done(self) -> int | None:
        """So many; None where there is no earlier part. Public."""
        return None if self.contents is None else self.contents["steps_done"]
