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
    * The keystream in place of random words: see `KeyStream`.

    What is left belongs to adding noise in floating point at all: the last bits of `sum + z` can
        betray
    the sum (Mironov 2012), whatever the sampler. Rounding both to a grid closes that, at the price
    in the third point. The time of a draw depends on its value (the 0.4 % that need `settle` take
    longer): a block of thousands hides which it was, a single draw that somebody can time does
    not.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpoptim import compiled
from dpoptim.noise.few_rows import FewRows, Vector
from dpoptim.noise.keystream import compiled_keystream
from dpoptim.noise.stream import KeyStream

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Throws = tuple[Indices, Floats, Indices]  # as `throw` returns them

LAYERS = 1024
# The R at which 1,024 layers of equal area end at f = 1, solved in 50 digits.
TAIL_START = 4.0388498461095045227144234053359312
_AREA = 0.0012263246463530880728853709377271370619  # R f(R) + integral of f beyond R
_LAYER_BITS = np.int64(LAYERS - 1)


def _edges() -> Floats:
    """x_0 > x_1 = R > ... > x_1024 = 0; x_0 = area / f(R): layer 0's width as a rectangle."""
    edges = [_AREA / np.exp(-0.5 * TAIL_START**2), TAIL_START]
    while len(edges) < LAYERS:
        x = edges[-1]
        edges.append(np.sqrt(-2.0 * np.log(np.exp(-0.5 * x * x) + _AREA / x)))
    return np.array([*edges, 0.0])


_EDGES = _edges()
_HEIGHTS = np.exp(-0.5 * _EDGES**2)
# a word read as a signed integer times this is a place in the layer
_STEP = _EDGES[:-1] * 2.0**-63
# nearer to 0 than this, the layer lies under the curve over its whole height
_INNER = _EDGES[1:].copy()
_LAYERS = np.stack([_STEP, _INNER], 1)
_FLOOR = _HEIGHTS[:-1].copy()
_RISE = np.diff(_HEIGHTS)

WAYS = ("in", "added_to", "over_rows_of")  # of `ziggurat.c` to put draws into a vector


def tables() -> tuple[Floats, Floats]:
    """For each layer: what a signed word is multiplied with, and the edge of its inner part."""
    return _STEP, _INNER


@cache
def functions() -> ctypes.CDLL | None:
    """The compiled functions of `ziggurat.c`, declared; None where there are none.

    They do what is done here without them, to the last bit, so that a seed's draws are the same.
    """
    found = compiled.library()
    if found is None:
        return None
    whole, some, real = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
    found.functions.dpoptim_places.argtypes = [some, whole, some, some, some, some, some]
    found.functions.dpoptim_places.restype = whole
    for add in (found.functions.dpoptim_add_float, found.functions.dpoptim_add_double):
        add.argtypes, add.restype = [some, whole, some, real], None
    for way in WAYS:
        for put in putting(found.functions, way).values():
            put.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, whole, some, some]
            put.argtypes += [real, some, some, some, some]
            put.restype = whole
    return found.functions


def putting(library: ctypes.CDLL, way: str) -> dict[torch.dtype, Any]:
    """The functions that put draws into numbers of a dtype, in one of `WAYS`."""
    return {
        torch.float32: getattr(library, f"dpoptim_normals_{way}_float"),
        torch.float64: getattr(library, f"dpoptim_normals_{way}_double"),
    }


@dataclass(frozen=True)
class Scratch:
    """Buffers for blocks of up to `size` draws: fresh pages cost more than the drawing."""

    words: NDArray[np.uint64]
    layer: Indices
    edge: Floats
    outside: NDArray[np.bool_]
    where: Indices

    @classmethod
    def of(cls, size: int) -> "Scratch":
        words, layer = np.empty(size, np.uint64), np.empty(size, np.int64)
        edge, outside = np.empty(size), np.empty(size, np.bool_)
        return cls(words, layer, edge, outside, np.empty(size, np.int64))


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
        m = library.dpoptim_places(
            *(words.ctypes.data, n, _LAYERS.ctypes.data, out.ctypes.data),
            *(each.ctypes.data for each in (scratch.where, scratch.edge, scratch.layer)),
        )
        return scratch.where[:m].copy(), scratch.edge[:m].copy(), scratch.layer[:m].copy()
    layer, edge, outside = scratch.layer[:n], scratch.edge[:n], scratch.outside[:n]
    signed = words.view(np.int64)
    # The layer's bits stay at the low end of the place: they shift its points by less than their
    # distance.
    np.bitwise_and(signed, _LAYER_BITS, layer)
    # "wrap" and "clip" write straight into out, "raise" would not
    _STEP.take(layer, out=out, mode="wrap")
    np.multiply(out, signed, out)
    _INNER.take(layer, out=edge, mode="wrap")
    magnitude = words.view(np.float64)  # the words are spent, so their memory is free
    np.absolute(out, magnitude)
    np.greater_equal(magnitude, edge, outside)
    where = outside.nonzero()[0]
    return where, out[where], layer[where]


def thrown_by_one_call(out: Vector) -> bool:
    """Whether `throw_onto` can: with the library, on a processor with instructions for AES."""
    served = out.is_cpu and out.dtype in (torch.float32, torch.float64)
    return served and functions() is not None and compiled_keystream() is not None


def throw_onto(stream: KeyStream, out: Vector, std: float | None, scratch: Scratch) -> Throws:
    """`throw`, and add ``std`` times its draws to ``out``, or (None) write them, in one pass.

    Nothing is added where `settle` has to decide, and 0 is written there.

    Args:
        out: (n,), contiguous, n <= the scratch's size; see `thrown_by_one_call`.
    """
    library = functions()
    assert library is not None
    assert len(out) <= len(scratch.where)
    if isinstance(out, FewRows):
        assert std is not None
        target, rows, way = out.out, ctypes.byref(out.rows()), "over_rows_of"
    else:
        target, rows, way = out, None, "in" if std is None else "added_to"
    assert target.is_contiguous()
    m = stream.spend(
        len(out),
        putting(library, way)[out.dtype],
        *(_LAYERS.ctypes.data, target.data_ptr(), 0.0 if std is None else std),
        *(each.ctypes.data for each in (scratch.where, scratch.edge, scratch.layer)),
        rows,
    )
    return scratch.where[:m].copy(), scratch.edge[:m].copy(), scratch.layer[:m].copy()


def settle(stream: KeyStream, place: Floats, layer: Indices) -> Floats:
    """Normal draws, (m,), for the m throws outside the inner part of their layer.

    A place on the curved end of its layer stays with the share of the layer's height that is under
    the curve there, else a whole new draw is made; a place beyond R in layer 0 becomes a draw from
    the tail, with its sign.
    """
    settled = np.empty(len(place))
    unsettled = np.arange(len(place))
    while len(unsettled):
        height = _FLOOR.take(layer) + _uniforms(stream, len(place)) * _RISE.take(layer)
        beyond = layer == 0
        refused = (height >= np.exp(-0.5 * place * place)) & ~beyond
        beyond_where, refused_where = beyond.nonzero()[0], refused.nonzero()[0]
        place[beyond_where] = np.copysign(tail(stream, len(beyond_where)), place[beyond_where])
        settled[unsettled] = place  # the refused ones are overwritten below
        unsettled = unsettled[refused_where]
        fresh = np.empty(len(unsettled))
        where, place, layer = throw(stream, fresh, Scratch.of(len(fresh)))
        settled[unsettled] = fresh
        unsettled = unsettled[where]
    return settled


def tail(stream: KeyStream, n: int) -> Floats:
    """`n` draws of |Z| given |Z| > R, (n,), by rejection from R + Exp(R) (Marsaglia 1964)."""
    drawn = [np.empty(0)]
    missing = n
    while missing:
        excess = -np.log(_uniforms(stream, missing)) / TAIL_START
        accepted = -2.0 * np.log(_uniforms(stream, missing)) > excess * excess
        drawn.append(TAIL_START + excess[accepted])
        missing -= len(drawn[-1])
    return np.concatenate(drawn)


def _uniforms(stream: KeyStream, n: int) -> Floats:
    """`n` uniforms in (0, 1], (n,): words moved to their cell's middle, so that logs are finite."""
    words = np.empty(n, np.uint64)
    stream.words(words)
    return (words.astype(np.float64) + 0.5) * 2.0**-64
