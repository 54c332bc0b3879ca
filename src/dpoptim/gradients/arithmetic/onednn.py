"""Products of matrices by oneDNN, given in few shapes, and a trial of whether it keeps rows apart.

oneDNN compiles a kernel for each shape, and keeps it. Batches have any number of rows, and texts
any length: so what it is given is cut and filled up to few shapes, else memory would grow with
every new one.

It chooses a kernel by the shape of a product. Those of PyTorch 2.13 (oneDNN 3.12) all add up in
one order; some of 2.11's (3.10) do not, so that how many rows there are decides how one is rounded.
Which kernels there are depends on the processor, too, so that no version tells. Where a trial finds
such a kernel, oneDNN multiplies nothing.
"""

import math
from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dpoptim.runtime.torch_internals import never_compiled, onednn_linear

# rows that are multiplied at once: threads share a product, so few large ones scale best
BLOCKS = (4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4)
ALWAYS, IN_CACHE = 256, 1 << 21  # rows, and entries of a result, that are made elsewhere and copied
FEW = 128  # rows up to which a call costs more than half as many rows again
INNER = 32  # that inner lengths are filled up to multiples of
TRIED_ROWS = (4, 8, 16, 32, 64, 128, 256, 1024)  # of `BLOCKS`; a kernel each
WIDTH, OUTPUTS = 333, 77  # no multiples of a vector
TRIED_INNER, ZEROS = (32, 704), 64  # inner lengths, and what fills them up
_found: dict[int, bool] = {}  # by threads, among which a product is shared out


def by_onednn(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ w.T + bias`` as one call of one shape."""
    if not w.is_contiguous() and not w.T.is_contiguous():
        w = w.contiguous()  # oneDNN knows no rows that overlap
    return onednn_linear(x, w, bias)


def linear_in_blocks(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    if math.prod(x.shape[:-1]) in BLOCKS:
        return by_onednn(x if x.dim() == 2 else x.contiguous(), w, bias)
    # in its own shape: a view must not be changed in place
    result = x.new_empty(*x.shape[:-1], w.shape[0])
    if x.dim() == 2:
        in_blocks_of_rows(x, w, bias, result)
    else:
        in_blocks_of_rows(x.reshape(-1, x.shape[-1]), w, bias, result.view(-1, w.shape[0]))
    return result


def in_blocks_of_rows(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> None:
    rows = x.shape[0]
    for start, size in blocks_of_rows(rows, max(ALWAYS, IN_CACHE // w.shape[0])):
        block = x[start : start + size]
        here = min(size, rows)
        filled = block if here == size else F.pad(block, (0, 0, 0, size - here))
        product = by_onednn(filled, w, bias)
        out[start : start + size] = product if here == size else product[:here]


@lru_cache(maxsize=4096)
def blocks_of_rows(rows: int, most: int) -> tuple[tuple[int, int], ...]:
    """First row and size of each block; a single one may be larger than all rows."""
    sizes = [size for size in BLOCKS if size <= min(rows, most)] or [BLOCKS[-1]]
    blocks = []
    start = 0
    while start < rows:
        left = rows - start
        size = next((size for size in sizes if left >= well_filled(size)), sizes[-1])
        # a part of the last block once more, to the same bits, rather than zeros
        start = max(0, min(start, rows - size))
        blocks.append((start, size))
        start += size
    return tuple(blocks)


def well_filled(size: int) -> float:
    """Rows from which on a whole block of so many is multiplied."""
    return size * (5 / 8 if size <= FEW else 7 / 8)


def transposed_product(left: Tensor, right: Tensor) -> Tensor:
    """``left.T @ right`` by oneDNN: (k, m), (k, n) -> (m, n), float32 on the CPU, in new memory.

    **Guarantee.** A function of the rows, to the last bit, wherever and however they lie (tested,
    not proved). Rows of zeros after them change nothing up to k = 1,024, beyond which oneDNN adds
    up several blocks.
    """
    inner = left.shape[0]
    missing = -inner % INNER
    if missing:
        return by_onednn(F.pad(left.T, (0, missing)), F.pad(right, (0, 0, 0, missing)).T)
    return by_onednn(left.T, right.T) if inner else left.new_zeros(left.shape[1], right.shape[1])


def filled_up(rows: int, columns: int, like: Tensor) -> Callable[[Tensor], Tensor]:
    """Function that fills (rows, columns) matrices up for `transposed_product`, and widens them.

    It takes one after the other into the same memory, which costs less than to fill each up there.
    """
    room = like.new_zeros(rows + -rows % INNER, columns, dtype=torch.float32)
    given = room[:rows]

    def fill(x: Tensor) -> Tensor:
        given.copy_(x)
        return room

    return fill


def keeps_rows_apart() -> bool:
    """Whether a row is rounded alike alone and in company, and no zeros change a sum.

    Tried at the first call for a number of threads: about 30 ms.
    """
    threads = torch.get_num_threads()
    if threads not in _found:
        _found[threads] = trial_succeeds()
    return _found[threads]


@never_compiled
def trial_succeeds() -> bool:
    with torch.no_grad():
        return all(torch.equal(found, expected) for found, expected in products_alike())


def products_alike() -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of results that are the same to the last bit where rows are kept apart."""
    x, w = made_up(max(TRIED_ROWS), WIDTH), made_up(OUTPUTS, WIDTH)
    together = onednn_linear(x, w, None)
    for rows in TRIED_ROWS:
        yield onednn_linear(x[-rows:], w, None), together[-rows:]
    yield onednn_linear(x, w.T.contiguous().T, None), together
    for inner in TRIED_INNER:
        left, right = made_up(inner, WIDTH), made_up(inner, OUTPUTS)
        longer = [torch.cat([each, each.new_zeros(ZEROS, each.shape[1])]) for each in (left, right)]
        yield onednn_linear(left.T, right.T, None), onednn_linear(longer[0].T, longer[1].T, None)


def made_up(rows: int, columns: int) -> Tensor:
    """Numbers of all signs and sizes, drawn from no generator."""
    places = torch.arange(1, rows * columns + 1, dtype=torch.float64, device="cpu")
    return (places * places).sin().to(torch.float32).view(rows, columns)
