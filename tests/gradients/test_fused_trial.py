"""Which devices and dtypes the fused kernels serve, by stand-ins for them that need no Triton."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dpoptim.gradients.per_sample import fused_outer, fused_trial
from dpoptim.gradients.per_sample.fused_outer import ADD, MEASURE
from dpoptim.gradients.per_sample.fused_trial import compiles_on

CPU = torch.device("cpu")


class Launched:
    """A stand-in for a kernel, started as ``kernel[grid](...)``."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._run


def measure_or_add(
    g: Tensor, a: Tensor, weights: Tensor, squares: Tensor, total: Tensor, *given: Any, **sizes: Any
) -> None:
    index, values, _, wanted, work, begin, end, share, column, _, way, _ = given
    formed = torch.einsum("btp,btd->bpd", g.float(), a.float())
    if sizes["LOOKED_UP"]:
        formed.scatter_add_(1, index.long()[:, :, None].expand_as(values), values)
    gradients = formed.flatten(1)
    if work != ADD:
        squares[begin:end, column:] = 0
        squares[begin:end, column] = gradients[begin:end].double().square().sum(1)
    if work != MEASURE and wanted[0]:
        for turn, start in enumerate(range(begin, end, share)):
            some = slice(start, min(start + share, end))
            total[turn] = weights[way, some].float() @ gradients[some]


def gram_products(g: Tensor, a: Tensor, squares: Tensor, *given: Any, **sizes: Any) -> None:
    of_both = (x.double() @ x.double().mT for x in (g, a))
    squares[:, 0] = next(of_both).mul(next(of_both)).sum((1, 2))
    squares[:, 1:] = 0


def claim(squares: Tensor, lengths: Tensor, claims: Tensor, *given: Any, **sizes: Any) -> None:
    claims.copy_(squares.sum(1) * (1 + 2**-20))


def hold(*given: Any, **sizes: Any) -> None:
    pass


KERNELS = {each.__name__: each for each in (measure_or_add, gram_products, claim, hold)}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Callable[..., None]]]:
    """What runs instead of them, to be changed, for tensors on the CPU."""
    runs = {**KERNELS}

    def stand_in() -> SimpleNamespace:
        return SimpleNamespace(**{name: Launched(run) for name, run in runs.items()})

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(fused_trial, "KINDS", ("cpu",))
    monkeypatch.setattr(fused_outer, "kernels", stand_in)
    monkeypatch.setattr(fused_outer, "on_device_of", lambda x: contextlib.nullcontext())
    compiles_on.cache_clear()
    yield runs
    compiles_on.cache_clear()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernels_that_multiply_serve(dtype: torch.dtype) -> None:
    assert compiles_on(CPU, dtype)


@pytest.mark.parametrize("name", ["measure_or_add", "gram_products"])
def test_a_dtype_that_a_device_lacks_is_formed_otherwise(
    name: str, kernels: dict[str, Callable[..., None]]
) -> None:
    def without_bfloat16(g: Tensor, *given: Any, **sizes: Any) -> None:
        if g.dtype == torch.bfloat16:
            raise RuntimeError("ptxas: feature '.bf16' requires .target sm_80 or higher")
        KERNELS[name](g, *given, **sizes)

    kernels[name] = without_bfloat16
    assert compiles_on(CPU, torch.float16)
    assert compiles_on(CPU, torch.float32)
    with pytest.warns(RuntimeWarning, match=r"torch.bfloat16 \(RuntimeError: ptxas"):
        assert not compiles_on(CPU, torch.bfloat16)


def test_tiles_that_a_core_has_no_memory_for_are_not_tried_first_in_training(
    kernels: dict[str, Callable[..., None]],
) -> None:
    def small_core(*given: Any, BLOCK_P: int, BLOCK_D: int, **sizes: Any) -> None:
        if BLOCK_P * BLOCK_D > 64 * 64:
            raise RuntimeError("out of resource: shared memory")
        measure_or_add(*given, **sizes)

    kernels["measure_or_add"] = small_core
    assert compiles_on(CPU, torch.float32)
    with pytest.warns(RuntimeWarning, match="shared memory"):
        assert not compiles_on(CPU, torch.float16)


@pytest.mark.parametrize("name", ["measure_or_add", "gram_products"])
def test_other_numbers_do_not_serve_and_want_of_memory_is_told(
    name: str, kernels: dict[str, Callable[..., None]]
) -> None:
    def wrong(g: Tensor, *given: Any, **sizes: Any) -> None:
        KERNELS[name](g * 2, *given, **sizes)

    def full(*given: Any, **sizes: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    kernels[name] = wrong
    with pytest.warns(RuntimeWarning, match="compute something else"):
        assert not compiles_on(CPU, torch.float32)
    kernels[name] = full
    with pytest.raises(torch.OutOfMemoryError):
        compiles_on(CPU, torch.float16)
