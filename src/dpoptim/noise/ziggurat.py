"""Standard normal draws from random words, by a ziggurat (Marsaglia and Tsang 2000).

The half density f(x) = exp(-x^2 / 2) is covered by 1,024 layers of equal area. Layer i >= 1 is the
rectangle [0, x_i] x [f(x_i), f(x_{i+1})]; layer 0 is [0, R] x [0, f(R)] with the tail beyond R =
x_1 = 4.04 on its end. A word picks a layer with 10 bits and a signed place in it with 54. Where
the layer lies under the curve over its whole height (99.6 % of draws) the place is the answer.
Otherwise `settle` decides: on the curved end by comparing a uniform height with f, beyond R by
drawing from the exact conditional tail (Marsaglia 1964), which reaches past 13 sigma.

How right it is
    With real numbers in place of words and tables the law is exactly N(0, 1). What finite ones
    change:

    * Tables in float64. The density stays within a factor 1 +- 1e-13 of the normal's (tested
      against 40-digit arithmetic: 4e-14), which is worth a KL divergence below 1e-26 a draw.
    * Spacing. Given its layer, a place is one of 2^54 equally likely points, less than 2^-50
      apart, moved by less than 1.5 of these distances when converted and multiplied by the width.
      So a draw is within 2^-48 of one made with real numbers (in the tail, whose uniforms have 64
      bits, within 2^-38 out to 8.6 sigma), except with a probability below 2^-48 that the two are
      decided differently.
    * Rounding to a grid of step g, 2^-40 <= g <= 1. Rounding is monotone, so the points of a layer
      that land in one cell of the grid are 4 more or fewer than the cell's exact share at most,
      and each cell's probability is right up to a factor 1 +- eta, eta = 2^-47 / g (in the tail on
      average over it). So one rounded draw is within a KL divergence of eta^2 from the rounded
      normal, and m of them within a total variation of sqrt(m / 2) eta (Pinsker): 2e-7 for a
      billion draws at g = 2^-10. This is the worst case; the errors of different layers are
      unrelated and average out.
    * exp and log. `exponential` and `logarithm` are within a factor 1 +- 2^-50 of the true ones
      (tested against 40-digit arithmetic), so `settle` decides one draw in 2^50 otherwise. They
      are made of products and sums in one order: a seed's draws are the same on every processor.
    * The keystream in place of random words: see `KeyStream`.
    * On an accelerator (`kernels`) all of this holds of ChaCha20's words: tables, products, exp and
      log are these, compared with the CPU's to the last bit on a sample before the first use.

    What is left belongs to adding noise in floating point at all: the last bits of `sum + z` can
        betray
    the sum (Mironov 2012), whatever the sampler. Rounding both to a grid closes that, at the price
    in the third point. The time of a draw depends on its value (the 0.4 % that need `settle` take
    longer): a block of thousands hides which it was, a single draw that somebody can time does
    not.
"""

import ctypes
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpoptim.noise.keystream import compiled_keystream
from dpoptim.noise.series import ODD_TERMS, TERMS, exponential, logarithm
from dpoptim.noise.stream import KeyStream
from dpoptim.noise.ziggurat_layers import (
    FLOOR,
    INNER,
    LAYERS,
    RISE,
    STEP,
    STEP_AND_INNER,
    TAIL_START,
    Floats,
)
from dpoptim.runtime.compiled import PLACE, REAL, WHOLE, function, library
from dpoptim.runtime.compiled_work import Piece

Indices = NDArray[np.int64]
Throws = tuple[Indices, Floats, Indices]  # as `throw` returns them

_LAYER_BITS = np.int64(LAYERS - 1)

MOST_PARTS = 64
ENTRY = 8  # bytes of a scratch's numbers
CURVE = struct.Struct("=QQQQQd")  # `Curve` of `settle.c`


@dataclass(frozen=True)
class Functions:
    """The compiled functions of `ziggurat.c` and `settle.c`.

    They do what is done here without them, to the last bit, so that a seed's draws are the same.
    """

    places: Callable[..., int]
    draw: Piece
    draw_in_turn: Callable[..., None]
    outside: Callable[..., int]
    settle: Callable[..., int]
    add: Mapping[torch.dtype, Callable[..., None]]
    put_at: Mapping[torch.dtype, Callable[..., None]]


@cache
def functions() -> Functions | None:
    """The compiled functions; None where there are none."""
    if library() is None:
        return None
    key = (ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64)

    def of_dtypes(name: str, *arguments: Any) -> dict[torch.dtype, Any]:
        return {
            torch.float32: function(f"dpoptim_{name}_float", *arguments),
            torch.float64: function(f"dpoptim_{name}_double", *arguments),
        }

    return Functions(
        function("dpoptim_places", PLACE, WHOLE, *[PLACE] * 5, result=WHOLE),  # type: ignore[arg-type]
        Piece("dpoptim_draw"),
        function("dpoptim_draw_in_turn", ctypes.c_char_p, WHOLE, PLACE),  # type: ignore[arg-type]
        function("dpoptim_outside", PLACE, WHOLE, result=WHOLE),  # type: ignore[arg-type]
        function("dpoptim_settle", *key, WHOLE, *[PLACE] * 6, result=WHOLE),  # type: ignore[arg-type]
        of_dtypes("add", PLACE, WHOLE, PLACE, REAL),
        of_dtypes("put_at", PLACE, WHOLE, PLACE, PLACE, REAL, WHOLE),
    )


def start_of(numbers: NDArray[Any]) -> int:
    """Where they lie, one at least: sooner than numpy says."""
    return ctypes.addressof(ctypes.c_char.from_buffer(numbers.data))


@dataclass(frozen=True)
class Scratch:
    """Buffers for blocks of up to `size` draws: fresh pages cost more than the drawing."""

    words: NDArray[np.uint64]
    layer: Indices
    edge: Floats
    outside: NDArray[np.bool_]
    where: Indices
    found: Indices
    addresses: tuple[int, int, int, int]  # of where, edge, layer and found

    @classmethod
    def of(cls, size: int) -> "Scratch":
        words, layer = np.empty(size, np.uint64), np.empty(size, np.int64)
        edge, outside = np.empty(size), np.empty(size, np.bool_)
        where, found = np.empty(size, np.int64), np.empty(MOST_PARTS, np.int64)
        start, place, of, parts = (each.ctypes.data for each in (where, edge, layer, found))
        return cls(words, layer, edge, outside, where, found, (start, place, of, parts))


def throw(stream: KeyStream, out: Floats, scratch: Scratch) -> Throws:
    """Write a place of a random layer into each entry of `out`, (n,), n <= the scratch's size.

    Returns (where, place, layer), each of shape (m,): the entries of `out` that are *not* normal
    draws yet, because their place is outside the inner part of its layer. They must be replaced by
    `settle(stream, place, layer)`.
    """
    words = scratch.words[: len(out)]
    stream.words(words)
    return places_of(words, out, scratch)


def places_of(words: NDArray[np.uint64], out: Floats, scratch: Scratch) -> Throws:
    """`throw` with these words, whose memory is overwritten."""
    n = len(out)
    if (library := functions()) is not None:
        assert n <= len(scratch.where)
        assert out.flags.c_contiguous
        assert words.flags.c_contiguous
        given = (words.ctypes.data, n, STEP_AND_INNER.ctypes.data, out.ctypes.data)
        m = library.places(*given, *scratch.addresses[:3])
        return scratch.where[:m].copy(), scratch.edge[:m].copy(), scratch.layer[:m].copy()
    layer, edge, outside = scratch.layer[:n], scratch.edge[:n], scratch.outside[:n]
    signed = words.view(np.int64)
    # The layer's bits stay at the low end of the place: they shift its points by less than their
    # distance.
    np.bitwise_and(signed, _LAYER_BITS, layer)
    # "wrap" and "clip" write straight into out, "raise" would not
    STEP.take(layer, out=out, mode="wrap")
    np.multiply(out, signed, out)
    INNER.take(layer, out=edge, mode="wrap")
    magnitude = words.view(np.float64)  # the words are spent, so their memory is free
    np.absolute(out, magnitude)
    np.greater_equal(magnitude, edge, outside)
    where = outside.nonzero()[0]
    return where, out[where], layer[where]


def settle(stream: KeyStream, place: Floats, layer: Indices) -> Floats:
    """Normal draws, (m,), for the m throws outside the inner part of their layer.

    A place on the curved end of its layer stays with the share of the layer's height that is under
    the curve there, else a whole new draw is made; a place beyond R in layer 0 becomes a draw from
    the tail, with its sign.
    """
    if len(place) and functions() is not None and compiled_keystream() is not None:
        return _settled_by_one_call(stream, place, layer)
    settled = np.empty(len(place))
    unsettled = np.arange(len(place))
    while len(unsettled):
        height = FLOOR.take(layer) + _uniforms(stream, len(place)) * RISE.take(layer)
        beyond = layer == 0
        refused = (height >= exponential(-0.5 * place * place)) & ~beyond
        beyond_where, refused_where = beyond.nonzero()[0], refused.nonzero()[0]
        place[beyond_where] = np.copysign(tail(stream, len(beyond_where)), place[beyond_where])
        settled[unsettled] = place  # the refused ones are overwritten below
        unsettled = unsettled[refused_where]
        fresh = np.empty(len(unsettled))
        where, place, layer = throw(stream, fresh, Scratch.of(len(fresh)))
        settled[unsettled] = fresh
        unsettled = unsettled[where]
    return settled


def _settled_by_one_call(stream: KeyStream, place: Floats, layer: Indices) -> Floats:
    library, n = functions(), len(place)
    assert library is not None
    settled, layers = place.copy(), layer.copy()
    room = np.empty((3, n))  # of numbers that are as long as indices
    tables = (STEP_AND_INNER, FLOOR, RISE, TERMS, ODD_TERMS)
    curve = CURVE.pack(*map(start_of, tables), TAIL_START)

    def run(key: bytes, number: int, start: int) -> tuple[int, None]:
        at, each = start_of(room), ENTRY * n
        given = (start_of(settled), start_of(layers), at, at + each, at + 2 * each)
        return library.settle(key, number, start, n, *given, curve), None

    stream.spend(run)
    return settled


def tail(stream: KeyStream, n: int) -> Floats:
    """`n` draws of |Z| given |Z| > R, (n,), by rejection from R + Exp(R) (Marsaglia 1964)."""
    drawn = [np.empty(0)]
    missing = n
    while missing:
        excess = -logarithm(_uniforms(stream, missing)) / TAIL_START
        accepted = -2.0 * logarithm(_uniforms(stream, missing)) > excess * excess
        drawn.append(TAIL_START + excess[accepted])
        missing -= len(drawn[-1])
    return np.concatenate(drawn)


def _uniforms(stream: KeyStream, n: int) -> Floats:
    """`n` uniforms in (0, 1], (n,): words moved to their cell's middle, so that logs are finite."""
    words = np.empty(n, np.uint64)
    stream.words(words)
    return (words.astype(np.float64) + 0.5) * 2.0**-64
