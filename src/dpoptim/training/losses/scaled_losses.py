"""Numbers by which losses are multiplied or divided: what they do to a step, and may be."""

import warnings
from typing import Protocol

from torch import Tensor

from dpoptim.errors import PrivacyError
from dpoptim.gradients.arithmetic.products import COMMON_FACTOR_ERROR
from dpoptim.gradients.engine import Engine
from dpoptim.training.losses.reduction import ONE_BY_ONE, Reading, divided_by_a_number

MOST_LOST = 0.02  # of the clip norm, by a mean, without a word
ACCUMULATES = (
    "divided by a whole number, as loops do that accumulate gradients: each record's gradient is "
    "so much smaller before it is clipped, while the noise stays. Fix: leave the number out; to "
    "fit memory, private.batches(physical_batch_size=...) cuts the plan's batches, and their "
    "gradients are added up. If it belongs to the loss, a clip norm as much smaller makes up for "
    "it."
)


class Microbatches(Protocol):
    """Where a step is, as `Steps` tells it."""

    microbatches: int

    @property
    def state(self) -> str: ...


class Lengths:
    """Refusal of factors that are the length of every microbatch of a step.

    Where every record is in every batch, all batches may have the same, and no other one will show
    that a factor is a length. One microbatch of several may have it by chance.
    """

    def __init__(self) -> None:
        self._matched: set[float] = set()  # by all microbatches of this step; private

    def refuse(self, reading: Reading, lengths: set[int], steps: Microbatches | None) -> None:
        """Refuse them, at the last microbatch of a step.

        Args:
            lengths: of this microbatch, in rows and in records.
            steps: None: each batch is whole.
        """
        found = {float(each) for each in lengths if each > 1}
        found = {*found, *(1 / each for each in found)}.intersection(reading.factors)
        first, last = (
            (True, True) if steps is None else (steps.microbatches == 1, steps.state == "complete")
        )
        self._matched = found if first else self._matched & found
        if self._matched and last:
            raise PrivacyError(
                "the loss was multiplied or divided by a number that is also the length of this "
                "batch, which has all records: one record more would scale the gradients of all. "
                f"{ONE_BY_ONE} Or loss.mean(), which needs no length."
            )


def warn_of_large_means(engine: Engine) -> None:
    """Warn of what rounding takes from the clip norm of large means: see `products.margin`."""
    lost = 0.0 if engine.fixed_shape else engine.capacity * COMMON_FACTOR_ERROR
    if lost > MOST_LOST:
        warnings.warn(
            "the loss is a mean over the batch, which rounds every record's gradient by how many "
            f"others there are. Batches of this plan may be so large that {lost:.0%} of the clip "
            "norm are left to that, and clipped away, while the noise stays. Fix: hand over the "
            'losses as they are, one for each record (reduction="none"), or their sum.',
            stacklevel=6,
        )


def warn_of_divided_means() -> None:
    """Warn of a habit of plain loops that accumulate gradients."""
    warnings.warn(f"the loss is a mean over the batch that was {ACCUMULATES}", stacklevel=6)


def warn_of_divided_losses(losses: Tensor) -> bool:
    """The same of one loss for each record, where batches are cut; whether there was a warning."""
    divided = divided_by_a_number(losses.grad_fn)
    if divided:
        warnings.warn(f"the losses were {ACCUMULATES}", stacklevel=4)
    return divided
