"""Which devices and dtypes the fused kernels serve, by stand-ins for them that need no Triton."""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.arithmetic.norms import NORM_BLOCK
from dpoptim.gradients.choose_formula import PublicSizes
from dpoptim.gradients.per_sample import fused_outer
from dpoptim.gradients.per_sample.fused_factors import Factors, FusedLayer
from dpoptim.gradients.per_sample.fused_outer import FusedOuter, compiles_on
from dpoptim.gradients.per_sample.sequence_outer import SequenceOuter
from outer_by_reference import KERNELS, by_reference, measure_or_add

CPU = torch.device("cpu")
FORMING = ["form", "measure_or_add", "gram_products"]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Callable[..., None]]]:
    """What runs instead of them, to be changed, for tensors on the CPU."""
    runs = {**KERNELS}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(fused_outer, "KINDS", ("cpu",))
    compiles_on.cache_clear()
    with by_reference(runs):
        yield runs
    compiles_on.cache_clear()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernels_that_multiply_serve(dtype: torch.dtype) -> None:
    assert compiles_on(CPU, dtype)


@pytest.mark.parametrize("name", FORMING)
def test_a_dtype_that_a_device_lacks_is_formed_otherwise(
    name: str, kernels: dict[str, Callable[..., None]]
) -> None:
    def without_bfloat16(*given: Any, **sizes: Any) -> None:
        if any(isinstance(each, Tensor) and each.dtype == torch.bfloat16 for each in given):
            raise RuntimeError("ptxas: feature '.bf16' requires .target sm_80 or higher")
        KERNELS[name](*given, **sizes)

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


@pytest.mark.parametrize("name", FORMING)
def test_other_numbers_do_not_serve_and_want_of_memory_is_told(
    name: str, kernels: dict[str, Callable[..., None]]
) -> None:
    def wrong(*given: Any, **sizes: Any) -> None:
        KERNELS[name](*given, **sizes)
        (given[1] if name == "gram_products" else given[2]).mul_(4)  # squares

    def full(*given: Any, **sizes: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    kernels[name] = wrong
    with pytest.warns(RuntimeWarning, match="compute something else"):
        assert not compiles_on(CPU, torch.float32)
    kernels[name] = full
    with pytest.raises(torch.OutOfMemoryError):
        compiles_on(CPU, torch.float16)


@pytest.mark.usefixtures("kernels")
def test_both_sides_dtypes_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sides of two dtypes are multiplied in float32, which a device may lack."""
    monkeypatch.setattr(fused_outer, "serves", lambda x: x.dtype == torch.bfloat16)
    g, a = torch.ones(2, 3, 4, dtype=torch.bfloat16), torch.ones(2, 3, 5)
    public = PublicSizes(8, 8, 1 << 30, 3)
    assert SequenceOuter(g, a.bfloat16()).chosen(public).fused is not None
    assert SequenceOuter(g, a).chosen(public).fused is None


@pytest.mark.usefixtures("kernels")
def test_gradients_of_zero_are_no_longer_than_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of records that reach no expert of a layer: else it would be added up twice."""
    g = torch.ones(3, 2, 4)
    g[1] = 0
    fused = FusedOuter({0: FusedLayer.of(Factors.of(g, torch.ones(3, 2, 5)), "claimed")}, ["all"])
    fused.measure(NORM_BLOCK)
    held, hold = [], fused._calls.hold
    monkeypatch.setattr(fused._calls, "hold", lambda *given: held.append(hold(*given)) or held[-1])
    weights = torch.ones(1, 3, dtype=torch.float64)
    fused.add({"all": weights}, [Sums([20])], [[3]])
    (shorter, exceeded), *_ = held
    assert torch.equal(shorter, weights)
    assert not exceeded.any()
