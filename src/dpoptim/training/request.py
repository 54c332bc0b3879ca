"""Arguments of `attach`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpoptim.accounting.ledger import Ledger
from dpoptim.gradients.engine import Reduction
from dpoptim.gradients.isolation import Choice
from dpoptim.gradients.oracle import Loss
from dpoptim.training.batches.loading import Collate


@dataclass(frozen=True)
class Request:
    """The arguments of `attach` beside plan, model, optimizers and data; see there."""

    loss: Loss | None
    collate_fn: Collate | None
    loss_reduction: Reduction | None
    ledger: Ledger | None
    label: str
    noise_seed: int | None
    partial_backward: bool
    resume: str | Path | None
    checkpoint_key: bytes | None
    rows_per_record: int
    rows_reduction: Reduction
    persons: Sequence[Any] | None
    isolation: Choice
    batch_axis: int | None
    sharded: bool
    projection: float | None
    random_iterate: bool
    wrappers: Sequence[object] = ()  # of the optimizers, or these themselves
