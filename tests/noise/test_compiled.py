"""Noise by the compiled functions: the same draws and the same sums, to the last bit, as without
them.
"""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dpoptim.noise import (
    KeyStream,
    add_normal,
    draws_in_place,
    fill_standard_normal,
    gaussian,
    keystream,
    ziggurat,
)
from dpoptim.noise import stream as stream_module
from dpoptim.noise.ziggurat_layers import EDGES, LAYERS
from dpoptim.runtime import compiled, compiled_work

pytestmark = pytest.mark.skipif(
    ziggurat.functions() is None, reason="this package was built without compiled functions"
)
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
SIZES = st.one_of(st.integers(0, 64), st.sampled_from([16_383, 16_384, 16_385, 50_000]))


def without(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gaussian, ziggurat, draws_in_place):
        monkeypatch.setattr(module, "functions", lambda: None)
    without_keystream(monkeypatch)


def without_keystream(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor that has no instructions for it."""
    for module in (stream_module, ziggurat, draws_in_place):
        monkeypatch.setattr(module, "compiled_keystream", lambda: None)


@given(seed=st.integers(0, 1000), size=SIZES, cut=SIZES, dtype=st.sampled_from(DTYPES))
def test_sums_are_the_same_to_the_last_bit(
    seed: int, size: int, cut: int, dtype: torch.dtype
) -> None:
    values = torch.linspace(-9, 9, size, dtype=torch.float64).to(dtype)
    found = []
    for leave_out in (lambda patch: None, without_keystream, without):
        with pytest.MonkeyPatch.context() as patch:
            leave_out(patch)
            parts = [values[:cut].clone(), values[cut:].clone()]
            add_normal(KeyStream.from_seed(seed, "test"), parts, 1.7)
            alone = torch.empty(size, dtype=dtype)
            fill_standard_normal(KeyStream.from_seed(seed, "test"), alone)
            found.append(torch.cat([*parts, alone]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.skipif(
    keystream.compiled_keystream() is None, reason="this processor has no instructions for AES"
)
@given(
    seed=st.integers(0, 1000),
    lengths=st.lists(st.one_of(st.integers(0, 70), st.integers(250, 2_000)), max_size=6),
    branches=st.integers(0, 3),
)
def test_the_keystream_is_that_of_openssl(seed: int, lengths: list[int], branches: int) -> None:
    """From any place on, in pieces of any length, of any branch."""
    found = []
    for leave_out in (lambda patch: None, without_keystream):
        with pytest.MonkeyPatch.context() as patch:
            leave_out(patch)
            stream = KeyStream.from_seed(seed, "test")
            for _ in range(branches):
                stream = stream.branch()
            drawn = [bytearray(length) for length in lengths]
            for each in drawn:
                stream.fill(each)
            found.append((drawn, stream.reached))
    assert found[0] == found[1]


def test_another_keystream_than_openssls_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded bug: words that lag by one, or end too soon."""

    def library_with(change: Callable[[NDArray[np.uint8]], None]) -> SimpleNamespace:
        def put_out(key: bytes, number: int, place: int, address: int, length: int) -> None:
            encryptor = Cipher(
                algorithms.AES(key), modes.CTR(number.to_bytes(8, "big") + bytes(8))
            ).encryptor()
            words = np.frombuffer(encryptor.update(bytes(place + length))[place:], np.uint8).copy()
            change(words)
            ctypes.memmove(address, words.ctypes.data, length)

        functions = SimpleNamespace(dpoptim_aes=lambda: 1, dpoptim_keystream=put_out)
        return SimpleNamespace(functions=functions)

    def late(words: NDArray[np.uint8]) -> None:
        words[1:] = words[:-1].copy()

    def short(words: NDArray[np.uint8]) -> None:
        words[-1] = 0

    make = keystream.compiled_keystream.__wrapped__
    for change, used in ((lambda words: None, True), (late, False), (short, False)):
        monkeypatch.setattr(compiled, "library", lambda change=change: library_with(change))
        assert (make() is not None) == used


@pytest.mark.parametrize("n", [1, 15, 16, 17, 4_096])
def test_every_throw_outside_its_inner_part_is_found(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is missed would be released as a draw: here every second one is outside."""
    random = np.random.default_rng(n)
    words = random.integers(0, 2**64, n, dtype=np.uint64)
    words[::2] = words[::2] & np.uint64(1023) | np.uint64(2**63 - 1024)  # at their layers' ends
    out, scratch = np.empty(n), ziggurat.Scratch.of(n)
    found = ziggurat.places_of(words.copy(), out, scratch)
    assert len(found[0]) >= (n + 1) // 2
    expected_out = np.empty(n)
    without(monkeypatch)
    expected = ziggurat.places_of(words.copy(), expected_out, scratch)
    np.testing.assert_array_equal(out, expected_out)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_addition_rounds_once_as_torch_does() -> None:
    """Cases that round otherwise if a product is rounded before it is added."""
    z = torch.randn(1_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.float64):
        values = torch.randn(1_000, generator=torch.Generator().manual_seed(1)).to(dtype)
        expected = torch.add(values, z, alpha=1.1)
        gaussian._put(values, z, 1.1)
        assert torch.equal(values, expected.to(dtype))


def test_throws_outside_their_layers_are_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded bug: taken for draws, they end with the last layer, at 4.27."""
    draws = torch.empty(1 << 20, dtype=torch.float64)
    fill_standard_normal(KeyStream.from_seed(1, "test"), draws)
    beyond = int((draws.abs() > 4.3).sum())
    assert 4 <= beyond <= 40  # 18 are expected
    monkeypatch.setattr(gaussian, "settle", lambda stream, place, layer: place.copy())
    fill_standard_normal(KeyStream.from_seed(1, "test"), draws)
    assert not (draws.abs() > 4.3).any()


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 100])
def test_draws_are_the_same_for_any_number_of_threads(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_work, "WORTH_A_THREAD", 1)
    before = torch.get_num_threads()
    found = []
    for number in (1, threads):
        torch.set_num_threads(number)  # those that OpenMP may wake
        drawn = [torch.zeros(70_001), torch.zeros(1_025, dtype=torch.float64), torch.zeros(3)]
        stream = KeyStream.from_seed(3, "test")
        add_normal(stream, drawn, 0.7, threads=number)
        found.append([*drawn, torch.tensor(stream.reached)])
    torch.set_num_threads(before)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@given(seed=st.integers(0, 1000), n=st.integers(0, 300), zeros=st.booleans())
def test_throws_are_settled_to_the_last_bit_as_without(seed: int, n: int, zeros: bool) -> None:
    """In the tail too, which one throw in 20,000 is in; and as many words are used."""
    random = np.random.default_rng(seed)
    layer = random.integers(0, 3, n) if zeros else random.integers(1, LAYERS, n)
    inner, outer = EDGES[layer + 1], EDGES[layer]
    place = random.uniform(inner, outer) * random.choice([-1.0, 1.0], n)
    found = []
    for leave_out in (lambda patch: None, without):
        with pytest.MonkeyPatch.context() as patch:
            leave_out(patch)
            stream = KeyStream.from_seed(seed, "test")
            found.append((ziggurat.settle(stream, place.copy(), layer.copy()), stream.reached))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_a_forked_process_draws_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP's threads are not there, and it would wait for them for ever."""
    monkeypatch.setattr(compiled_work, "WORTH_A_THREAD", 1)
    asked = []
    honest = gaussian.throw_onto
    monkeypatch.setattr(
        gaussian, "throw_onto", lambda *given: asked.append(given[4]) or honest(*given)
    )
    for forked in (False, True):
        monkeypatch.setattr(gaussian, "was_forked", lambda forked=forked: forked)
        fill_standard_normal(KeyStream(), torch.empty(5_000), threads=2)
    assert asked == [2, 1]
