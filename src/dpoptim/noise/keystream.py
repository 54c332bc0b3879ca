"""The keystream by the processor's own instructions for AES, to the bits of OpenSSL's; branches."""

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dpoptim.runtime import compiled

PutOut = Callable[[bytes, int, int, int, int], None]


@cache
def compiled_keystream() -> PutOut | None:
    """``keystream.c``, with one call for a key, counter, place, address and number of bytes.

    None where the library or the processor has none, or not the keystream of OpenSSL's to the last
    bit, which is tried here once for each way that blocks are cut.
    """
    found = compiled.library()
    if found is None or not found.functions.dpoptim_aes():
        return None
    put_out: PutOut = found.functions.dpoptim_keystream
    put_out.argtypes = [  # type: ignore[attr-defined]
        *(ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int64)
    ]
    put_out.restype = None  # type: ignore[attr-defined]
    key, number = bytes(range(32)), 0x0123456789ABCDEF
    length = 16 * 67
    first = number.to_bytes(8, "big") + bytes(8)
    expected = Cipher(algorithms.AES(key), modes.CTR(first)).encryptor().update(bytes(length))
    for start, end in ((0, length), (5, 11), (7, length - 1), (256, 272), (300, 1000)):
        given = np.zeros(end - start, np.uint8)
        put_out(key, number, start, given.ctypes.data, len(given))
        if given.tobytes() != expected[start:end]:
            return None
    return put_out


class Branches:
    """The branches of a key, which all of them share: their numbers begin with 1."""

    def __init__(self) -> None:
        self.made = 0
        self.idle: list[Any] = []  # encryptors of branches that have ended
        self._lock = threading.Lock()

    def next(self) -> int:
        with self._lock:
            self.made += 1
            return self.made
