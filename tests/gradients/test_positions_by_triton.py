"""Sums over positions by a Triton kernel: on a GPU, or in Triton's interpreter."""

import contextlib
import importlib.util
import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dpoptim.gradients.arithmetic import position_sums
from dpoptim.gradients.arithmetic.position_sums import sum_normalised, sum_positions
from dpoptim.gradients.per_sample.joined import OverPositions, side_by_side
from dpoptim.gradients.per_sample.per_sample_grads import Dense

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if GPU else "cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# the interpreter's, which needs NumPy before 2.4 for that
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning"
)
needs_kernel = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not (GPU or INTERPRETED),
    reason="needs Triton and a GPU, or its interpreter (TRITON_INTERPRET=1)",
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if GPU else [torch.float32, torch.float16]


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's tensors lie on the CPU."""
    if not GPU:
        monkeypatch.setattr(position_sums, "on_device_of", lambda x: contextlib.nullcontext())


def sides(records: int, T: int, n: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    g, x = (torch.randn(records, T, n, device=DEVICE) for _ in range(2))
    mean, scale = (torch.rand(records, T, device=DEVICE) for _ in range(2))
    return g.to(dtype), x, mean, scale


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("records", "T", "n"), [(3, 5, 7), (1, 33, 64), (2, 100, 130), (2, 0, 3)])
@pytest.mark.parametrize("centred", [True, False])
def test_sums_are_those_of_the_positions(
    records: int, T: int, n: int, dtype: torch.dtype, centred: bool
) -> None:
    g, x, mean, scale = sides(records, T, n, dtype)
    found, whole = position_sums.normalised_by_triton(x, mean if centred else None, scale, g)
    exact, shift = g.double(), mean.double()[:, :, None] if centred else 0.0
    expected = ((x.double() - shift) * scale.double()[:, :, None] * exact).sum(1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(whole.double(), exact.sum(1), rtol=1e-5, atol=1e-4)


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
def test_several_layers_are_summed_side_by_side(dtype: torch.dtype) -> None:
    several = [sides(3, T, n, dtype)[0] for T, n in [(5, 7), (40, 130), (0, 2), (33, 64), (1, 1)]]
    several.append(sides(3, 9, 100, dtype)[0][:, :, 20:61])  # with gaps between rows
    expected = torch.cat([each.double().sum(1) for each in several], 1)
    found = position_sums.sums_by_triton(several).double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    gradients = [OverPositions(several[0]), Dense(expected[:, :2].float())]
    joined = side_by_side([*gradients, OverPositions(several[1])]).double()
    wanted = torch.cat([expected[:, :7], expected[:, :2], expected[:, 7:137]], 1)
    torch.testing.assert_close(joined, wanted, rtol=1e-5, atol=1e-4)


@needs_kernel
def test_a_record_has_the_same_sums_in_any_company_and_layout() -> None:
    """Also where vectors could be read at a time, and where they could not."""
    g, x, mean, scale = sides(4, 70, 48, torch.float32)
    together = (
        *position_sums.normalised_by_triton(x, mean, scale, g),
        position_sums.sums_by_triton([g]),
    )
    for i in range(4):
        own = slice(i, i + 1)
        for gap in (0, 1, 16):
            wide = torch.cat([g[own], g[own]], 2)[:, :, : 48 + gap].contiguous()[:, :, :48]
            alone = (
                *position_sums.normalised_by_triton(x[own], mean[own], scale[own], wide),
                position_sums.sums_by_triton([x, wide.expand(4, -1, -1)])[:1, 48:],
            )
            assert all(torch.equal(a, b[own]) for a, b in zip(alone, together, strict=True))


@needs_kernel
def test_the_kernels_are_tried_and_used_where_they_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(position_sums, "KINDS", (DEVICE.type,))
    tried = position_sums.compiles_on.__wrapped__
    assert tried(DEVICE, torch.float32)
    monkeypatch.setattr(position_sums, "compiles_on", tried)
    monkeypatch.setenv("DPOPTIM_NATIVE", "0")
    g, x, mean, scale = sides(2, 9, 5, torch.float32)
    torch.testing.assert_close(sum_positions(g), g.sum(1))
    expected = ((x - mean[:, :, None]) * scale[:, :, None] * g).sum(1)
    torch.testing.assert_close(sum_normalised(x, mean, scale, g)[0], expected)


def test_kernels_that_err_or_fail_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    tried = position_sums.compiles_on.__wrapped__
    monkeypatch.setattr(
        position_sums, "sums_by_triton", lambda x: torch.cat([y.sum(1) for y in x], 1)
    )

    def wrong(x: Tensor, mean: Tensor, scale: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return 2.01 * g.square().sum(1), g.sum(1)

    def fails(*given: Tensor) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no such instruction")

    for each, reason in ((wrong, "compute something else"), (fails, "no such instruction")):
        monkeypatch.setattr(position_sums, "normalised_by_triton", each)
        with pytest.warns(RuntimeWarning, match=reason):
            assert not tried(torch.device("cpu"), torch.float32)
    assert not position_sums.triton_serves(torch.ones(2, 3, 4))


def test_any_number_of_records_is_asked_for_where_a_device_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of programs, a GPU takes 65,535 on any axis but the first."""
    grids: list[tuple[int, ...]] = []

    class Asked:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *given, **named: None

    stand_in = SimpleNamespace(sum_many=Asked(), sum_normalised=Asked())
    monkeypatch.setattr(position_sums, "kernels", lambda: stand_in)
    g = torch.ones(1, 1, 70, device=DEVICE).expand(70_000, -1, -1)
    position_sums.sums_by_triton([g, g])
    position_sums.normalised_by_triton(g, None, g[:, :, 0], g)
    assert grids == [(4 * 70_000,), (2 * 70_000,)]
