"""Convolutions of small images by compiled functions (`convolutions.c`): outputs, and back.

oneDNN lays images out anew around every convolution; with few channels that takes many times as
long as the arithmetic. Here a record's image lies in cache while all of its results are computed,
as sums over places of it (`image_places`).

**Guarantee.** Each record's results are functions of its own image and the weights, to the last
bit, beside any others and on however many threads: each number is one chain of multiplications and
additions, in an order that the layer's geometry alone decides.
"""

import math
import struct
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dpoptim.gradients.arithmetic.multiplication import plain
from dpoptim.gradients.layers.geometry import (
    Convolution,
    geometry,
    output_size,
    padded_size,
)
from dpoptim.gradients.layers.image_places import Way, way_to_input_gradient, way_to_output
from dpoptim.gradients.per_sample import native
from dpoptim.runtime.compiled_work import Piece, Task, run_in_turn

CONVOLVING, PHASE = struct.Struct("=19q"), struct.Struct("=6q")  # of `convolutions.c`


@cache
def function() -> Piece:
    return Piece("dpoptim_convolve")


def output(module: Convolution, x: Tensor) -> Tensor | None:
    """A layer's output: (B, C, space...) -> (B, p, positions...); None where others are faster."""
    if not usual(module, x):
        return None
    places = output_size(module, padded_size(module, x.shape[2:]))
    if x.shape[1] != module.in_channels or min(places) < 1:
        return None  # which PyTorch refuses
    way = way_to_output(*geometry(module, x.shape[2:]))
    if not way.serves:
        return None
    bias = None if module.bias is None else module.bias.detach()
    weights = module.weight.detach().flatten(1).T
    return convolved(way, x, weights, bias).view(len(x), -1, *places)


def input_gradient(module: Convolution, x: Tensor, weight: Tensor, g: Tensor) -> Tensor | None:
    """Gradient of the input, of the shape of ``x``, from the output's; None: see `output`."""
    if not usual(module, g) or weight.shape != module.weight.shape or not plain(weight):
        return None
    way = way_to_input_gradient(*geometry(module, x.shape[2:]))
    if not way.serves:
        return None
    weights = weight.detach().flatten(2).transpose(1, 2).flatten(0, 1)  # (p k, C)
    return convolved(way, g, weights, None).view_as(x)


def usual(module: Convolution, x: Tensor) -> bool:
    """Whether these are faster for such layers, and know tensors like this.

    They are where a kernel moves by several places at once, which oneDNN is slow with; with others
    it takes as long.
    """
    weight = module.weight
    strided = module.groups == 1 and math.prod(module.stride) > 1
    known = native.serves(x) and plain(x) and x.numel() > 0
    return strided and known and weight.dtype == x.dtype and plain(weight)


def convolved(way: Way, x: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
    """The results of all records, (B, outputs, places).

    Args:
        x: dense images, float32, (B, C, space...).
        weights: (rows, outputs), of which each phase takes its own.
    """
    found = native.loaded()
    x = x.contiguous()
    missing = (0, way.filled - way.outputs)
    of_phases = [F.pad(weights[each.weights], missing) for each in way.phases]
    filled = None if bias is None else F.pad(bias, missing)
    out = torch.empty(len(x), way.outputs, way.places, dtype=torch.float32, device="cpu")
    given = CONVOLVING.pack(
        *(len(x), way.channels, *way.size, *way.before, *way.padded),
        *(way.outputs, way.filled, way.places, len(way.phases)),
        *(found.level, x.data_ptr(), 0 if filled is None else filled.data_ptr(), out.data_ptr()),
    )
    work = 0
    for phase, rows in zip(way.phases, of_phases, strict=True):
        taps, results = len(phase.offsets), len(phase.to)
        work += taps * results * way.filled
        given += PHASE.pack(
            *(taps, phase.offsets.ctypes.data, rows.data_ptr()),
            *(results, phase.start.ctypes.data, phase.to.ctypes.data),
        )
    run_in_turn(given, [Task(function(), len(x) * work, room=way.room)])
    return out
