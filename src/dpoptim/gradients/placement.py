"""Places of a model's parameters: some wrappers keep parts, whole only in passes."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from dpoptim.errors import PrivacyError
from dpoptim.gradients.accumulation.totals import MakeTotals, Totals
from dpoptim.gradients.isolation import Isolation
from dpoptim.runtime.torch_internals import gradients_of

REENTRANT = (
    "a part of the model is under reentrant checkpointing, which makes backward passes inside of "
    "one, so that gradients of records cannot be told apart. Fix: "
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False); in Transformers, "
    'gradient_checkpointing_kwargs={"use_reentrant": False}.'
)


class Placement:
    """Knowledge of it that an engine needs: here, parameters are always where they are.

    Attributes:
        hooks: of its own on the model, by id, while it is attached.
        used: from what modules hold in forward passes to what they hold otherwise, which
            optimizers move; empty where these are the same.
        spread: whether this process has parts of parameters only.
    """

    hooks: Collection[int] = ()
    spread = False

    @property
    def used(self) -> Mapping[nn.Parameter, nn.Parameter]:
        return {}

    def in_forward(self) -> AbstractContextManager[None]:
        """A ``with`` in which modules hold forward passes' parameters, maybe without values."""
        return nullcontext()

    def settle(self) -> None:
        """Let modules hold what optimizers move, between passes."""

    # ---- trials on records that all processes have in common -----------------------------------

    def refuse(self, isolation: Isolation) -> None:
        """Refuse a way of keeping records apart that cannot be gone here.

        Raises:
            PrivacyError: naming the module.
        """

    @property
    def trial_totals(self) -> MakeTotals:
        """Totals of a trial: this process's parts of them."""
        return Totals

    def part_shape(self, p: nn.Parameter) -> tuple[int, ...]:
        """Shape of this process's part of what is shaped as a parameter."""
        return tuple(p.shape)

    def gradients(self, loss: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """This process's parts of a loss's gradients, by autograd; zeros where it reaches none.

        As of records for which a loss is a constant.

        Raises:
            PrivacyError: a part of the model is under reentrant checkpointing.
        """
        if not loss.requires_grad:
            return [torch.zeros_like(p) for p in parameters]
        try:
            found = gradients_of(loss, parameters)
        except RuntimeError as error:
            if "use_reentrant" in str(error):
                raise PrivacyError(REENTRANT) from error
            raise
        return [
            torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)
        ]

    def added(self, numbers: Tensor) -> Tensor:
        """Numbers that were found on this process's parts, added up over all processes."""
        return numbers


IN_PLACE = Placement()
