"""``loss(model, batch)``: whether what was given as ``loss=`` is called so."""

import inspect
from typing import Any

from torch import Tensor, nn

from dpoptim.errors import PrivacyError
from dpoptim.opacus_words import LOSS_TAKES


def require_loss(loss: Any) -> None:
    """Refuse what cannot be called as ``loss(model, batch)``, before any record is read.

    Raises:
        TypeError: a number, a text, a module of torch's losses, a function of other arguments.
    """
    if not callable(loss):
        raise TypeError(f"loss: got {type(loss).__name__}. Fix: {LOSS_TAKES}.")
    if isinstance(loss, nn.modules.loss._Loss) or is_functional(loss):
        raise TypeError(f"loss: {name_of(loss)} takes outputs and targets. Fix: {LOSS_TAKES}.")
    try:
        arguments = inspect.signature(loss)
    except (TypeError, ValueError):  # of what is written in C, say
        return
    try:
        arguments.bind(None, None)
    except TypeError:
        raise TypeError(f"loss: {name_of(loss)} takes {arguments}. Fix: {LOSS_TAKES}.") from None


def is_functional(loss: Any) -> bool:
    """Whether it is one of torch's functions of outputs and targets."""
    module = getattr(loss, "__module__", None) or ""
    return module.split(".")[0] == "torch" and not isinstance(loss, nn.Module)


def name_of(loss: Any) -> str:
    return str(getattr(loss, "__name__", type(loss).__name__))


def refuse_other_arguments(error: Exception, model: nn.Module) -> None:
    """Refuse a loss that failed since it took its arguments for others.

    Args:
        error: raised by ``loss(model, batch)``.

    Raises:
        PrivacyError: the model was taken for a tensor, or the batch for the model. It quotes
            nothing.
    """
    text, name = str(error), type(model).__name__
    attribute = getattr(error, "name", None) if isinstance(error, AttributeError) else None
    as_outputs = f"not {name}" in text or (
        f"'{name}' object" in text
        and (isinstance(error, TypeError) or hasattr(Tensor, attribute or ""))
    )
    as_model = isinstance(error, TypeError) and any(
        f"'{each}' object is not callable" in text for each in ("list", "tuple", "dict", "Tensor")
    )
    if as_outputs or as_model:
        taken = "the model for outputs" if as_outputs else "the batch for the model"
        raise PrivacyError(f"loss took {taken}. Fix: {LOSS_TAKES}.") from None
