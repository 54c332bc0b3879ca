"""A trial of whether oneDNN multiplies a record's rows alike whatever lies beside them.

oneDNN chooses a kernel by the shape of a product. Those of PyTorch 2.13 (oneDNN 3.12) all add up in
one order; some of 2.11's (3.10) do not, so that how many rows there are decides how one is rounded.
Which kernels there are depends on the processor, too, so that no version tells. Where a trial finds
such a kernel, oneDNN multiplies nothing.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dpoptim.runtime.torch_internals import never_compiled, onednn_linear

ROWS = (4, 8, 16, 32, 64, 128, 256, 1024)  # of `multiplication.BLOCKS`; a kernel each
WIDTH, OUTPUTS = 333, 77  # no multiples of a vector
INNER, ZEROS = (32, 704), 64  # inner lengths, and what fills them up
_found: dict[int, bool] = {}  # by threads, among which a product is shared out


def keeps_rows_apart() -> bool:
    """Whether a row is rounded alike alone and in company, and no zeros change a sum.

    Tried at the first call for a number of threads: about 30 ms.
    """
    threads = torch.get_num_threads()
    if threads not in _found:
        _found[threads] = tried()
    return _found[threads]


@never_compiled
def tried() -> bool:
    with torch.no_grad():
        return all(torch.equal(found, expected) for found, expected in products())


def products() -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of results that are the same to the last bit where rows are kept apart."""
    x, w = numbers(max(ROWS), WIDTH), numbers(OUTPUTS, WIDTH)
    together = onednn_linear(x, w, None)
    for rows in ROWS:
        yield onednn_linear(x[-rows:], w, None), together[-rows:]
    yield onednn_linear(x, w.T.contiguous().T, None), together
    for inner in INNER:
        left, right = numbers(inner, WIDTH), numbers(inner, OUTPUTS)
        longer = [torch.cat([each, each.new_zeros(ZEROS, each.shape[1])]) for each in (left, right)]
        yield onednn_linear(left.T, right.T, None), onednn_linear(longer[0].T, longer[1].T, None)


def numbers(rows: int, columns: int) -> Tensor:
    """Numbers of all signs and sizes, drawn from no generator."""
    places = torch.arange(1, rows * columns + 1, dtype=torch.float64, device="cpu")
    return (places * places).sin().to(torch.float32).view(rows, columns)
