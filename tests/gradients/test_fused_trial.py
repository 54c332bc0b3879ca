"""Which devices and dtypes the fused kernels serve, by stand-ins for them that need no Triton."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dpoptim.gradients import fused_outer
from dpoptim.gradients.fused_outer import ADD, MEASURE, compiles_on

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
    _, _, _, wanted, work, begin, end, share, column, _, way, _ = given
    gradients = torch.einsum("btp,btd->bpd", g.float(), a.float()).flatten(1)
    if work != ADD:
        squares[begin:end, column:] = 0
        squares[begin:end, column] = gradients[begin:end].double().square().sum(1)
    if work != MEASURE and wanted[0]:
        for turn, start in enumerate(range(begin, end, share)):
            some = slice(start, min(start + share, end))
            total[turn] = weights[way, some].float() @ gradients[some]


def gram_products(g: Tensor, *given: Any, **sizes: Any) -> None:
    pass


def claim(squares: Tensor, lengths: Tensor, claims: Tensor, *given: Any, **sizes: Any) -> None:
    claims.fill_(torch.inf)  # whatever is measured fits


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
    monkeypatch.setattr(fused_outer, "OTHERS", ("cpu",))
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
    assert [compiles_on(CPU, dtype) for dtype in (torch.float16, torch.bfloat16)] == [True, False]
    assert compiles_on(CPU, torch.float32)


def test_tiles_that_a_core_has_no_memory_for_are_not_tried_first_in_training(
    kernels: dict[str, Callable[..., None]],
) -> None:
    def small_core(*given: Any, BLOCK_P: int, BLOCK_D: int, **sizes: Any) -> None:
        if BLOCK_P * BLOCK_D > 64 * 64:
            raise RuntimeError("out of resource: shared memory")
        measure_or_add(*given, **sizes)

    kernels["measure_or_add"] = small_core
    assert compiles_on(CPU, torch.float32)
    assert not compiles_on(CPU, torch.float16)


def test_other_numbers_do_not_serve_and_want_of_memory_is_told(
    kernels: dict[str, Callable[..., None]],
) -> None:
    def wrong(g: Tensor, *given: Any, **sizes: Any) -> None:
        measure_or_add(g * 2, *given, **sizes)

    def full(*given: Any, **sizes: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    kernels["measure_or_add"] = wrong
    assert not compiles_on(CPU, torch.float32)
    kernels["measure_or_add"] = full
    with pytest.raises(torch.OutOfMemoryError):
        compiles_on(CPU, torch.float16)
