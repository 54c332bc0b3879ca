"""Places of an image that a convolution's results are sums over, from the layer's geometry alone.

A layer's output, and the gradient of its input, are both sums over places of an image, each with a
row of weights: of the input, and of the output's gradient. Which places a number of the input's
gradient is a sum over depends on where it lies between strides: numbers that lie alike are a phase.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpoptim.gradients.layers.geometry import Axes, output_positions
from dpoptim.gradients.per_sample import native

IN_CACHE = 1 << 17  # numbers of an image and its results together
FEW_WEIGHTS = 1 << 15  # for a vector of outputs, which are read again for every few results
LEAST_FILLED = 1 / 2  # of the vectors of outputs that are computed
Places = NDArray[np.int64]


@dataclass(frozen=True)
class Phase:
    """Results that read the same places, seen from where each of them is.

    Attributes:
        offsets: of these places, (taps,).
        start, to: where in the image each result's places are seen from, and its place among the
            results, (results,).
        weights: which rows of the layer's weights are multiplied, (taps,).
    """

    offsets: Places
    start: Places
    to: Places
    weights: Tensor


@dataclass(frozen=True)
class Way:
    """How results come of an image, from a layer's geometry alone.

    Attributes:
        channels, size: of the image, (C, three axes).
        before, padded: where it lies among zeros, and how many these are, along each axis.
        outputs, places: of the results, (outputs, places).
    """

    channels: int
    size: tuple[int, ...]
    before: tuple[int, ...]
    padded: tuple[int, ...]
    outputs: int
    places: int
    phases: tuple[Phase, ...]

    @property
    def filled(self) -> int:
        """Outputs, in whole vectors."""
        return -(-self.outputs // native.VECTOR) * native.VECTOR

    @property
    def room(self) -> int:
        """Numbers of an image among zeros, and of its results."""
        return self.channels * math.prod(self.padded) + self.places * self.filled

    @property
    def serves(self) -> bool:
        """Whether they are computed in cache, and no more than half for nothing."""
        taps = max(len(each.offsets) for each in self.phases)
        filled = self.outputs >= LEAST_FILLED * self.filled
        return filled and self.room <= IN_CACHE and taps * native.VECTOR <= FEW_WEIGHTS


@lru_cache(maxsize=256)
def way_to_output(
    channels: int,
    outputs: int,
    size: Axes,
    padding: Axes,
    kernel: Axes,
    stride: Axes,
    dilation: Axes,
) -> Way:
    """How a layer's output comes of its input."""
    padded = tuple(s + 2 * side for s, side in zip(size, padding, strict=True))
    places = output_positions(padded, kernel, stride, dilation)
    offsets = [np.arange(k) * gap for k, gap in zip(kernel, dilation, strict=True)]
    starts = [np.arange(n) * step for n, step in zip(places, stride, strict=True)]
    taps = of_channels(channels, padded, offsets)
    phase = Phase(
        taps,
        flat_places(padded, starts),
        np.arange(math.prod(places)),
        torch.from_numpy(np.arange(len(taps))),
    )
    return Way(channels, size, padding, padded, outputs, math.prod(places), (phase,))


@lru_cache(maxsize=256)
def way_to_input_gradient(
    channels: int,
    outputs: int,
    size: Axes,
    padding: Axes,
    kernel: Axes,
    stride: Axes,
    dilation: Axes,
) -> Way:
    """How the gradient of its input comes of that of its output."""
    enlarged = [s + 2 * side for s, side in zip(size, padding, strict=True)]
    places = output_positions(enlarged, kernel, stride, dilation)
    # along an axis, number i reads places (i + padding - k dilation) / stride that are whole
    axes = [
        Axis(*each) for each in zip(size, padding, kernel, stride, dilation, places, strict=True)
    ]
    before = tuple(axis.before for axis in axes)
    padded = tuple(axis.padded for axis in axes)
    phases = []
    for rests in itertools.product(*(range(axis.stride) for axis in axes)):
        alike = [axis.phase(rest) for axis, rest in zip(axes, rests, strict=True)]
        to = flat_places(size, [each.numbers for each in alike])
        if not len(to):
            continue
        places_in_kernel = flat_places(kernel, [each.kernel for each in alike])
        rows = np.arange(outputs)[:, None] * math.prod(kernel) + places_in_kernel
        taps = of_channels(outputs, padded, [each.offsets for each in alike])
        starts = flat_places(padded, [each.starts for each in alike])
        phases.append(Phase(taps, starts, to, torch.from_numpy(rows.flatten())))
    return Way(outputs, places, before, padded, channels, math.prod(size), tuple(phases))


@dataclass(frozen=True)
class OfPhase:
    """Numbers along an axis that lie alike between strides.

    Attributes:
        numbers: their places.
        starts: what they read from, among zeros.
        kernel, offsets: the places of the kernel that meet them, and of what they then read.
    """

    numbers: Places
    starts: Places
    kernel: Places
    offsets: Places


@dataclass(frozen=True)
class Axis:
    """An axis along which a layer's input gets its gradient; of the layer, and its output."""

    size: int
    padding: int
    kernel: int
    stride: int
    dilation: int
    places: int

    @property
    def reach(self) -> int:
        """How far before the place on a level with it a number may read."""
        return self.dilation * (self.kernel - 1) // self.stride

    @property
    def before(self) -> int:
        return max(0, self.reach - self.padding // self.stride)

    @property
    def padded(self) -> int:
        last = (self.size - 1 + self.padding) // self.stride
        return self.before + max(self.places, last + 1)

    def phase(self, rest: int) -> OfPhase:
        """Those of this rest when their places, with padding, are divided by the stride."""
        numbers = np.arange((rest - self.padding) % self.stride, self.size, self.stride)
        shifts = np.arange(self.kernel) * self.dilation - rest
        kernel = (shifts % self.stride == 0).nonzero()[0]
        # of the kernel's last place, which reads first, on: offsets are not negative
        level = (numbers + self.padding) // self.stride + self.before - self.reach
        return OfPhase(numbers, level, kernel, self.reach - shifts[kernel] // self.stride)


def flat_places(size: Axes, along: Sequence[Places]) -> Places:
    """Places in memory, of dense axes so large, of all combinations of places along each: int64."""
    first, second, third = along
    lines = first[:, None] * size[1] + second
    return (lines[..., None] * size[2] + third).flatten()


def of_channels(channels: int, size: Axes, along: Sequence[Places]) -> Places:
    """`flat_places` of every channel, one channel after the other."""
    start = np.arange(channels)[:, None] * math.prod(size)
    return (start + flat_places(size, along)).flatten()
