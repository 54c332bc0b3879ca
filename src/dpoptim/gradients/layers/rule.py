"""Hooks' knowledge of a layer: forward pass, its input's and parameters' gradients."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from dpoptim.errors import PrivacyError, axes_of
from dpoptim.gradients.per_sample.per_sample_grads import PerSampleGrad

Saved = tuple[Tensor, ...]
PerSampleGrads = Mapping[str, PerSampleGrad]
Module = TypeVar("Module", bound=nn.Module)


class LayerRule(ABC, Generic[Module]):
    """Per-sample gradients of a layer with one input and one output. Stateless: one serves all.

    Attributes:
        narrow: whether torch.autocast runs the layer in its narrow dtype; else in float32.
        casts: whether `forward` itself casts parameters to the dtype of a narrow input.
        at_once: whether the backward pass forms per-sample gradients: see `forms_at_once`.
        widens: whether per-sample gradients take what autocast made narrow as it is, and widen it
            to float32 where they are formed; else they are given float32.
        positions: how many rows of what the layer sees are one record's.
    """

    narrow = False
    casts = False
    at_once = False
    widens = False
    positions = 1

    def check(self, module: Module, name: str) -> None:
        """Raise `PrivacyError` if the module's options cannot be clipped record by record."""
        return

    def axes(self, module: Module) -> int:
        """The fewest axes that a batch has."""
        return 2

    def prepare(self, module: Module, name: str, x: Tensor, rows: int | None) -> Tensor:
        """Bring the input to the form that `forward` takes, differentiably; refuse unbatched input.

        Args:
            rows: records in the model's current input, where known.
        """
        if x.dim() < self.axes(module):
            raise unbatched(module, name, x)
        return x

    @abstractmethod
    def forward(self, module: Module, x: Tensor) -> tuple[Tensor, Saved]:
        """The layer's output and the tensors to save. Runs without autograd."""

    @abstractmethod
    def input_gradient(self, module: Module, saved: Saved, g: Tensor) -> Tensor | None:
        """Gradient with respect to ``x``, given the output's gradient ``g``."""

    @abstractmethod
    def per_sample_grads(self, module: Module, saved: Saved, g: Tensor) -> PerSampleGrads:
        """The per-record gradients of the parameters, by their names in the module."""

    def forms_at_once(self, module: Module, saved: Saved, g: Tensor) -> bool:
        """Whether the backward pass forms per-sample gradients, by public numbers.

        Where they are smaller than what they are made of, which is free to go then.
        """
        return self.at_once

    def all_gradients(
        self, module: Module, saved: Saved, g: Tensor
    ) -> tuple[Tensor | None, PerSampleGrads]:
        """`input_gradient` and `per_sample_grads` of layers that form them at once."""
        formed = self.per_sample_grads(module, saved, g)
        return self.input_gradient(module, saved, g), formed


AnyRule = LayerRule[Any]


def unbatched(module: nn.Module, name: str, x: Tensor) -> PrivacyError:
    """An input with other axes than records have in a batch."""
    return PrivacyError(
        f"layer {name!r} ({type(module).__name__}) got an input of {axes_of(x)} without a record "
        "axis. Fix: keep the batch axis first, e.g. x[None] for a single record."
    )
