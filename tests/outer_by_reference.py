"""What the Triton kernels of `outer_kernels` compute, by PyTorch's operations on the CPU: for tests
where there is neither a GPU nor Triton's interpreter.

They read tables and addresses as the kernels do, record by record, so that a record's numbers are
the same in any company.
"""

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dpoptim.gradients.per_sample import fused_calls
from dpoptim.gradients.per_sample.fused_calls import ADD, MEASURE
from dpoptim.gradients.per_sample.fused_outer import LEAST_SQUARE, MEASURED_ABOVE


class Launched:
    """A stand-in for a kernel, started as ``kernel[grid](...)``."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._run


def numbers_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory as a tensor."""
    entries = math.prod(shape)
    memory = (ctypes.c_char * (entries * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=entries).view(shape)


def sides(row: Tensor, records: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Both sides of a layer in a table, in float32."""
    g, a, _, T, p, d, of_g, of_a, _, _ = row.tolist()
    left = numbers_at(g, (records, T, of_g), like.dtype)[:, :, :p]
    return left.float(), numbers_at(a, (records, T, of_a), like.dtype)[:, :, :d].float()


def formed(row: Tensor, records: int, like: Tensor, **sizes: Any) -> Tensor:
    """Gradients of a layer: (B, p d)."""
    g, a = sides(row, records, like)
    found = torch.stack([left.T @ right for left, right in zip(g, a, strict=True)])
    if sizes["LOOKED_UP"]:
        index = sizes["index"].long()[:, :, None].expand_as(sizes["values"])
        found.scatter_add_(1, index, sizes["values"])
    return found.flatten(1)


def squared(gradients: Tensor) -> Tensor:
    """Squares as the kernels have them, in float32."""
    return torch.stack([each.square().double().sum() for each in gradients])


def form(
    table: Tensor, layers: Tensor, squares: Tensor, like: Tensor, tiles: int, **sizes: Any
) -> None:
    squares.zero_()
    for row in table:
        gradients = formed(row, len(squares), like, **sizes)
        numbers_at(int(row[2]), gradients.shape, torch.float32).copy_(gradients)
        squares[:, int(row[8])] = squared(gradients)


def weighted(weights: Tensor, gradients: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sum of those that have weight, one after the other."""
    total = torch.zeros(gradients.shape[1], dtype=dtype)
    for weight, each in zip(weights.to(dtype), gradients, strict=True):
        if weight != 0:
            total += weight * each
    return total


def measure_or_add(
    table: Tensor, layers: Tensor, squares: Tensor, weights: Tensor, *given: Any, **sizes: Any
) -> None:
    wanted, like, _, work, begin, end, share, of_layer, of_turn, records = given
    if work != ADD:
        squares[begin:end] = 0
    for layer, row in enumerate(table):
        if not wanted[layer]:
            continue
        gradients = formed(row, records, like, **sizes)
        if work != ADD:
            squares[begin:end, int(row[8])] = squared(gradients[begin:end])
        if work != MEASURE:
            own = weights[layer if of_layer else 0]
            for turn, start in enumerate(range(begin, end, share)):
                some = slice(start, min(start + share, end))
                out = int(row[2]) + 4 * turn * of_turn
                total = numbers_at(out, gradients.shape[1:], torch.float32)
                total.copy_(weighted(own[some], gradients[some]))


def add_kept(
    table: Tensor, layers: Tensor, weights: Tensor, *given: Any, EXACT: bool, **sizes: Any
) -> None:
    begin, end, of_layer = given
    dtype = torch.float64 if EXACT else torch.float32
    for layer, (kept, out, entries, _) in enumerate(table.tolist()):
        gradients = numbers_at(kept, (weights.shape[1], entries), torch.float32)[begin:end]
        own = weights[layer if of_layer else 0, begin:end]
        numbers_at(out, (entries,), dtype).copy_(weighted(own, gradients, dtype))


def gram_products(
    table: Tensor, squares: Tensor, lengths: Tensor, like: Tensor, *given: Any, **sizes: Any
) -> None:
    squares.zero_()
    lengths.zero_()
    for layer, row in enumerate(table):
        of_g, of_a = (x @ x.mT for x in sides(row, squares.shape[1], like))
        products = of_g.double() * of_a.double()
        squares[layer, :, 0] = products.sum((1, 2))
        lengths[layer, :, 0] = products.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt().sum(1)


def claim(squares: Tensor, lengths: Tensor, claims: Tensor, *given: Any, **sizes: Any) -> None:
    found = squares.sum(2)
    ghost = torch.where(found > 0, found, found * 0) + lengths.sum(2) ** 2 * 2**-22
    claims.copy_(ghost + ghost * 2**-15)


def hold(
    table: Tensor, squares: Tensor, claims: Tensor, weights: Tensor, *given: Any, **sizes: Any
) -> None:
    shorter, exceeded, _, of_layer, _, _ = given
    for layer, row in enumerate(table.tolist()):
        entries = row[4] * row[5]
        measured = squares[:, row[8] : row[8] + row[9]].sum(1)
        measured = measured * (1 + MEASURED_ABOVE) + entries * LEAST_SQUARE
        own = weights[layer if of_layer else 0]
        fits = (measured <= claims[layer]) | (own == 0)
        factor = (claims[layer] / measured).sqrt()
        shorter[layer] = torch.where(fits, own, own * factor.where(factor < 1, 0.0))
        exceeded[layer] = int(not fits.all())


KERNELS = {
    each.__name__: each for each in (form, measure_or_add, add_kept, gram_products, claim, hold)
}


@contextlib.contextmanager
def by_reference(runs: dict[str, Callable[..., None]]) -> Iterator[None]:
    """Run these instead of the kernels, for tensors on the CPU."""

    def stand_in() -> SimpleNamespace:
        return SimpleNamespace(**{name: Launched(run) for name, run in runs.items()})

    with (
        patch.object(fused_calls, "kernels", stand_in),
        patch.object(fused_calls, "triton", lambda: SimpleNamespace(set_allocator=id)),
        patch.object(fused_calls, "on_device_of", lambda x: contextlib.nullcontext()),
    ):
        yield
