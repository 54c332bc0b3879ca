"""Losses of a batch, taken of each of its records by itself: any loss becomes one a record."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.errors import PrivacyError
from dpoptim.gradients.hooks.read_parameters import rows_of_parameter
from dpoptim.runtime.torch_internals import version_of
from dpoptim.training.losses.by_record import (
    by_record,
    in_parts,
    mapped,
    rebuilt,
    rows_of,
    tensors_in,
)
from dpoptim.training.losses.parts_of_models import OTHER_INPUTS, Known, Noted, Part

ROUNDING = 1e-3  # of what is computed before the model is called, a record or a batch at a time
Loss = Callable[[Any, Any], Tensor]
IN_PLACE = (
    "per_sample takes a loss that leaves the batch, and what the model returns, as they are: this "
    "one writes into them, where rows of others may be met. Fix: operations that return another "
    "tensor, such as x.masked_fill(...) for x.masked_fill_(...)."
)


def per_sample(loss: Loss) -> Loss:
    """Turn a loss of a batch into one loss for each of its records, for ``private.backward``.

    The model runs on the batch, as always; the loss then sees one record at a time: its row of
    what the model returned, and its row of the batch. So whatever the loss does (a mean over a
    mask by hand, a ratio, dice, the k largest, standardising) concerns that record alone::

        @dpoptim.per_sample
        def loss(model, batch):
            errors = F.mse_loss(model(batch["x"]), batch["y"], reduction="none")
            return (errors * batch["mask"]).sum() / batch["mask"].sum()

    Vectorised where ``torch.func.vmap`` takes the loss, else called once for each record; and once
    more for the whole batch, to see what it asks of the model.

    Args:
        loss: ``loss(model, batch)``, one number for the batch. It calls the model that it is given,
            or modules in it, on what is in the batch. Tensors of the batch, and what is returned,
            have the records on their first axis; of a call with parts of the batch one after the
            other, ``model(torch.cat((a, b)))``, a record has its row in each part. Lists may hold
            one mapping, text or number for each record. The loss may read parameters (weights of
            tasks, a catalogue, penalties), of which each record then has a row: these take the
            memory of so many.

    Returns:
        a function with the same arguments that returns one loss for each record, shape (rows,).

    Raises:
        PrivacyError: when called: the loss gives the model something else for a record than for
            the batch, hands on what it returned, or reads what may hold something of all records.
        ValueError: when called: a batch, a loss or what the model returns has another form.

    **Guarantee.** A record's loss depends on its own rows of the batch and of what the model
    returned; so on that record alone, if model and ``collate_fn`` keep records apart, which
    `dpoptim.attach` looks after. What a loss keeps from one call to the next, or reads from
    elsewhere, is on trust.

    Examples:
        >>> import torch
        >>> import dpoptim
        >>> @dpoptim.per_sample
        ... def loss(model, batch):
        ...     x, mask = batch
        ...     return (model(x) * mask).sum() / mask.sum()
        >>> loss(torch.nn.Identity(), (torch.ones(3, 2), torch.ones(3, 2)))
        tensor([1., 1., 1.])
    """

    @functools.wraps(loss)
    def each(model: nn.Module, batch: Any) -> Tensor:
        rows = rows_of(batch)
        own, noted = by_record(batch, rows, "the batch", parts=False), Noted()
        versions = list(map(version_of, own))
        loss(Part(model, noted), mapped(batch, lambda each: each))
        if not noted.made:
            raise PrivacyError("per_sample takes a loss that calls the model it is given.")
        if noted.written or versions != list(map(version_of, own)):
            raise PrivacyError(IN_PLACE)
        return Records(loss, model, noted, batch, rows, own).losses()

    return each


class Records:
    """A batch's records, each with its own rows of what the model returned.

    Args:
        noted: what the loss asked of the model, on the batch.
        own: tensors of the batch, as `by_record` has them.
    """

    def __init__(
        self,
        loss: Loss,
        model: nn.Module,
        noted: Noted,
        batch: Any,
        rows: int,
        own: list[Tensor],
    ) -> None:
        self._loss, self._model, self._batch, self._rows = loss, model, batch, rows
        self._noted = noted
        read = [rows_of_parameter(model, p, rows) for p in noted.read.values()]
        returned = (by_record(call.returned, rows, "the model's output") for call in noted.made)
        self._own = [*read, *own, *(x for each in returned for x in each)]

    def losses(self) -> Tensor:
        """One loss for each record, shape (rows,).

        Raises:
            PrivacyError: the model was given something else for a record than for the batch.
        """
        try:
            losses, given = torch.func.vmap(self._of_one)(*self._own)
        except PrivacyError:
            raise
        except Exception:  # whatever vmap cannot take: counts that differ, draws, .item()
            apart = zip(*(x.unbind() for x in self._own), strict=True)
            each = [self._of_one(*own, place=i) for i, own in enumerate(apart)]
            losses = torch.stack([one for one, _ in each])
            inputs = zip(*(inputs for _, inputs in each), strict=True)
            given = [torch.stack(one) for one in inputs]
        self._refuse_other_inputs(given)
        return losses

    def _of_one(self, *own: Tensor, place: int | None = None) -> tuple[Tensor, list[Tensor]]:
        """The loss of one record, and what it gave the model.

        Args:
            own: its rows of parameters that are read, of the batch, and of what was returned.
            place: of the record; None: nobody can tell, as all are taken at once.
        """
        tensors = iter(own)
        parameters = {key: next(tensors) for key in self._noted.read}
        batch = rebuilt(self._batch, tensors, place)
        known = Known(
            [(call.module, rebuilt(call.returned, tensors, place)) for call in self._noted.made],
            parameters,
        )
        loss = self._loss(Part(self._model, known), batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError("loss must return one number for a batch, as a tensor.")
        if len(known.given) < len(self._noted.made):
            raise PrivacyError(OTHER_INPUTS)
        return loss.reshape(()), [x.detach() for x in tensors_in(known.given)]

    def _refuse_other_inputs(self, given: list[Tensor]) -> None:
        of_batch = tensors_in([call.given for call in self._noted.made])
        if len(given) != len(of_batch) or not all(
            alike(one, expected(x, one, self._rows)) for one, x in zip(given, of_batch, strict=True)
        ):
            raise PrivacyError(OTHER_INPUTS)


def expected(x: Tensor, given: Tensor, rows: int) -> Tensor:
    """Inputs that the records give the model, where a call with the batch was given ``x``."""
    if x.dim() and len(x) and len(x) % rows == 0:
        parts = in_parts(x, rows)
        if parts.shape == given.shape:
            return parts
    return x.expand(rows, *x.shape)  # a constant


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, down to rounding, with what is missing in the same places."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.dtype.is_floating_point:
        return torch.equal(one, other)
    size = other.nan_to_num(0, 0, 0).abs().amax() if other.numel() else 0.0
    return torch.allclose(one, other, rtol=ROUNDING, atol=ROUNDING * float(size), equal_nan=True)
