"""Learning rates that follow what a loop has measured while it trains in private."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpoptim.errors import PrivacyError
from dpoptim.training.other_libraries import innermost

FIX = (
    "Fix: a schedule of the plan's steps alone, such as CosineAnnealingLR; or a number that was "
    "released, such as a score that private.evaluate returned; or a loss on public records, "
    "without its graph (torch.no_grad())."
)


class PrivateScheduleWarning(UserWarning):
    """A learning rate follows a number of which nobody knows whether it was released."""


class PrivateSchedules:
    """Looks at what ``ReduceLROnPlateau`` is given for one of the run's optimizers.

    **Guarantee.** A loss that still is in a graph lowers no learning rate. Of other numbers nobody
    knows where they are from: that they were released is on trust, which a warning says.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers, self._warned = tuple(optimizers), False

    def see(self, optimizer: torch.optim.Optimizer, metrics: Any) -> None:
        """Refuse a loss, and warn of a number, once.

        Raises:
            PrivacyError: the rate would follow a loss of private records.
        """
        if not any(each is innermost(optimizer) for each in self._optimizers):
            return
        if isinstance(metrics, Tensor) and metrics.requires_grad:
            raise PrivacyError(
                "ReduceLROnPlateau was given a loss with its graph, as of a batch in training: the "
                f"learning rate would follow private numbers, which no noise covers. {FIX}"
            )
        if not self._warned:
            self._warned = True
            warnings.warn(
                "ReduceLROnPlateau sets the learning rate by a number while training is private: "
                f"if it was measured on private records, the guarantee does not cover it. {FIX}",
                PrivateScheduleWarning,
                stacklevel=4,
            )
