"""Losses of a batch, taken of each of its records by itself: any loss becomes one a record."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.errors import PrivacyError
from dpoptim.gradients.hooks.read_parameters import rows_of_parameter
from dpoptim.training.losses.by_record import (
    PLAIN,
    copied,
    in_parts,
    is_list_of_each,
    leaves_in,
    rebuilt,
    returned_to_one,
    rows_of,
    tensors_in,
)
from dpoptim.training.losses.parts_of_models import OTHER_INPUTS, Known, Noted, Part

LAST_BITS = 8  # of what is computed, entry by entry, for a record or a batch at a time
Loss = Callable[[Any, Any], Tensor]


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
            the batch, hands on what it returned, reads what may hold something of all records, or
            a batch or loss has another form.

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
        noted = Noted(model, rows)
        loss(Part(model, noted), copied(batch))
        if not noted.made:
            raise PrivacyError("per_sample takes a loss that calls the model it is given.")
        return Records(loss, model, noted, batch, rows).losses()

    return each


class Records:
    """A batch's records, each with its own rows of what the model returned.

    Args:
        noted: what the loss asked of the model, on the batch.
    """

    def __init__(self, loss: Loss, model: nn.Module, noted: Noted, batch: Any, rows: int) -> None:
        self._loss, self._model, self._batch, self._rows = loss, model, batch, rows
        self._noted = noted
        read = [rows_of_parameter(model, p, rows) for p in noted.read.values()]
        own = [x[:, None].clone() for x in tensors_in(batch)]
        self._own = [*read, *own, *(in_parts(x, rows) for x in noted.returned())]

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
            # copies, which are no views of others
            each = [self._of_one(*(x.clone() for x in own), place=i) for i, own in enumerate(apart)]
            losses = torch.stack([one for one, _ in each])
            inputs = [*zip(*(inputs for _, inputs in each), strict=True)]
            if any(x.shape != same[0].shape for same in inputs for x in same):
                raise PrivacyError(OTHER_INPUTS) from None
            given = [torch.stack(same) for same in inputs]
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
        calls = [
            (call.module, returned_to_one(call.returned, tensors, call.parts * self._rows))
            for call in self._noted.made
        ]
        known = Known(calls, parameters, self._noted.settings)
        loss = self._loss(Part(self._model, known), batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise PrivacyError("per_sample takes a loss that returns one number, as a tensor.")
        if len(known.given) < len(self._noted.made):
            raise PrivacyError(OTHER_INPUTS)
        for given, call in zip(known.given, self._noted.made, strict=True):
            refuse_other_things(leaves_in(given), leaves_in(call.given), place)
        return loss.reshape(()), [x.detach() for x in tensors_in(known.given)]

    def _refuse_other_inputs(self, given: list[Tensor]) -> None:
        of_batch = tensors_in([call.given for call in self._noted.made])
        if not all(
            alike(one, expected(x, one, self._rows)) for one, x in zip(given, of_batch, strict=True)
        ):
            raise PrivacyError(OTHER_INPUTS)


def refuse_other_things(given: list[Any], of_batch: list[Any], place: int | None) -> None:
    """Refuse what a record gives the model beside tensors, where it is not what the batch gives.

    Raises:
        PrivacyError: it is not, or nobody can tell.
    """
    if len(given) != len(of_batch):
        raise PrivacyError(OTHER_INPUTS)
    for one, other in zip(given, of_batch, strict=True):
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            continue
        listed = place is not None and is_list_of_each(one) and is_list_of_each(other)
        due = other[place : place + 1] if listed and place is not None else other
        plain = all(isinstance(each, PLAIN) for each in (one if listed else (one,)))
        if not plain or type(one) is not type(due) or one != due:
            raise PrivacyError(OTHER_INPUTS)


def expected(x: Tensor, given: Tensor, rows: int) -> Tensor:
    """Inputs that the records give the model, where a call with the batch was given ``x``."""
    if x.dim() and len(x) and len(x) % rows == 0:
        parts = in_parts(x, rows)
        if parts.shape == given.shape:
            return parts
    return x.expand(rows, *x.shape)  # a constant


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, entry by entry, but for the last bits of what was computed."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.dtype.is_floating_point:
        return torch.equal(one, other)
    rounding = LAST_BITS * torch.finfo(one.dtype).eps
    return torch.allclose(one, other, rtol=rounding, atol=0.0, equal_nan=True)
