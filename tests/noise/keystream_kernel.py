"""A kernel that puts out the keystream of the kernels that draw; needs Triton."""

import struct

import numpy as np
import torch
import triton
import triton.language as tl

from dpoptim.noise.kernels import NUMBERS, chacha, joined


@triton.jit(do_not_specialize=["first", "nonce", *NUMBERS[:8]])
def put_out(out, first, nonce, k0, k1, k2, k3, k4, k5, k6, k7, BLOCKS: tl.constexpr):
    block = tl.arange(0, BLOCKS)
    counter = (block + first).to(tl.uint32)
    words = chacha(counter, nonce, k0, k1, k2, k3, k4, k5, k6, k7)
    for i in tl.static_range(8):
        tl.store(out + 8 * block + i, joined(words[2 * i], words[2 * i + 1]))


def keystream(key: bytes, nonce: int, first: int, blocks: int, device: torch.device) -> np.ndarray:
    """As the reference's; ``blocks`` is a power of 2."""
    out = torch.empty(blocks, 8, dtype=torch.int64, device=device)
    signed = [int(np.uint32(each).astype(np.int32)) for each in (first, nonce)]
    put_out[(1,)](out, *signed, *struct.unpack("<8i", key), blocks)
    return out.cpu().numpy().view(np.uint64)
