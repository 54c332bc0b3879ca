"""Cryptographic randomness: an AES-256-CTR keystream, and the sampling coins made from it.

Noise that anyone can recompute hides nothing. `torch.Generator` on CPU keeps 32 bits of its seed,
and numpy's generators are built for speed, not secrecy. A `KeyStream` is keyed by the operating
system, and what it has put out says nothing about what it will put out: telling n words from ideal
random ones has an advantage of at most n^2 / 2^131 over breaking AES-256 itself (the PRP/PRF
switching lemma for n / 2 blocks: below 2^-49 for 2^41 words).
"""

from __future__ import annotations

import operator
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn, SupportsIndex, TypeVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from dpoptim.noise.keystream import Branches, compiled_keystream
from dpoptim.noise.sparse_bernoulli import BLOCK, heads_in_blocks

Result = TypeVar("Result")

__all__ = ["BLOCK_WORDS", "KeyStream", "fresh_secret"]

# Words handled at a time: four such blocks stay in a second-level cache, and calls are few.
BLOCK_WORDS = 1 << 14
_BLOCK_COINS = 8 * BLOCK_WORDS
LEAST_ZEROS, MOST_ZEROS = 5, 32  # of `sparse_bernoulli`; with fewer, and of fewer coins than
MANY = 1 << 18  # these, tossing each takes less time
SECRET_BYTES = 32
_ZEROS = memoryview(bytes(8 * BLOCK_WORDS))  # CTR turns zeros into the bare keystream

# Forks since the program began; with the process id it says which process is asking. The id alone
# would not do, because ids are used again; the count alone misses forks made by C code.
_forks = 0
_taking_new_key = threading.Lock()


def this_process() -> tuple[int, int]:
    """Return what tells this process from those that it was forked from."""
    return os.getpid(), _forks


def _count_fork() -> None:
    global _forks, _taking_new_key  # noqa: PLW0603
    _forks += 1
    _taking_new_key = threading.Lock()  # the parent's may have been held


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class KeyStream:
    """An endless stream of random 64-bit words, secret and never repeated.

    `KeyStream()` takes a fresh 256-bit key from the operating system. `KeyStream.from_seed(seed,
    purpose)` derives the key from a number, for tests and reproducible runs: whoever knows the
    number knows the noise, so `seeded` is True and what is drawn is not for release.

    Guarantee
        The words of one stream, of its branches, and of any other `KeyStream()` are independent
        and uniform to whoever cannot break AES-256. No call hands out a word twice: the key has no
        getter, a stream refuses to be pickled or copied (two copies would repeat each other's
        noise, and a saved key would undo the noise later), and a forked child never continues its
        parent's stream. In the child a stream keyed by the OS takes a new key; a seeded one
        raises, because repeating the parent's words would reuse noise and any other words would
        break the promise that a seed repeats.

    Threads may share a stream (a lock keeps calls apart), but who gets which words is then up to
    chance; give each thread its own `branch()` where a seed must repeat. Little-endian and
    big-endian machines read different words.
    """

    _bytes: int  # handed out

    def __init__(self) -> None:
        self.seeded = self._repeats = False
        self._start(os.urandom(32), Branches(), 0)

    @classmethod
    def from_seed(cls, seed: int, purpose: str, *, named: str = "seed") -> KeyStream:
        """A stream that repeats for the same `seed` (integer >= 0) and purpose. Not for release.

        `purpose` is what the words are for ("noise", "coins", ...). The key is HKDF-SHA-256 of the
        seed's decimal digits with the purpose as `info` (RFC 5869), so streams for two purposes
        are independent.

        Raises TypeError or ValueError naming the argument (the seed as ``named``).
        """
        if isinstance(seed, bool) or not isinstance(seed, SupportsIndex):
            raise TypeError(f"{named} must be an integer >= 0, got {type(seed).__name__}")
        if operator.index(seed) < 0:
            raise ValueError(f"{named} must be an integer >= 0, got {seed}")
        if not isinstance(purpose, str) or not purpose:
            raise ValueError(f'purpose must be a non-empty string such as "noise", got {purpose!r}')
        return cls._derived(str(operator.index(seed)).encode(), purpose, seeded=True)

    @classmethod
    def from_secret(cls, secret: bytes, purpose: str) -> KeyStream:
        """The stream that all processes of a run share: same `secret` (`fresh_secret`), same words.

        For coins that must be the same in all of them, and in one process for noise that is drawn
        again to be taken back (`correlated.redrawn`). As secret as the secret is.
        """
        if len(secret) != SECRET_BYTES:
            raise ValueError(
                f"secret must have {SECRET_BYTES} bytes, from fresh_secret(); got {len(secret)}"
            )
        return cls._derived(secret, purpose, seeded=False)

    @classmethod
    def _derived(cls, secret: bytes, purpose: str, *, seeded: bool) -> KeyStream:
        info = b"dpoptim noise stream: " + purpose.encode()
        stream = cls.__new__(cls)
        stream.seeded, stream._repeats = seeded, True
        key = HKDF(SHA256(), length=32, salt=None, info=info).derive(secret)
        stream._start(key, Branches(), 0)
        return stream

    def branch(self) -> KeyStream:
        """A stream independent of this one and of all other branches, for another thread or task.

        Branches share the key and differ in the upper half of the 128-bit counter block, so no two
        can meet before one of them has put out 2^65 words. The k-th branch of a seeded stream
        repeats like the stream itself.
        """
        self._check_process()
        try:
            return self._reserved.popleft()
        except IndexError:
            return self._next_branch()

    def reserve(self) -> KeyStream:
        """The branch that `branch` will return, after those reserved before, for who draws ahead.

        A forked child does not have its parent's.
        """
        self._check_process()
        self._reserved.append(self._next_branch())
        return self._reserved[-1]

    def end(self) -> None:
        """Put out nothing more: the next branch may have this one's encryptor, set to its place.

        Making one takes longer than a thousand words.
        """
        del self._key
        if self._put_out is None:
            self._branches.idle.append(self.__dict__.pop("_encryptor"))

    @property
    def reserved(self) -> int:
        """How many branches are reserved."""
        return len(self._reserved)

    def _next_branch(self) -> KeyStream:
        child = type(self).__new__(type(self))
        child.seeded, child._repeats = self.seeded, self._repeats
        child._start(self._key, self._branches, self._branches.next())
        return child

    @property
    def reached(self) -> tuple[int, int]:
        """Bytes and branches that were handed out, not those still reserved: see `skip_to`."""
        return self._bytes, self._branches.made - self.reserved

    def skip_to(self, bytes_handed_out: int, branches: int) -> None:
        """Go on where another stream of the same seed and purpose had `reached`.

        Raises ValueError when this stream is not seeded or is past that place: words would repeat.
        """
        skipped = bytes_handed_out - self._bytes
        if not self.seeded or skipped < 0 or branches < self.reached[1]:
            raise ValueError("only a seeded stream can skip, and only forward")
        self._check_process()
        with self._lock:
            if self._put_out is None:
                blocks, rest = divmod(bytes_handed_out, 16)
                self._encrypt_from(blocks)
                self._encryptor.update(bytes(rest))
            self._bytes = bytes_handed_out
            self._reserved.clear()  # what was drawn for them is forgotten, and may come again
            self._branches.made = branches

    def words(self, out: NDArray[np.uint64]) -> None:
        """Overwrite `out` (uint64, C-contiguous, any shape) with the next words of the stream."""
        if out.dtype != np.uint64 or not out.flags.c_contiguous:
            raise ValueError(
                f"out must be a C-contiguous uint64 array, got {out.dtype} with strides "
                f"{out.strides}"
            )
        self.fill(out.data)

    def fill(self, buffer: bytearray | memoryview) -> None:
        """Overwrite a writable, contiguous `buffer` with the next bytes of the stream."""
        target = memoryview(buffer)
        if not target.nbytes:
            return
        target = target.cast("B")
        self._check_process()
        with self._lock:
            if self._put_out is not None:
                address = np.frombuffer(target, np.uint8).ctypes.data
                self._put_out(self._key, self._number, self._bytes, address, len(target))
            else:
                for start in range(0, len(target), len(_ZEROS)):
                    piece = target[start : start + len(_ZEROS)]
                    self._encryptor.update_into(_ZEROS[: len(piece)], piece)
            self._bytes += len(target)

    def spend(self, function: Callable[[bytes, int, int], tuple[int, Result]]) -> Result:
        """Let a function put out the next words for itself; return its result.

        Only with a `compiled_keystream`. It gets key, number, place; returns words used, result.
        """
        assert self._put_out is not None
        self._check_process()
        with self._lock:
            words, result = function(self._key, self._number, self._bytes)
            self._bytes += 8 * words
        return result

    def coins(self, n: int, probability: float) -> NDArray[np.int64]:
        """Toss `n` independent coins; return the heads' sorted indices (int64, (heads,)).

        The streams of the noise and of the coins should be two, so that neither shifts the other.
        A coin is heads when 53 random bits are below floor(probability * 2^53), compared in
        integers. So heads come up with a probability q' in (probability - 2^-53, probability]:
        never more often than asked. That is the safe side, because a smaller sampling rate is a
        mixture of "not sampled" with the larger one, and mixing never costs privacy. 1 means always
        and 0 never, without a toss.

        The first byte decides 255 coins of 256; only for the others are the remaining 45 bits
        drawn. Of many coins that seldom show heads, those whose first bits are zero are found
        without a toss for each (`sparse_bernoulli`); the others are tails.

        Raises ValueError when `n` is negative or `probability` is not in [0, 1].
        """
        n = operator.index(n)
        if n < 0:
            raise ValueError(f"n must be >= 0 coins, got {n}")
        if not 0 <= probability <= 1:  # also refuses NaN
            raise ValueError(f"probability must be in [0, 1], got {probability}")
        threshold = _threshold(probability)
        if threshold in (0, 1 << 53):
            self._check_process()
            return np.arange(n if threshold else 0, dtype=np.int64)
        zeros = min(53 - threshold.bit_length(), MOST_ZEROS)  # of the first bits, if it is heads
        if zeros < LEAST_ZEROS or n < MANY:
            return self._toss(n, threshold)
        heads = heads_in_blocks(-(-n // BLOCK), zeros, self._draw)
        other_bits = self._draw(len(heads)) >> np.uint64(11 + zeros)
        heads = heads[other_bits < np.uint64(threshold)]
        return heads[: np.searchsorted(heads, n)]  # the last block's coins may be more than asked

    def _toss(self, n: int, threshold: int) -> NDArray[np.int64]:
        """Toss `n` coins, each of 53 bits; heads are below the threshold."""
        first, rest = np.uint8(threshold >> 45), np.uint64(threshold & ((1 << 45) - 1))
        tossed = np.empty(min(n, _BLOCK_COINS), np.uint8)
        heads = [np.empty(0, np.int64)]
        for start in range(0, n, _BLOCK_COINS):
            block = tossed[: n - start]
            self.fill(block.data)
            found = np.flatnonzero(block <= first)
            undecided = np.flatnonzero(block[found] == first)
            tails = undecided[self._draw(len(undecided)) >> np.uint64(19) >= rest]
            heads.append(np.delete(found, tails) + start)
        return np.concatenate(heads)

    def _draw(self, count: int) -> NDArray[np.uint64]:
        words = np.empty(count, np.uint64)
        self.words(words)
        return words

    def _start(self, key: bytes, branches: Branches, number: int) -> None:
        self._lock = threading.Lock()
        self._key, self._number = key, number
        self._branches = branches
        self._reserved: deque[KeyStream] = deque()
        self._bytes = 0
        self._put_out = compiled_keystream()
        if self._put_out is None:
            self._encrypt_from(0)
        self._process = this_process()

    def _encrypt_from(self, block: int) -> None:
        first = self._number.to_bytes(8, "big") + block.to_bytes(8, "big")
        try:
            self._encryptor = self._branches.idle.pop()
            self._encryptor.reset_nonce(first)
        except IndexError:
            self._encryptor = Cipher(algorithms.AES(self._key), modes.CTR(first)).encryptor()

    def _check_process(self) -> None:
        """Refuse to continue a parent's stream; before the lock, which a fork may have frozen."""
        if self._process == this_process():
            return
        if self._repeats:
            raise RuntimeError(
                "a seeded or shared KeyStream was used in a forked process, where it would "
                "repeat the parent's noise. "
                'Make one there: KeyStream.from_seed(seed, purpose="noise of worker 1")'
            )
        with _taking_new_key:
            if self._process != this_process():
                self._start(os.urandom(32), Branches(), 0)

    def __repr__(self) -> str:
        return (
            "<KeyStream seeded: not for release>" if self.seeded else "<KeyStream keyed by the OS>"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a KeyStream cannot be pickled or saved: its key would let anyone subtract the noise. "
            "Make a new KeyStream() after loading; noise drawn after a resume comes from a fresh "
            "key"
        )

    def __copy__(self) -> NoReturn:
        raise TypeError(
            "a KeyStream cannot be copied: two copies would put out the same noise. Use branch()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__copy__()


def key_stream(seed: int | None, purpose: str) -> KeyStream:
    """A stream of a fresh key; with a ``seed`` one that repeats, which is not for release."""
    return KeyStream() if seed is None else KeyStream.from_seed(seed, purpose, named="noise_seed")


def fresh_secret() -> bytes:
    """Draw, from the operating system, what a run's processes derive common streams from."""
    return os.urandom(SECRET_BYTES)


def _threshold(probability: float) -> int:
    """floor(probability * 2^53), exactly."""
    numerator, denominator = float(probability).as_integer_ratio()
    return (numerator << 53) // denominator
