"""Outputs of a model in the first batches, as places in autograd's graph."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dpoptim.runtime.torch_internals import pytree

MICROBATCHES = 4  # that are looked at
OF_A_PART = -1


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors that a model returned, in order.

    Not what else is among them, such as a cache, which some return in evaluation mode alone.
    """
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


class SeenOutputs:
    """The outputs of a microbatch's forward passes, in the first ones of a run.

    Attributes:
        edges: where the gradients of these outputs pass, and which of the tensors returned each
            is, or `OF_A_PART` that was called by itself. They keep the graph, and no output.
        sizes: of all axes of the model's inputs but the records'.
    """

    def __init__(self) -> None:
        self._left = MICROBATCHES
        self.edges: list[tuple[int, GradientEdge]] = []
        self.sizes: set[int] = set()

    def begin(self) -> None:
        """A microbatch is delivered: outputs of the one before are forgotten."""
        self._left -= 1
        self.edges, self.sizes = [], set()

    def see_inputs(self, leaves: Any, axis: int) -> None:
        if self._left >= 0:
            shapes = [list(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
            self.sizes |= {size for shape in shapes for size in shape[:axis] + shape[axis + 1 :]}

    def see(self, output: Any) -> None:
        if self._left >= 0 and torch.is_grad_enabled():
            self._see(enumerate(tensors_of(output)))

    def see_part(self, inputs: Any, axis: int, output: Any) -> None:
        """See a module that is run outside of the model's forward pass."""
        if self._left >= 0 and torch.is_grad_enabled():
            self.see_inputs(pytree.tree_leaves(inputs), axis)
            self._see((OF_A_PART, tensor) for tensor in tensors_of(output))

    def _see(self, tensors: Iterable[tuple[int, Tensor]]) -> None:
        self.edges += [
            (place, get_gradient_edge(tensor))
            for place, tensor in tensors
            if tensor.grad_fn is not None
        ]
