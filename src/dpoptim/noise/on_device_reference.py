"""The draws of `kernels`, by NumPy and another implementation of ChaCha20, to try a device by."""

from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

from dpoptim.noise.series import exponential, logarithm
from dpoptim.noise.ziggurat import Indices, Scratch, places_of
from dpoptim.noise.ziggurat_layers import FLOOR, RISE, TAIL_START, Floats

Words = NDArray[np.uint64]
LANES, REGION = 512, 1 << 14  # as in `kernels`, which needs Triton
BLOCKS = REGION // 8


def draws(key: bytes, lengths: Sequence[int]) -> Floats:
    """Draws for the entries of consecutive tensors of these lengths, (sum of the lengths,)."""
    drawn, region = [np.empty(0)], 0
    for length in lengths:
        for start in range(0, length, REGION):
            drawn.append(draws_of_region(key, region, min(REGION, length - start)))
            region += 1
    return np.concatenate(drawn)


def draws_of_region(key: bytes, region: int, entries: int) -> Floats:
    words = keystream(key, 0, region * BLOCKS, BLOCKS)  # a row for each lane
    in_order = words.reshape(-1, LANES, 8).swapaxes(1, 2).ravel()[:entries]
    z = np.empty(entries)
    where, place, layer = places_of(in_order, z, Scratch.of(entries))
    z[where] = settled(key, region * REGION + where, place, layer)
    return z


def settled(key: bytes, entry: Indices, place: Floats, layer: Indices) -> Floats:
    """Draws for throws outside of their layer's inner part, (m,), by entry."""
    z, left, attempt = np.empty(len(place)), np.arange(len(place)), 0
    while len(left):
        attempt += 1
        words = np.array([keystream(key, attempt, int(at), 1)[0, :2] for at in entry[left]])
        first, second = ((words.astype(np.float64) + 0.5) * 2.0**-64).T
        beyond = layer == 0
        excess = -logarithm(first) / TAIL_START
        in_tail = -2.0 * logarithm(second) > excess * excess
        under = FLOOR[layer] + first * RISE[layer] < exponential(-0.5 * place * place)
        fresh, outside = np.empty(len(left)), np.zeros(len(left), bool)
        where, _, fresh_layer = places_of(words[:, 1].copy(), fresh, Scratch.of(len(left)))
        outside[where] = True
        thrown = layer.copy()
        thrown[where] = fresh_layer
        from_tail = np.copysign(TAIL_START + excess, place)
        z[left] = np.where(beyond, from_tail, np.where(under, place, fresh))
        again = np.where(beyond, ~in_tail, ~under & outside)
        place, layer = np.where(beyond, place, fresh)[again], np.where(beyond, layer, thrown)[again]
        left = left[again]
    return z


def keystream(key: bytes, nonce: int, first: int, blocks: int) -> Words:
    """Words of 64 bits of consecutive blocks, (blocks, 8); ``nonce`` is its first 32 bits."""
    start = first.to_bytes(4, "little") + nonce.to_bytes(4, "little") + bytes(8)
    stream = Cipher(algorithms.ChaCha20(key, start), None).encryptor().update(bytes(64 * blocks))
    return np.frombuffer(stream, "<u8").astype(np.uint64).reshape(blocks, 8)
