"""The stream is AES-256-CTR, never repeats itself, and its coins are exact.

Statistical tests run on seeded streams, so they either always pass or always fail; the stated
false-alarm probability is what a wrong choice of seed would have cost.
"""

from __future__ import annotations

import copy
import math
import pickle
import random
import threading
from fractions import Fraction

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from dpoptim.noise import KeyStream
from dpoptim.noise import stream as stream_module
from forked import in_forked_child, needs_fork


def draw(stream: KeyStream, n: int = 64) -> np.ndarray:
    words = np.empty(n, np.uint64)
    stream.words(words)
    return words


# --- the cipher ----------------------------------------------------------------------------------


def test_known_answer_of_nist_sp_800_38a() -> None:
    """F.5.5, CTR-AES256.Encrypt: its plaintext xor its ciphertext is the keystream of its key and
    counter.
    """
    key = "603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4"
    plaintext = "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
    ciphertext = "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"
    keystream = bytes(
        a ^ b for a, b in zip(bytes.fromhex(plaintext), bytes.fromhex(ciphertext), strict=True)
    )
    first = int("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff", 16)

    assert encrypted_counters(bytes.fromhex(key), first, 2) == keystream


def encrypted_counters(key: bytes, first: int, count: int) -> bytes:
    """Counter mode by hand: each 128-bit counter block through AES in ECB mode."""
    blocks = b"".join((first + i).to_bytes(16, "big") for i in range(count))
    return Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(blocks)


def test_words_are_encrypted_counters() -> None:
    """Across the boundary of an internal block, in pieces, and for a branch, against ECB done by
    hand.
    """
    stream = KeyStream.from_seed(3, "test")
    branch = stream.branch()
    n = stream_module.BLOCK_WORDS + 100
    words = np.concatenate([draw(stream, 10), draw(stream, n - 10)])
    assert words.tobytes() == encrypted_counters(stream._key, 0, n // 2)
    assert draw(branch, 8).tobytes() == encrypted_counters(stream._key, 1 << 64, 4)


def test_a_branch_that_has_ended_puts_out_nothing_and_the_next_ones_their_own_words() -> None:
    expected, stream = KeyStream.from_seed(3, "test"), KeyStream.from_seed(3, "test")
    for length in (1, 100, 64):  # of bytes that leave a block half used, too
        branch = stream.branch()
        drawn, wanted = bytearray(length), bytearray(length)
        branch.fill(drawn)
        expected.branch().fill(wanted)
        assert drawn == wanted
        branch.end()
        with pytest.raises(AttributeError):
            branch.fill(drawn)
    assert draw(stream).tobytes() == draw(expected).tobytes()


def test_fill_writes_bytes_and_checks_words() -> None:
    expected = draw(KeyStream.from_seed(1, "bytes"), 4).tobytes()
    buffer = bytearray(32)
    KeyStream.from_seed(1, "bytes").fill(buffer)
    assert bytes(buffer) == expected
    KeyStream().fill(bytearray())
    with pytest.raises(ValueError, match="out must be a C-contiguous uint64"):
        KeyStream().words(np.empty(4, np.int64))
    with pytest.raises(ValueError, match="out must be a C-contiguous uint64"):
        KeyStream().words(np.empty(8, np.uint64)[::2])


# --- never the same words twice ------------------------------------------------------------------


def test_fixed_global_seeds_do_not_fix_the_noise() -> None:
    drawn = []
    for _ in range(2):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        drawn.append(draw(KeyStream()))
    assert not np.isin(drawn[0], drawn[1]).any()
    assert not KeyStream().seeded


def test_a_seed_repeats_and_purposes_differ() -> None:
    assert KeyStream.from_seed(7, "noise").seeded
    assert KeyStream.from_seed(7, "noise").branch().seeded
    np.testing.assert_array_equal(
        draw(KeyStream.from_seed(7, "noise")), draw(KeyStream.from_seed(7, "noise"))
    )
    streams = [
        KeyStream.from_seed(7, "noise"),
        KeyStream.from_seed(7, "coins"),
        KeyStream.from_seed(8, "noise"),
    ]
    streams += [streams[0].branch(), streams[0].branch(), streams[0].branch().branch()]
    words = np.concatenate([draw(stream) for stream in streams])
    assert len(np.unique(words)) == len(words)


def test_big_seeds_are_not_cut() -> None:
    small, big = KeyStream.from_seed(5, "noise"), KeyStream.from_seed(5 + 2**64, "noise")
    assert not np.isin(draw(small), draw(big)).any()


@pytest.mark.parametrize(
    ("seed", "purpose", "error", "match"),
    [
        (-1, "noise", ValueError, "seed"),
        (True, "noise", TypeError, "seed"),
        (1.5, "noise", TypeError, "seed"),
        (None, "noise", TypeError, "seed"),
        (1, "", ValueError, "purpose"),
        (1, 2, ValueError, "purpose"),
    ],
)
def test_bad_seeds_are_named(
    seed: object, purpose: object, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=f"^{match} must be"):
        KeyStream.from_seed(seed, purpose)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [KeyStream, lambda: KeyStream.from_seed(1, "noise")])
def test_no_copies(make) -> None:
    stream = make()
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(stream)
    with pytest.raises(TypeError, match="cannot be pickled"):
        torch.save({"stream": stream}, "/dev/null")
    for duplicate in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be copied"):
            duplicate(stream)


def test_repr_hides_the_key() -> None:
    stream = KeyStream()
    assert "OS" in repr(stream)
    assert stream._key.hex() not in repr(stream)
    assert "not for release" in repr(KeyStream.from_seed(1, "noise"))


@needs_fork
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_takes_a_new_key() -> None:
    stream = KeyStream()
    branch = stream.branch()
    draw(stream, 3)
    held = stream._lock
    with held:  # as if another thread were drawing during the fork; the child must not wait for it
        children = [
            in_forked_child(lambda: draw(stream).tobytes() + draw(branch).tobytes())
            for _ in range(2)
        ]
    words = [np.frombuffer(child, np.uint64) for child in children] + [draw(stream), draw(branch)]
    together = np.concatenate(words)
    assert len(together) == 6 * 64
    assert len(np.unique(together)) == len(together)


@needs_fork
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_seeded_stream_refuses_to_work_in_a_forked_child() -> None:
    stream = KeyStream.from_seed(1, "noise")

    def answer() -> bytes:
        refused = []
        for use in (lambda: draw(stream), stream.branch, lambda: stream.coins(3, 1.0)):
            try:
                use()
            except RuntimeError as error:
                refused.append(str(error))
        return "\n".join(refused).encode()

    assert in_forked_child(answer).count(b"forked process") == 3


def test_threads_share_a_stream_without_repeating() -> None:
    stream = KeyStream()
    drawn: list[np.ndarray] = []

    def work() -> None:
        drawn.extend(draw(stream, 1000) for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    words = np.concatenate(drawn)
    assert len(np.unique(words)) == len(words) == 200_000


def test_bits_are_fair() -> None:
    """Each of 64 bits over 2^18 words within 6 sigma: false alarm below 64 x 2e-9 = 1.3e-7."""
    words = draw(KeyStream.from_seed(11, "bits"), 1 << 18)
    ones = np.unpackbits(words.view(np.uint8)).reshape(-1, 64).sum(0, dtype=np.int64)
    assert np.abs(ones - (1 << 17)).max() < 6 * math.sqrt(1 << 16)


# --- coins ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "q", [1e-6, 1.3e-6, 1 / 3, 0.01, 0.5, 1 - 2**-53, 2.0**-53, 2.0**-54, 5e-324, 0.0, 1.0]
)
def test_threshold_is_the_floor_exactly(q: float) -> None:
    threshold = stream_module._threshold(q)
    assert Fraction(threshold, 2**53) <= Fraction(q) < Fraction(threshold + 1, 2**53)


@pytest.mark.parametrize("q", [1.3e-6, 0.01, 1 / 3, 0.9, 2.0**-53, 1 - 2**-53])
def test_coins_compare_with_the_threshold_to_the_last_bit(q: float, monkeypatch) -> None:
    """The stream is replaced by bits just below and just at the threshold, the lowest and the
    highest.
    """
    threshold = stream_module._threshold(q)
    coins = [threshold, threshold - 1, 0, 2**53 - 1, max(0, threshold - 2)]
    stream = KeyStream()
    first = np.array([coin >> 45 for coin in coins], np.uint8)
    tied = [coin & (2**45 - 1) for coin in coins if coin >> 45 == threshold >> 45]
    monkeypatch.setattr(stream, "fill", lambda out: np.copyto(np.asarray(out), first))
    monkeypatch.setattr(
        stream, "words", lambda out: np.copyto(out, np.array(tied, np.uint64) << np.uint64(19))
    )
    expected = [number for number, coin in enumerate(coins) if coin < threshold]
    assert stream.coins(len(coins), q).tolist() == expected


def test_coins_are_certain_at_the_ends() -> None:
    stream = KeyStream()
    assert stream.coins(5, 1.0).tolist() == [0, 1, 2, 3, 4]
    assert stream.coins(5, 1).dtype == np.int64
    assert stream.coins(100_000, 0.0).tolist() == []
    assert stream.coins(0, 0.5).tolist() == []


@pytest.mark.parametrize("q", [-1e-9, 1.0 + 1e-9, math.nan, math.inf, -math.inf])
def test_bad_probability_is_named(q: float) -> None:
    with pytest.raises(ValueError, match=r"^probability must be in \[0, 1\]"):
        KeyStream().coins(10, q)


def test_bad_count_is_named() -> None:
    with pytest.raises(ValueError, match=r"^n must be"):
        KeyStream().coins(-1, 0.5)


@pytest.mark.parametrize(("n", "q"), [(1000, 0.02), (40_000, 0.001), (50, 0.9)])
def test_batch_sizes_are_binomial(n: int, q: float) -> None:
    """Mean within 5.5 of its sigmas, variance n q (1 - q) within 5.5 of its own: false alarm 2 x
    4e-8.
    """
    stream = KeyStream.from_seed(5, "coins")
    trials = 4000 if n < 10_000 else 1000
    sizes = np.array([len(stream.coins(n, q)) for _ in range(trials)])
    mean, variance, excess = stats.binom.stats(n, q, moments="mvk")
    assert abs(sizes.mean() - mean) < 5.5 * math.sqrt(variance / trials)
    assert abs(sizes.var(ddof=1) - variance) < 5.5 * variance * math.sqrt((2 + excess) / trials)


def test_every_record_has_the_same_chance_and_coins_are_independent() -> None:
    """Heads per record over 2,000 batches as chi-square, and the covariance of neighbours: 1e-7
    each.
    """
    n, q, trials = 200, 0.1, 2000
    stream = KeyStream.from_seed(6, "coins")
    table = np.zeros((trials, n))
    for row in table:
        row[stream.coins(n, q)] = 1
    chi_square = ((table.sum(0) - trials * q) ** 2).sum() / (trials * q * (1 - q))
    assert stats.chi2.sf(chi_square, n) > 1e-7
    assert stats.chi2.cdf(chi_square, n) > 1e-7
    flat = (table - q).ravel() / math.sqrt(q * (1 - q))
    for lag in (1, n):
        assert abs((flat[lag:] * flat[:-lag]).sum()) < 5.5 * math.sqrt(flat.size - lag)


def test_rare_coins_are_not_inflated() -> None:
    """float32 coins make 1e-6 into 1.013e-6. Ours over 4e7 tosses: 40 expected; the exact test at
    1e-6.
    """
    heads = KeyStream.from_seed(9, "coins").coins(40_000_000, 1e-6)
    assert stats.binomtest(len(heads), 40_000_000, 1e-6).pvalue > 1e-6
    assert (np.diff(heads) > 0).all()


def test_a_seeded_stream_goes_on_where_another_had_come_and_never_back() -> None:
    def words(stream: KeyStream, count: int) -> list[int]:
        out = np.empty(count, dtype=np.uint64)
        stream.words(out)
        return out.tolist()

    stream = KeyStream.from_seed(1, "noise")
    stream.fill(bytearray(13))  # in the middle of a block
    words(stream.branch(), 2)
    later = KeyStream.from_seed(1, "noise")
    later.skip_to(*stream.reached)
    assert later.reached == stream.reached == (13, 1)
    assert words(later, 5) == words(stream, 5)
    assert words(later.branch(), 5) == words(stream.branch(), 5)
    with pytest.raises(ValueError, match="only forward"):
        later.skip_to(13, 1)
    with pytest.raises(ValueError, match="only a seeded stream"):
        KeyStream().skip_to(1, 0)
