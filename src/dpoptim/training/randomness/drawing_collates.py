"""Collate functions that draw random numbers (which tokens are masked, say).

The draws are held, so that a record collated alone can be compared with its place among others.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dpoptim.errors import PrivacyError, SamplesInteractError
from dpoptim.training.batches.records import leaves_of
from dpoptim.training.randomness.generators import (
    everywhere,
    generators_in,
    of_torch,
    states_of,
)
from dpoptim.training.trials.fixed_noise import RARE, FixedNoise

# of what is drawn: whatever may happen by chance does; half of it, for each row another half;
# nothing does
DRAWS = {"all": RARE, "half": 0.5, "nothing": 1 - RARE}


class HeldDraws:
    """Makes the batches that ``collate`` would make, had it drawn the same for a record in each.

    Args:
        quantile: what is drawn, see `DRAWS`.

    Attributes:
        drew: whether anything was drawn.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], quantile: float) -> None:
        self._collate = collate
        alike = quantile != DRAWS["half"]
        self._noise = FixedNoise(quantile, quantile=quantile, alike=alike, own_coins=True)

    @property
    def drew(self) -> bool:
        return self._noise.drew

    def __call__(self, rows: list[Any]) -> Any:
        """As ``collate``.

        Raises:
            PrivacyError: it draws by a generator of its own.
        """
        with torch.random.fork_rng([]), self._noise:
            batch = self._collate(rows)
        if self._noise.by_others:
            raise PrivacyError(
                "collate_fn draws from a generator of its own. Whoever knows its seed knows what "
                "each record would draw, and one record more shifts that of all that follow. Fix: "
                "draw from torch's own generator, which is seeded in secret (Transformers' "
                "collators: seed=None)."
            )
        return batch

    def refuse_other_batch(self, rows: Sequence[Any]) -> None:
        """Refuse a function that makes another batch of the same rows the second time.

        Or may make another one some time, since it draws from numpy's or Python's generators: what
        happens one time in twenty need not show in two batches, nor in many.

        **Guarantee.** Draws are seen by the generators' states, not by what comes of them.
        """
        own = [each for each in generators_in(self._collate) if not of_torch(each)]
        others = everywhere(own)
        before = states_of(others)
        first, second = (
            [leaf for _, leaf in leaves_of(self(list(rows))) if isinstance(leaf, Tensor)]
            for _ in range(2)
        )
        if states_of(others) != before:
            raise SamplesInteractError(
                "collate_fn draws from numpy's or Python's random generators, so that nobody can "
                "tell what it makes of a record alone from what it makes of it among others, nor "
                "how often it mixes records. Fix: draw from torch's own generator, or in "
                "train_set's __getitem__, for one record at a time."
            )
        if not all(map(same, first, second)):
            raise SamplesInteractError(
                "collate_fn makes another batch of the same records the second time: it draws "
                "random numbers that nobody sees, or remembers what it saw, and no record "
                "collated alone can be compared with its place among others. Fix: draw from "
                "torch's own generator, or in train_set's __getitem__, for one record at a time."
            )


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal; what is not a number equals itself."""
    return torch.equal(a.nan_to_num(), b.nan_to_num())
