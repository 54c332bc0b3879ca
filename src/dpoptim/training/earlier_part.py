"""The part of a run that a checkpoint was saved after, if there is one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dpoptim.accounting.ledger import Ledger
from dpoptim.distributed.agreement import digest
from dpoptim.distributed.checkpoints import own
from dpoptim.distributed.ranks import Ranks
from dpoptim.gradients.summation_groups import Indices
from dpoptim.gradients.totals import Totals
from dpoptim.training.checkpoint import checkpoint_to_resume, refuse_other_training
from dpoptim.training.rank_files import with_parts


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
        contents, found = ranks.from_first(partial(checkpoint_to_resume, path, key))
        if path is None or contents is None:
            return cls(None, found)
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
        return EarlierPart(own(self.contents, ranks, totals, deal, records), self.digest)

    @property
    def gate(self) -> dict[str, Any] | None:
        """The gate's state."""
        return None if self.contents is None else self.contents["gate"]

    @property
    def caveats(self) -> dict[str, bool]:
        """This part's caveats of the guarantee; public."""
        return {} if self.contents is None else self.contents["caveats"]

    @property
    def steps_done(self) -> int | None:
        """So many; None where there is no earlier part. Public."""
        return None if self.contents is None else self.contents["steps_done"]
