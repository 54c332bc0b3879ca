"""Large kernels of convolutions: their gradients, formed for one record after the other."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dpoptim.gradients.arithmetic import widened
from dpoptim.gradients.batch_invariant import aligned
from dpoptim.gradients.layers.geometry import Convolution, output_size, padding_inside
from dpoptim.gradients.multiplication import transposed_product
from dpoptim.gradients.per_sample_grads import Chunk

PATCH_ENTRIES = 1 << 21  # of patches that are multiplied at once


@dataclass(frozen=True)
class AFewAtOnce:
    """A few records are formed in one go.

    Attributes:
        form: maps a slice of records, and how many go at once, to their gradients, shape (b,
            entries).
        few: how many; a public constant.
    """

    form: Callable[[slice, int], Tensor]
    records: int
    few: int
    entries: int

    def one_by_one(self) -> list[Chunk]:
        start, formed = -1, torch.empty(0)

        def one(record: int) -> Tensor:
            nonlocal start, formed
            if start != record - record % self.few:
                start = record - record % self.few
                formed = self.form(slice(start, min(start + self.few, self.records)), self.few)
            return aligned(formed[record - start])

        return [Chunk(0, self.entries, one)]

    def in_order(self, total: Tensor) -> Tensor:
        return total


@dataclass(frozen=True)
class ByPatches:
    """Products of output gradients and patches, channels last, so that a patch is copied in rows.

    **Guarantee.** A record's gradient is a function of its own image and output gradients, to the
    last bit (tested).

    For float32 on the CPU, without groups: x of shape (B, C, space...), g of shape (B, p,
    positions...).
    """

    module: Convolution
    x: Tensor
    g: Tensor

    def one_by_one(self) -> list[Chunk]:
        module, x, g = self.module, self.x, self.g.flatten(2)
        channels, kernel = module.in_channels, module.kernel_size
        padding = padding_inside(module)
        padded = [size + 2 * side for size, side in zip(x.shape[2:], padding, strict=True)]
        image = x.new_zeros(*padded, channels, dtype=torch.float32)
        inside = image[
            tuple(slice(side, side + size) for size, side in zip(x.shape[2:], padding, strict=True))
        ]
        places = output_size(module, padded)
        *space, _ = image.stride()
        steps = [step * stride for step, stride in zip(module.stride, space, strict=True)]
        gaps = [gap * stride for gap, stride in zip(module.dilation, space, strict=True)]
        windows = image.as_strided((*places, *kernel, channels), (*steps, *gaps, 1))
        features = math.prod(kernel) * channels
        # Whole rows of places at a time, as many as memory allows; never by how many records there
        # are.
        rows = max(1, PATCH_ENTRIES // (features * math.prod(places[1:])))

        def form(record: int) -> Tensor:
            inside.copy_(x[record].movedim(0, -1))
            formed: Tensor | None = None
            for start in range(0, places[0], rows):
                patches = windows[start : start + rows].reshape(-1, features)
                first = start * math.prod(places[1:])
                (slopes,) = widened([g[record, :, first : first + len(patches)]])
                part = transposed_product(slopes.T, patches)
                formed = part if formed is None else formed.add_(part)
            assert formed is not None
            return formed.view(-1)

        return [Chunk(0, features * module.out_channels, form)]

    def in_order(self, total: Tensor) -> Tensor:
        """From (p, kernel..., C) to (p, C, kernel...)."""
        kernels = total.view(len(total), -1, *self.module.kernel_size, self.module.in_channels)
        return kernels.movedim(-1, 2).flatten(1)
