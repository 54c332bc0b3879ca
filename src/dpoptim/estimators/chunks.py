"""Fits on chunks of a stream, each unit in one: the average weights, and the price."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dpoptim.accounting.guarantee import Guarantee, parse_neighboring

Weights = NDArray[np.float64]
TRUSTED = (
    "taken on trust: no {0} is in two chunks, and which chunk a {0} is in does not depend on the "
    "others"
)


@dataclass(frozen=True)
class Chunks:
    """Results of the chunks so far.

    Attributes:
        weights: mean over the rows so far of the weights that their chunk gave.
        rows: so far.
        guarantee: for every record or person, whichever chunk they were in.
    """

    weights: Weights
    rows: int
    guarantee: Guarantee

    def refuse_change(self, neighboring: str, *, by_person: bool) -> None:
        """Before anything is spent: refuse a chunk that would protect others than those before.

        Raises:
            ValueError: the neighbouring relation, or whom the guarantee protects, would change.
        """
        if parse_neighboring(neighboring) != self.guarantee.neighboring:
            raise ValueError(
                "neighboring must stay the same from chunk to chunk; call fit to start anew."
            )
        if by_person != (self.guarantee.unit == "person"):
            raise ValueError(
                "persons must be given with every chunk, or with none; call fit to start anew."
            )

    def followed_by(self, weights: Weights, rows: int, guarantee: Guarantee) -> "Chunks":
        """With one chunk more, trained for ``guarantee`` from the releases of those before.

        **Guarantee.** Parallel composition, adaptive: a record, or a person with all of their
        rows, is read by the fit of one chunk alone. To that fit all earlier releases are constants,
        and later fits see the unit only through what it released. So the larger epsilon and the
        larger delta hold for everybody.
        """
        seen = self.rows + rows
        trusted = TRUSTED.format(guarantee.unit)
        notes = dict.fromkeys((*self.guarantee.notes, *guarantee.notes, trusted))
        worse = replace(
            guarantee,
            epsilon=max(guarantee.epsilon, self.guarantee.epsilon),
            delta=max(guarantee.delta, self.guarantee.delta),
            status=guarantee.status if self.guarantee.status == "proven" else self.guarantee.status,
            notes=tuple(notes),
        )
        return Chunks(self.weights + (weights - self.weights) * (rows / seen), seen, worse)
