"""What hooks need to know of a layer: forward pass, its input's and parameters' gradients."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from dpoptim.gradients.per_sample_grads import PerSampleGrad


class LayerRule(Protocol):
    """Per-sample gradients of a layer with one input and one output. Stateless: one serves all."""

    @property
    def narrow(self) -> bool:
        """Whether torch.autocast runs the layer in its narrow dtype; else in float32."""
        ...

    @property
    def at_once(self) -> bool:
        """Whether the backward pass makes per-sample gradients, smaller than their ingredients."""
        ...

    @property
    def widens(self) -> bool:
        """Whether per-sample gradients take what autocast made narrow as it is, and widen it to
        float32 where they are formed; else they are given float32."""
        ...

    def check(self, module: nn.Module, name: str) -> None:
        """Raise `PrivacyError` if the module's options cannot be clipped record by record."""
        ...

    def prepare(self, module: nn.Module, name: str, x: Tensor, rows: int | None) -> Tensor:
        """Bring the input to the form that `forward` takes, differentiably; refuse unbatched input.

        Args:
            rows: records in the model's current input, where known.
        """
        ...

    def forward(self, module: nn.Module, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The layer's output and the tensors to save. Runs without autograd."""
        ...

    def input_gradient(
        self, module: nn.Module, saved: tuple[Tensor, ...], g: Tensor
    ) -> Tensor | None:
        """Gradient with respect to ``x``, given the output's gradient ``g``."""
        ...

    def per_sample_grads(
        self, module: nn.Module, saved: tuple[Tensor, ...], g: Tensor
    ) -> Mapping[str, PerSampleGrad]:
        """The per-record gradients of the parameters, by their names in the module."""
        ...
