"""Noise that is drawn where a tensor lies: the standard's keystream, the ziggurat's draws,
whatever the device.

On the CPU, which the same operations run on; `tests/devices` draws on a second device.
"""

import math
import os
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from scipy import stats

from dpoptim.noise import KeyStream, gaussian, on_device
from dpoptim.noise.chacha import MOST_BLOCKS, keystream
from dpoptim.noise.on_device import normals, throw, words
from dpoptim.noise.ziggurat import Scratch, places_of, settle
from dpoptim.training.memory import LiveTensors

CPU = torch.device("cpu")


def as_bytes(blocks: torch.Tensor) -> bytes:
    return np.ascontiguousarray(blocks.numpy().T).astype("<i4").tobytes()


def test_the_block_of_the_standard() -> None:
    """RFC 8439, section 2.3.2."""
    block = keystream(bytes(range(32)), bytes.fromhex("000000090000004a00000000"), 1, CPU, first=1)
    assert as_bytes(block).hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4ed2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


@pytest.mark.parametrize("first", [0, 3, MOST_BLOCKS - 70])
def test_keystreams_are_those_of_another_implementation(first: int) -> None:
    for _ in range(20):
        key, nonce = os.urandom(32), os.urandom(12)
        cipher = Cipher(algorithms.ChaCha20(key, first.to_bytes(4, "little") + nonce), None)
        assert as_bytes(keystream(key, nonce, 70, CPU, first=first)) == cipher.encryptor().update(
            bytes(70 * 64)
        )


@pytest.mark.parametrize(
    "arguments",
    [
        (bytes(31), bytes(12), 1, 0),
        (bytes(32), bytes(8), 1, 0),
        (bytes(32), bytes(12), 2, MOST_BLOCKS - 1),
        (bytes(32), bytes(12), 1, -1),
        (bytes(32), bytes(12), -1, 0),
    ],
)
def test_what_would_repeat_a_keystream_is_refused(arguments: tuple[bytes, bytes, int, int]) -> None:
    key, nonce, blocks, first = arguments
    with pytest.raises(ValueError, match="must"):
        keystream(key, nonce, blocks, CPU, first=first)


def test_places_are_those_of_the_ziggurat() -> None:
    """To the last bit, extreme words included."""
    drawn = words(bytes(range(44)), 100_000, CPU)
    extreme = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 1023, 1 << 10, -(1 << 10)])
    drawn = torch.cat([drawn, extreme])
    expected = np.empty(len(drawn))
    where, place, layer = places_of(
        drawn.numpy().view(np.uint64).copy(), expected, Scratch.of(len(drawn))
    )
    z, found, layers = throw(drawn)
    assert torch.equal(z, torch.from_numpy(expected))
    assert torch.equal(found, torch.from_numpy(where))
    assert torch.equal(layers, torch.from_numpy(layer))
    assert np.array_equal(z[found].numpy(), place)


def test_draws_are_those_of_the_ziggurat_on_the_words_of_another_implementation() -> None:
    """What is settled on the CPU included, to the last bit."""
    count = 300_001
    stream, secret = KeyStream.from_seed(7, "noise"), bytearray(44)
    stream.fill(secret)
    blocks = 2 * -(-count // 16)
    cipher = Cipher(algorithms.ChaCha20(bytes(secret[:32]), bytes(4) + bytes(secret[32:])), None)
    by_block = np.frombuffer(cipher.encryptor().update(bytes(64 * blocks)), "<u4").reshape(
        blocks, 16
    )
    expected = np.empty(count)
    drawn = np.ascontiguousarray(by_block.T).view(np.uint64).ravel()[:count]
    where, place, layer = places_of(drawn, expected, Scratch.of(count))
    assert len(where) > 1000
    expected[where] = settle(stream, place, layer)
    assert np.array_equal(normals(KeyStream.from_seed(7, "noise"), count, CPU).numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("std", [None, 3.0])
def test_every_piece_of_a_large_tensor_has_its_own(
    dtype: torch.dtype, std: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gaussian, "_AT_ONCE", 1000)
    out = torch.ones(3, 1167, dtype=dtype)  # three pieces of 1,000 and a shorter one
    gaussian._draw_where_it_lies(KeyStream.from_seed(3, "noise"), [out.view(-1)], std)
    stream = KeyStream.from_seed(3, "noise")
    drawn = torch.cat([normals(stream.branch(), count, CPU) for count in (1000, 1000, 1000, 501)])
    expected = drawn if std is None else torch.ones(3501, dtype=torch.float64).add(drawn, alpha=std)
    assert torch.equal(out.view(-1), expected.to(dtype))


@pytest.fixture(scope="module")
def sample() -> np.ndarray:
    """Two million draws, in two pieces of which one is odd."""
    stream = KeyStream.from_seed(5, "noise")
    return torch.cat([normals(stream, count, CPU) for count in (1_000_001, 999_999)]).numpy()


def test_the_law(sample: np.ndarray) -> None:
    """Each false alarm is below 1e-6."""
    assert abs((sample**2).sum() - sample.size) < 5 * math.sqrt(2 * sample.size)
    assert stats.kstest(sample, "norm").pvalue > 1e-7
    counts = np.bincount((stats.norm.cdf(sample) * 1000).astype(int), minlength=1000)
    chi_square = ((counts - sample.size / 1000) ** 2).sum() / (sample.size / 1000)
    assert 1e-7 < stats.chi2.sf(chi_square, 999) < 1 - 1e-7
    for start in (3.0, 4.0388):  # the second is where the tail begins: 108 of the draws
        share = 2 * stats.norm.sf(start)
        beyond = (np.abs(sample) > start).sum()
        assert 1e-7 < stats.binom.cdf(beyond, sample.size, share) < 1 - 1e-7


def test_draws_are_unrelated(sample: np.ndarray) -> None:
    """Neighbours, neighbours in blocks and in words, and the two pieces: false alarm below 1e-6
    each.
    """
    for lag in (1, 2, 8, 16, 62_501, 125_002, 1_000_000, 1_000_001):
        correlation = float(np.mean(sample[lag:] * sample[:-lag]))
        assert abs(correlation) < 5.5 / math.sqrt(sample.size - lag)


def test_seeds_repeat_and_calls_do_not() -> None:
    first, again, other = (KeyStream.from_seed(seed, "noise") for seed in (1, 1, 2))
    drawn = normals(first, 1000, CPU)
    assert torch.equal(normals(again, 1000, CPU), drawn)
    assert not torch.equal(normals(first, 1000, CPU), drawn)
    assert not torch.equal(normals(other, 1000, CPU), drawn)
    unseeded = [normals(KeyStream(), 1000, CPU) for _ in range(2)]
    assert not torch.equal(*unseeded)


@pytest.mark.parametrize("count", [1, 7, 16, 17, 33])
def test_any_number_of_draws(count: int) -> None:
    assert normals(KeyStream(), count, CPU).shape == (count,)


@pytest.mark.parametrize("wrong", ["words", "places", "edges"])
def test_a_device_that_computes_something_else_is_refused(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One word, or the width or the edge of one layer, is another by a bit or so: no noise is
    drawn.
    """
    on_device.check.cache_clear()
    if wrong == "words":
        original = on_device.words
        seen = []

        def spoilt(*arguments: Any) -> torch.Tensor:
            seen.append(0)
            result = original(*arguments)
            return result ^ (torch.arange(len(result)) == 77).long() if len(seen) == 1 else result

        monkeypatch.setattr(on_device, "words", spoilt)
    else:
        step, inner = (table.clone() for table in on_device.tables_on(CPU))
        (step if wrong == "places" else inner)[77] *= 1 + 2**-50
        monkeypatch.setattr(on_device, "tables_on", lambda device: (step, inner))
    with pytest.raises(RuntimeError, match="noise cannot be drawn on cpu"):
        normals(KeyStream(), 10, CPU)
    on_device.check.cache_clear()


def test_a_piece_takes_the_room_that_it_is_said_to_take() -> None:
    with LiveTensors() as live:
        normals(KeyStream(), gaussian._AT_ONCE, CPU)
    assert live.peak <= 164.1 * 2**20
