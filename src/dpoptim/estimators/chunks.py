"""Fits on chunks of a stream, each unit in one: the average weights, and the price."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dpoptim.accounting.guarantee import Guarantee, parse_neighboring
from dpoptim.accounting.ledger_records import ON_LEDGER

Weights = NDArray[np.float64]
TRUSTED = (
    "taken on trust: no {0} is in two chunks, and which chunk a {0} is in does not depend on the "
    "others"
)


@dataclass(frozen=True)
class Chunks:
    """Results of the chunks so far.

    Their guarantee is the estimator's ``privacy_`` and nothing beside it: a search or a pipeline
    that made the first chunk's fit states there what else its records paid for.

    Attributes:
        weights: mean over the rows so far of the weights that their chunk gave.
        rows: so far.
    """

    weights: Weights
    rows: int

    def followed_by(self, weights: Weights, rows: int) -> "Chunks":
        """With one chunk more."""
        seen = self.rows + rows
        return Chunks(self.weights + (weights - self.weights) * (rows / seen), seen)


def refuse_change(before: Guarantee, neighboring: str, *, by_person: bool) -> None:
    """Before anything is spent: refuse a chunk that would protect others than those before.

    Args:
        before: of the chunks so far.

    Raises:
        ValueError: the neighbouring relation, or whom the guarantee protects, would change.
    """
    if parse_neighboring(neighboring) != before.neighboring:
        raise ValueError(
            "neighboring must stay the same from chunk to chunk; call fit to start anew."
        )
    if by_person != (before.unit == "person"):
        raise ValueError(
            "persons must be given with every chunk, or with none; call fit to start anew."
        )
    if by_person and neighboring == "replace-one":  # two chunks would change, and their sizes
        raise ValueError(
            "neighboring='replace-one' is for a single chunk where persons own rows: who replaces "
            "a person may be in another chunk. Fix: neighboring='zero-out'; or fit on all of it."
        )


def over_chunks(before: Guarantee, chunk: Guarantee) -> Guarantee:
    """The guarantee for everybody, whichever chunk they were in.

    Args:
        before: of everything that those in the chunks so far paid for.
        chunk: of the fit of one chunk more, from the releases of those before.

    **Guarantee.** Parallel composition, adaptive: a record, or a person with all of their rows, is
    read by what made one chunk alone. To that fit all earlier releases are constants, and later
    fits see the unit only through what it released. So the larger epsilon and the larger delta
    hold for everybody.
    """
    worse = max(before, chunk, key=lambda each: each.epsilon)
    kept = (note for note in before.notes if ON_LEDGER not in note)  # it is said anew
    notes = dict.fromkeys((*kept, *chunk.notes, TRUSTED.format(chunk.unit)))
    return replace(
        worse,
        delta=max(before.delta, chunk.delta),
        status=chunk.status if before.status == "proven" else before.status,
        notes=tuple(notes),
    )
