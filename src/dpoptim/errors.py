"""The errors of private training, and the one rule for what any message may say.

Bad arguments raise ``ValueError`` or ``TypeError`` as everywhere in Python. The classes here are
for a promise that cannot be kept.

**The rule.** A message names arguments, modules, parameters, types and public numbers: settings of
the plan, and sizes that the neighbouring relation makes public. It never holds what was computed
from records: no value, no label, no count of records, and no size of a tensor that holds records,
since one of its axes is the realised batch; `axes_of` says what may be said of such a tensor.
Another library's error about private tensors is quoted without its numbers (`quoted`), and not
chained. Loading a file is the one exception: its messages go to the file's owner before anything
is released, and may name a line or a column. (tests/privacy/test_messages.py reads every message
of the package.)
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line says its errors without waiting for torch
    from torch import Tensor


class PrivacyError(RuntimeError):
    """Going on would break the promise of the plan; the message names the place and the fix.

    Attributes:
        layer: the name of the module where it shows, if it is one; what keeps records apart there
            may be changed.
    """

    def __init__(self, message: str, *, layer: str | None = None) -> None:
        super().__init__(message)
        self.layer = layer


class LedgerError(RuntimeError):
    """The ledger cannot be read, written or used as asked. What it held before, it still holds."""


class TakenUpElsewhereError(LedgerError):
    """Another process goes on with the run, from a checkpoint: whoever held it before may not."""


class SamplesInteractError(PrivacyError):
    """A record's gradient depends on other records of the batch, so clipping bounds nothing."""


class NotByThisWayError(SamplesInteractError):
    """Records do not interact, but this way of keeping them apart takes gradients for others'.

    Attributes:
        reason: why, without a fix.
        fix: what to write instead, without other ways.
    """

    def __init__(self, message: str, *, reason: str, fix: str = "") -> None:
        super().__init__(message)
        self.reason, self.fix = reason, fix


class NoSuchLossError(PrivacyError, ValueError):
    """One loss a record cannot be made of these inputs."""


class RankError(PrivacyError):
    """Another process of the run, named by rank, has failed, left, or does something else."""


def axes_of(x: Tensor) -> str:
    """All that a message may say of the shape of records: how many axes it has."""
    return "1 axis" if x.dim() == 1 else f"{x.dim()} axes"


def quoted(error: Exception) -> str:
    """The first line of another library's error, its numbers replaced: one may be a batch's."""
    first = (str(error).splitlines() or [""])[0]
    return re.sub(r"\d+(\.\d+)?", "#", first).rstrip(".")
