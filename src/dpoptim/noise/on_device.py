"""Standard normal draws made where a tensor lies, for tensors on an accelerator.

Drawn on the CPU, the noise of a large model would take longer than its step, and a copy of the
model over the bus. Here random words come from ChaCha20, keyed anew for each piece by the stream,
and become draws by the same ziggurat; the 0.4 % that it does not settle at once are settled on the
CPU.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from dpoptim.noise.chacha import KEY_BYTES, NONCE_BYTES, keystream
from dpoptim.noise.stream import KeyStream
from dpoptim.noise.ziggurat import LAYERS, Scratch, places_of, settle, tables

CHECKED_WORDS = 1 << 18


def normals(stream: KeyStream, count: int, device: torch.device) -> Tensor:
    """N(0, 1): float64, shape (count,), on the device.

    The same draws on every device, for the same state of a seeded stream.

    Raises:
        RuntimeError: the device does not compute what the CPU does.

    **Guarantee.** As of `fill_standard_normal`, to whoever can break neither AES-256 nor ChaCha20:
    the key is the stream's next bytes. The first call on a device compares tables, words and
    places with the CPU's: see `check`.
    """
    check(device)
    secret = bytearray(KEY_BYTES + NONCE_BYTES)
    stream.fill(secret)
    z, where, layer = throw(words(bytes(secret), count, device))
    settled = settle(stream, z[where].cpu().numpy(), layer.cpu().numpy())
    return z.index_copy_(0, where, torch.from_numpy(settled).to(device))


def words(secret: bytes, count: int, device: torch.device) -> Tensor:
    """Random words of 64 bits: int64, shape (count,)."""
    pairs = -(-count // 16)  # of blocks, each of 16 words of 32 bits
    drawn = keystream(secret[:KEY_BYTES], secret[KEY_BYTES:], 2 * pairs, device)
    return drawn.view(torch.int64).flatten()[:count]


def throw(words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `ziggurat.throw`: places (float64), which of them are no draws yet, and their layers."""
    step, inner = tables_on(words.device)
    layer = words & (LAYERS - 1)
    z = step.index_select(0, layer).mul_(words)
    where = (z.abs() >= inner.index_select(0, layer)).nonzero()[:, 0]
    return z, where, layer[where]


@cache
def tables_on(device: torch.device) -> tuple[Tensor, Tensor]:
    step, inner = tables()
    return torch.from_numpy(step).to(device), torch.from_numpy(inner).to(device)


@cache
def check(device: torch.device) -> None:
    """Compare tables, and words and places of a spent secret, with those of the CPU, bit by bit.

    A sample of `CHECKED_WORDS`: a device that errs now and then, or in larger pieces alone, may
    pass.

    Raises:
        RuntimeError: they are not.
    """
    secret = bytearray(KEY_BYTES + NONCE_BYTES)
    KeyStream().fill(secret)
    there, here = (
        words(bytes(secret), CHECKED_WORDS, torch.device(kind)) for kind in (device, "cpu")
    )
    z = np.empty(CHECKED_WORDS)
    where, _, layer = places_of(here.numpy().view(np.uint64).copy(), z, Scratch.of(CHECKED_WORDS))
    found = (*tables_on(device), there, *throw(there))
    expected = (*map(torch.from_numpy, tables()), here, *map(torch.from_numpy, (z, where, layer)))
    if not all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True)):
        raise RuntimeError(
            f"noise cannot be drawn on {device}: it computes other words or places than the CPU, "
            "so the noise would not be what the guarantee assumes. Fix: train on the CPU, or "
            "report this with the device and the versions of PyTorch and its driver."
        )
