"""Losses that a loop differentiates by itself, ``loss.backward()``."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from torch import Tensor

from dpoptim.errors import PrivacyError
from dpoptim.gradients.engine import Engine
from dpoptim.training.losses.handed_over import HandedOver, Scalar
from dpoptim.training.losses.other_parameters import (
    own_parameters,
    parameters_below,
    refuse_other_parameters,
)
from dpoptim.training.other_libraries import NO_SCALER


class BareLosses:
    """Reads them as `HandedOver` reads the losses that it is given.

    Args:
        engine: of the model.
        handed_over: what knows of other losses.

    **Guarantee.** What ``private.backward`` would refuse is refused, and what it would take is
    taken as there: a mean for a mean, a sum for a sum. For records of several rows, and in threads
    other than the one that attached, the loss is what was declared, a mean unless told, on trust.
    """

    def __init__(self, engine: Engine, handed_over: HandedOver) -> None:
        self._engine, self._handed_over = engine, handed_over
        self._thread = threading.get_ident()  # others may differentiate what is theirs

    @contextmanager
    def around(self, loss: Tensor, everywhere: bool) -> Iterator[None]:
        """Around ``loss.backward()``, of this model or another.

        Args:
            everywhere: whether all leaves get gradients, and not only those that are named.
        """
        engine, scalar = self._engine, None
        ours = threading.get_ident() == self._thread and engine.handed == "bare"
        # of one record alone a vector has one entry, too, which is its mean and its sum
        is_scalar = loss.numel() == 1 and (not loss.dim() or engine.rows_open > 1)
        if ours and engine.rows_open and loss.requires_grad and is_scalar:
            try:
                scalar = self._read(loss.reshape(()), everywhere)
            except PrivacyError as error:
                engine.refusal = error  # if this loss turns out to be the model's
        if scalar is None:
            with self._refusing(loss):
                yield
            return
        rows = engine.rows_open
        means = self._handed_over.own_means(engine, loss) if self._is_own(loss) else nullcontext()
        with means as own:
            scalar = scalar if own is None else replace(scalar, reduction=own)
            with engine.handing(loss, scalar.reduction, "scalar"):
                yield
        if engine.rows_open != rows:
            self._handed_over.keep(self._engine, scalar)

    @contextmanager
    def _refusing(self, loss: Tensor) -> Iterator[None]:
        """Raise what was found of a loss, if it turns out to be the model's."""
        engine = self._engine
        try:
            yield
        except PrivacyError as error:  # of the model's layers, which know less of the loss
            if engine.refusal is None or not self._is_own(loss):
                raise
            raise engine.refusal from error
        finally:
            engine.refusal = None

    def refuse_scale(self, loss: Tensor) -> None:
        """Refuse a loss of this model that a GradScaler is to scale.

        Raises:
            PrivacyError: with what to do without.
        """
        if self._is_own(loss):
            raise PrivacyError(NO_SCALER)

    def _is_own(self, loss: Tensor) -> bool:
        """Whether it depends on this model's parameters."""
        own = own_parameters(self._engine.model, self._engine.placement)
        return not own.isdisjoint(map(id, parameters_below(loss)))

    def _read(self, loss: Tensor, everywhere: bool) -> Scalar | None:
        engine = self._engine
        if everywhere:
            refuse_other_parameters(loss, engine.model, engine.placement)
        self._handed_over.refuse_coupled(engine, loss)
        if engine.isolation.alone or engine.rows.per_record > 1 or not engine.takes_scalars:
            return None
        return self._handed_over.read(engine, loss)
