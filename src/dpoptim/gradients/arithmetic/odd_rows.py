"""Products with rows of odd length, as a language model's over its vocabulary, on accelerators.

They read and write sixteen bytes at a time where rows begin on such boundaries, and take several
times as long elsewhere, as in a GPT-2, whose vocabulary is odd. So both sides are filled up with
zeros first; the copies take less than that gains.

**Guarantee.** A row of the result is a sum of the same products, and of zeros.
(tests/gradients/test_odd_rows.py; that kernels round a row alike beside any others is the vendor's,
here as elsewhere.)
"""

import torch.nn.functional as F
from torch import Tensor

from dpoptim.gradients.arithmetic.precision import NARROW

IN_A_READ = 16  # bytes
LEAST = 1 << 10  # numbers of a row; to fill up shorter ones gains nothing


def linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`; not for autograd."""
    outputs, inputs = (lacking(x, length) for length in w.shape)
    if not (outputs or inputs):
        return F.linear(x, w, bias)
    w = F.pad(w.to(x.dtype), (0, inputs, 0, outputs))
    bias = None if bias is None else F.pad(bias.to(x.dtype), (0, outputs))
    product = F.linear(F.pad(x, (0, inputs)) if inputs else x, w, bias)
    return product[..., : product.shape[-1] - outputs].contiguous()


def lacking(x: Tensor, length: int) -> int:
    """Numbers that rows of this length lack, so that the next begins where it should."""
    odd = not x.is_cpu and x.dtype in NARROW and length >= LEAST
    return -length % (IN_A_READ // x.element_size()) if odd else 0
