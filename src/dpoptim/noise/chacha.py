"""The ChaCha20 keystream (RFC 8439) by whole-tensor operations, on the device of its words.

AES needs tables or instructions of its own; this needs sums, exclusive ors and rotations of 32-bit
numbers, which every device has. Like AES-256 it is a standard cipher with a 256-bit key and no
attack known.
"""

import torch
from torch import Tensor

KEY_BYTES, NONCE_BYTES = 32, 12
DOUBLE_ROUNDS = 10
MOST_BLOCKS = 1 << 32  # of one key and nonce: the counter has 32 bits


def keystream(
    key: bytes, nonce: bytes, blocks: int, device: torch.device | str, *, first: int = 0
) -> Tensor:
    """Words of consecutive blocks: int32 (16, blocks), column j of the counter ``first + j``.

    Args:
        key: secret, 32 bytes.
        nonce: 12 bytes; a key and a nonce must not come twice.
        blocks: how many; ``first + blocks`` at most 2^32.
    """
    if len(key) != KEY_BYTES or len(nonce) != NONCE_BYTES:
        raise ValueError(
            f"key must have {KEY_BYTES} bytes and nonce {NONCE_BYTES}, got {len(key)} and "
            f"{len(nonce)}."
        )
    if first < 0 or blocks < 0 or first + blocks > MOST_BLOCKS:
        raise ValueError(
            f"first={first} and blocks={blocks} must stay within {MOST_BLOCKS} blocks of a key and "
            "nonce."
        )
    fixed = torch.frombuffer(
        bytearray(b"expand 32-byte k" + key + bytes(4) + nonce), dtype=torch.int32
    ).to(device)
    start = fixed[:, None].expand(16, blocks).clone()
    start[12] = torch.arange(first, first + blocks, dtype=torch.int64, device=device).to(
        torch.int32
    )
    a, b, c, d = start.clone().view(4, 4, blocks)
    room = torch.empty_like(a)
    for _ in range(DOUBLE_ROUNDS):
        quarter_rounds(a, b, c, d, room)
        b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)  # the diagonals become columns
        quarter_rounds(a, b, c, d, room)
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    return start.add_(torch.cat([a, b, c, d]))


def quarter_rounds(a: Tensor, b: Tensor, c: Tensor, d: Tensor, room: Tensor) -> None:
    """Four of them at once, in place, one for each row of the (4, blocks) tensors; sums wrap."""
    for x, y, z, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        x.add_(y)
        z.bitwise_xor_(x)
        rotate_left(z, turn, room)


def rotate_left(x: Tensor, bits: int, room: Tensor) -> None:
    torch.bitwise_left_shift(x, bits, out=room)
    x.bitwise_right_shift_(32 - bits)
    x.bitwise_and_((1 << bits) - 1)  # the shift to the right repeats the sign
    x.bitwise_or_(room)
