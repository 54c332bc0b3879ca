"""Matrix products by the fastest of what there is for them.

PyTorch multiplies float32 matrices with MKL, which uses the wide vectors (AVX-512) of Intel's
processors only. oneDNN, which PyTorch carries for convolutions, uses them on all, and there
multiplies large matrices in half the time. Which library is used depends on the processor, on the
user's switch (``torch.backends.mkldnn``) and on the size of one matrix, never on how many rows
there are, which records could influence.

oneDNN compiles a kernel for each shape, and keeps it (`onednn`). Batches have any number of rows,
and texts any length, so rows are multiplied with a matrix by compiled functions, as fast, which
keep nothing (`row_products`).

On accelerators rows of odd length take several times as long, as in a GPT-2, whose vocabulary is
odd. So both sides are filled up with zeros first (`by_even_rows`); the copies take less than that
gains. (tests/gradients/test_odd_rows.py; that kernels round a row alike beside any others is the
vendor's, here as elsewhere.)
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.gradients.arithmetic import onednn, row_products
from dpoptim.gradients.arithmetic.onednn import keeps_rows_apart
from dpoptim.gradients.arithmetic.precision import EXACT, NARROW
from dpoptim.gradients.memory import LEAST_SPARED, OF_GRADIENTS, empty_result
from dpoptim.runtime.torch_internals import (
    has_onednn,
    is_functorch_tensor,
    matmul_precision,
    onednn_is_enabled,
)

LEAST_ENTRIES = 1 << 14  # of a matrix above which oneDNN's longer way to its kernel pays
LONG, LEAST_OF_LONG = 512, 1 << 12  # the same of one with few, long rows, where MKL is slowest
THIN = 16  # most rows of a matrix, with so long rows, that MKL is slow with on any of AMD's
# bytes that accelerators read and write at a time, where rows begin on such boundaries
IN_A_READ = 16
LEAST_ODD = 1 << 10  # numbers of a row; to fill up shorter ones gains nothing


@cache
def onednn_is_faster() -> bool:
    """Whether the processor has wide vectors that MKL leaves unused and oneDNN does not."""
    processor = torch.cpu.get_capabilities()
    if processor.get("architecture") != "x86_64" or not processor.get("avx512_f"):
        return False
    if (
        "intel" in str(processor.get("cpu_name", "intel")).lower()
        or not torch.backends.mkl.is_available()
    ):
        return False
    return has_onednn()


@cache
def whole_vectors() -> bool:
    """Whether the processor computes with its widest vectors at once.

    AMD's take them in halves up to Zen 4; AVX-VNNI came with whole ones, in Zen 5.
    """
    return bool(torch.cpu.get_capabilities().get("avx_vnni"))


def compiles_rows() -> bool:
    """Whether compiled functions multiply rows with a matrix, instead of oneDNN.

    Not where wide vectors are taken whole: there oneDNN makes twice as much of them, and what these
    functions make has not been measured.
    """
    return row_products.serve() and not whole_vectors()


@cache
def compiles_thin_rows() -> bool:
    """Whether compiled functions multiply rows with thin matrices, and MKL with all others.

    So on processors of AMD's with vectors of 8, of which MKL makes as much as can be, but for
    results that are less than two vectors wide.
    """
    processor = torch.cpu.get_capabilities()
    intel = "intel" in str(processor.get("cpu_name", "intel")).lower()
    x86 = processor.get("architecture") == "x86_64"
    return x86 and not intel and not processor.get("avx512_f") and row_products.serve()


def onednn_forms_gradients(x: Tensor, rows: int, columns: int) -> bool:
    """Whether oneDNN forms a record's gradient of a (rows, columns) matrix.

    It copies one side first (see `transposed_product`), which halves of vectors do not make good.
    """
    return whole_vectors() and onednn_multiplies(x, rows, columns)


def onednn_multiplies(x: Tensor, rows: int, columns: int) -> bool:
    """Whether oneDNN multiplies tensors like ``x`` to a (rows, columns) matrix."""
    return better_than_by_mkl(x, rows, columns) and keeps_rows_apart()


def rows_leave_mkl(x: Tensor, rows: int, columns: int, *, least: int | None = None) -> bool:
    """Whether others than MKL, oneDNN or compiled functions, multiply ``x`` with such a matrix."""
    better = better_than_by_mkl(x, rows, columns, least=least)
    return better and (compiles_rows() or keeps_rows_apart())


def better_than_by_mkl(x: Tensor, rows: int, columns: int, *, least: int | None = None) -> bool:
    """Whether MKL is slow with a (rows, columns) matrix, and ``x`` may be multiplied elsewhere.

    Not below ``least`` entries, or `LEAST_ENTRIES`.

    Not vectors: how oneDNN adds up their products depends on how they lie (`batch_invariant`). Nor
    what only looks like a tensor, such as those that `shared` and torch.func follow through a
    model: they would lose sight of it.
    """
    return (
        min(rows, columns) > 1
        and rows * columns > (LEAST_ENTRIES if least is None else min(least, LEAST_ENTRIES))
        and onednn_is_faster()
        and may_leave_mkl(x)
    )


def may_leave_mkl(x: Tensor) -> bool:
    """Whether others than MKL may multiply a tensor like this one."""
    return (
        x.dtype == torch.float32
        and x.is_cpu
        and onednn_is_enabled()
        and matmul_precision("mkldnn") in EXACT
        and plain(x)
    )


def plain(x: Tensor) -> bool:
    """Whether this is a tensor with numbers in rows, signs included, and nothing else."""
    dense = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and not x.is_nested
    return dense and not is_functorch_tensor(x) and not x.is_neg()


def fit(x: Tensor, w: Tensor, bias: Tensor | None) -> bool:
    """Whether these have shapes and one dtype as compiled functions take them."""
    usual = bias is None or (bias.dtype == x.dtype and bias.shape == w.shape[:1])
    return usual and w.dtype == x.dtype and x.numel() > 0 and x.shape[-1] == w.shape[1]


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, spare: int = OF_GRADIENTS) -> Tensor:
    """``x @ w.T + bias``: x of shape (..., k), w (n, k), bias (n,) -> (..., n). Not for autograd.

    Args:
        spare: entries behind a large result by MKL or compiled functions; see `memory`.

    **Guarantee.** Where not by MKL, each row of the result is a function of that row of ``x``, to
    the last bit, beside any other rows. oneDNN's kernels are the vendor's: tested, not proved.
    """
    if not (onednn_is_faster() or compiles_thin_rows()) or not fit(x, w, bias):
        return by_mkl(x, w, bias, spare)
    least = LEAST_OF_LONG if w.shape[1] >= LONG else None
    thin = w.shape[0] <= THIN and w.shape[1] >= LONG and compiles_thin_rows()
    elsewhere = may_leave_mkl(x) if thin else rows_leave_mkl(x, *w.shape, least=least)
    if not elsewhere:
        return by_mkl(x, w, bias, spare)
    bias = None if bias is None else bias.contiguous()  # it is read as if it were
    compiled = thin or compiles_rows()
    return compiled_linear(x, w, bias, spare) if compiled else onednn.linear_in_blocks(x, w, bias)


def by_mkl(x: Tensor, w: Tensor, bias: Tensor | None, spare: int) -> Tensor:
    """`F.linear`, with ``spare`` entries behind a large result; of odd rows on accelerators."""
    if not x.is_cpu and plain(x):
        return by_even_rows(x, w, bias)
    entries = x.numel() // max(1, w.shape[-1]) * w.shape[0]
    large = entries >= LEAST_SPARED and not torch.is_grad_enabled()
    own = large and x.dtype == torch.float32 and x.is_cpu and fit(x, w, bias)
    if not own or not all(plain(each) for each in (x, w, bias) if each is not None):
        return F.linear(x, w, bias)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    product = empty_result(rows.shape[0], w.shape[0], spare)
    if bias is None:
        torch.mm(rows, w.T, out=product)
    else:
        torch.addmm(bias, rows, w.T, out=product)
    # in its own shape: a view must not be changed in place
    return product if x.dim() == 2 else product.resize_(*x.shape[:-1], w.shape[0])


def by_even_rows(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` on accelerators; not for autograd.

    **Guarantee.** A row of the result is a sum of the same products, and of zeros.
    """
    outputs, inputs = (lacking(x, length) for length in w.shape)
    if not (outputs or inputs):
        return F.linear(x, w, bias)
    w = F.pad(w.to(x.dtype), (0, inputs, 0, outputs))
    bias = None if bias is None else F.pad(bias.to(x.dtype), (0, outputs))
    product = F.linear(F.pad(x, (0, inputs)) if inputs else x, w, bias)
    return product[..., : product.shape[-1] - outputs].contiguous()


def lacking(x: Tensor, length: int) -> int:
    """Numbers that rows of this length lack, so that the next begins where it should."""
    odd = not x.is_cpu and x.dtype in NARROW and length >= LEAST_ODD
    return -length % (IN_A_READ // x.element_size()) if odd else 0


def compiled_linear(x: Tensor, w: Tensor, bias: Tensor | None, spare: int) -> Tensor:
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    product = row_products.multiply(rows, w, bias, spare)
    # in its own shape: a view must not be changed in place
    return product if x.dim() == 2 else product.resize_(*x.shape[:-1], w.shape[0])


def linear_by(w: Tensor, like: Tensor) -> Callable[[Tensor], Tensor]:
    """`linear` with one weight for many inputs of the shape of ``like`` (B, k), chosen once."""
    rows, width = like.shape
    fits = rows > 0 and like.dtype == w.dtype and rows_leave_mkl(like, *w.shape)
    if fits and compiles_rows():
        return row_products.Panels(w).multiply
    whole = min((size for size in onednn.BLOCKS if size >= rows), default=0)
    if not fits or not onednn.well_filled(whole) <= rows <= whole <= onednn.ALWAYS:
        return partial(linear, w=w)
    if rows == whole:
        return partial(onednn.by_onednn, w=w)
    room = like.new_zeros(whole, width)
    given = room[:rows]

    def filled_up_once(x: Tensor) -> Tensor:
        given.copy_(x)
        return onednn.by_onednn(room, w)[:rows]

    return filled_up_once


def linear_of_constants(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` for autograd, of weights without a gradient; under autocast as torch runs it."""
    if torch.is_autocast_enabled(x.device.type) or not plain(w) or not rows_leave_mkl(x, *w.shape):
        return F.linear(x, w, bias)
    return LinearOfConstants.apply(x, w, bias)


class LinearOfConstants(torch.autograd.Function):
    """Inputs: x (..., k), w (n, k), bias (n,) or None. Only x gets a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(w)
        return linear(x, w, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (w,) = ctx.saved_tensors
        return linear_of_constants(g, w.T), None, None
