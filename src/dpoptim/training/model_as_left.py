"""The contents of a model when its run was left, to see whether they are the same still."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.gradients.watch.model_watch import other_entries
from dpoptim.gradients.watch.values import Values, digest

WRAPPED = "module."  # of the names in DistributedDataParallel


class ModelAsLeft:
    """The contents of a model's state dict at one time: names, shapes, values, extra state.

    Args:
        model: as it is now.
    """

    def __init__(self, model: nn.Module) -> None:
        self._values = values_of(model)
        self._checksum = self._values.checksum()
        self._names, self._extra = names_in(self._values), other_entries(model)

    def is_in(self, model: nn.Module) -> bool:
        """Whether the model holds the same, on whichever device, in these or in other tensors.

        Layers that were exchanged or added since are seen, unless they hold the same numbers under
        the same names.
        """
        now = values_of(model)
        same = self._names == names_in(now) and self._checksum == now.checksum()
        return same and self._extra == other_entries(model)


def values_of(model: nn.Module) -> Values:
    return Values([*model.named_buffers(), *model.named_parameters()])


def names_in(values: Values) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    return [(name, each.dtype, tuple(each.shape)) for name, each in values.tensors]


def without_wrappers(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict by its model's own names, where a wrapper or `torch.compile` puts words before.

    A model that is itself one module of the name "module" loses it, as anything compared does.
    """
    plain = {name.replace("_orig_mod.", ""): value for name, value in state.items()}
    if all(name.startswith(WRAPPED) for name in plain):
        plain = {name.removeprefix(WRAPPED): value for name, value in plain.items()}
    return plain if len(plain) == len(state) else dict(state)


def same_entries(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two state dicts hold the same numbers under the same names; what is spread differs.

    What is no tensor (extra state) is compared by its digest.
    """
    return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)


def same(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return digest(one) == digest(other)
    if any(hasattr(each, "full_tensor") for each in (one, other)) or one.dtype != other.dtype:
        return False
    return torch.equal(one.detach().cpu(), other.detach().cpu())
