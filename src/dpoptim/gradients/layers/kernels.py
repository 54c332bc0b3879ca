"""Large kernels of convolutions: their gradients, formed for one record after the other."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dpoptim.gradients.arithmetic.batch_invariant import aligned
from dpoptim.gradients.arithmetic.multiplication import plain
from dpoptim.gradients.arithmetic.norms import NORM_BLOCK, blocks_in, read_part
from dpoptim.gradients.arithmetic.onednn import transposed_product
from dpoptim.gradients.arithmetic.position_sums import sum_positions
from dpoptim.gradients.arithmetic.precision import widened
from dpoptim.gradients.layers.geometry import (
    Convolution,
    geometry,
    output_size,
    padded_size,
    padding_inside,
)
from dpoptim.gradients.per_sample import native
from dpoptim.gradients.per_sample.per_sample_grads import (
    Chunk,
    FormMeasured,
    record_by,
    zero_outside,
)
from dpoptim.runtime.worker_threads import worker_threads

WORK = 1 << 26  # multiplications for a record's gradient that one thread has at a time
# from which on there are two pieces at least, where a model's other layers may be too few to share
WORTH_HALVES = 1 << 17
LEAST_FILLED = 1 / 2  # of the vectors of outputs that compiled functions compute
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
        padding, padded = padding_inside(module), padded_size(module, x.shape[2:])
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

        entries = features * module.out_channels
        return [Chunk(0, entries, form, positions=math.prod(places))]

    def in_order(self, total: Tensor) -> Tensor:
        """From (p, kernel..., C) to (p, C, kernel...)."""
        kernels = total.view(len(total), -1, *self.module.kernel_size, self.module.in_channels)
        return kernels.movedim(-1, 2).flatten(1)


@dataclass(frozen=True)
class Compiled:
    """Compiled functions form some records, and measure them meanwhile: see `native`.

    **Guarantee.** A record's gradient and its norm are functions of its own image and output
    gradients, to the last bit, with any number of threads.

    Without groups: x of shape (B, C, space...), g of shape (B, p, positions...), narrow dtypes
    widened.
    """

    module: Convolution
    x: Tensor
    g: Tensor

    @classmethod
    def serves(cls, module: Convolution, like: Tensor) -> bool:
        """Whether they can, and no more than half of what they compute is thrown away."""
        outputs = module.out_channels
        filled = outputs >= LEAST_FILLED * native.VECTOR * -(-outputs // native.VECTOR)
        return module.groups == 1 and filled and native.serves(like) and plain(like)

    def one_by_one(self) -> list[Chunk]:
        module = self.module
        rows = module.in_channels * math.prod(module.kernel_size[:-1])
        of_row = module.kernel_size[-1] * module.out_channels
        positions = max(1, math.prod(self.g.shape[2:]))
        most = max(1, WORK // (of_row * positions))
        if rows * of_row * positions >= WORTH_HALVES:
            most = min(most, -(-rows // 2))
        return [
            self._chunk(start, min(start + most, rows), of_row, positions)
            for start in range(0, rows, most)
        ]

    def _chunk(self, first: int, last: int, of_row: int, positions: int) -> Chunk:
        sizes = native.Geometry(*geometry(self.module, self.x.shape[2:]), first, last, NORM_BLOCK)
        entries = (last - first) * of_row

        def of_rows(K: int, keep: Tensor | None) -> FormMeasured:
            def form_measured(part: slice, room: Tensor, norms: Tensor, block: int) -> None:
                rows = slice(K * part.start, K * part.stop)
                x, g = widened([self.x[rows], self.g[rows]])
                sizes.block = block
                there = None if keep is None else keep[rows].contiguous()
                native.form(sizes, x.contiguous(), g.contiguous(), room, norms, there)

            return form_measured

        form_measured = of_rows(1, None)
        return Chunk(
            *(first * of_row, entries, record_by(form_measured, entries)),
            form_measured=form_measured,
            of_rows=of_rows,
            positions=positions,
        )

    def in_order(self, total: Tensor) -> Tensor:
        return outputs_first(self.module, total)


def outputs_first(module: Convolution, total: Tensor) -> Tensor:
    """From (k, C, kernel..., p) to (k, p, C, kernel...), all axes after the first in one."""
    return total.unflatten(1, (-1, module.out_channels)).transpose(1, 2).flatten(1)


@dataclass(frozen=True)
class Formed:
    """Gradients that compiled functions have formed, and that take less memory than ingredients.

    **Guarantee.** That of `Compiled`.

    Attributes:
        gradients: float32, in the order of `Compiled`, (B, entries).
    """

    module: Convolution
    gradients: Tensor

    @classmethod
    def of(cls, by: Compiled, records: int, entries: int) -> "Formed":
        """Records dealt to threads; these change no number."""
        gradients = by.g.new_empty(records, entries, dtype=torch.float32)
        threads = torch.get_num_threads()
        step = max(1, -(-records // threads))
        parts = [slice(i, min(i + step, records)) for i in range(0, records, step)]
        with worker_threads(threads) as run:
            run([partial(write, by, part, gradients) for part in parts])
        return cls(by.module, gradients)

    def one_by_one(self) -> list[Chunk]:
        entries = self.gradients.shape[1]
        form = record_by(self._measure, entries)
        return [Chunk(0, entries, form, form_measured=self._measure, of_rows=self._of_rows)]

    def _measure(self, part: slice, room: Tensor, norms: Tensor, block: int) -> None:
        read_part(room.copy_(self.gradients[part]), norms, block=block)

    def _of_rows(self, K: int, keep: Tensor | None) -> FormMeasured:
        def measure(part: slice, room: Tensor, norms: Tensor, block: int) -> None:
            rows = slice(K * part.start, K * part.stop)
            of_rows = self.gradients[rows]
            if keep is not None:
                of_rows = zero_outside(of_rows, keep[rows])
            room.copy_(sum_positions(of_rows.unflatten(0, (-1, K))))
            read_part(room, norms, block=block)

        return measure

    def in_order(self, total: Tensor) -> Tensor:
        return outputs_first(self.module, total)

    def part(self, records: slice, most: int) -> Tensor:
        return self.in_order(self.gradients[records])


def write(by: Compiled, part: slice, gradients: Tensor) -> None:
    """Form the gradients of some records in their place."""
    for chunk in by.one_by_one():
        assert chunk.form_measured is not None
        norms = torch.empty(part.stop - part.start, blocks_in(chunk.entries, NORM_BLOCK))
        into = gradients[part, chunk.start : chunk.start + chunk.entries]
        chunk.form_measured(part, into, norms, NORM_BLOCK)
