"""Results that others of their size may lie in afterwards."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.gradients.arithmetic import multiplication
from dpoptim.gradients.backward_pass import BackwardRecorder
from dpoptim.gradients.hooks.hook_manager import HookManager
from dpoptim.gradients.memory import EXTRA, LEAST_SPARED, OF_GRADIENTS, empty_result


def spare(x: Tensor) -> int:
    """Bytes behind a tensor in its memory."""
    return x.untyped_storage().nbytes() - x.nbytes


@pytest.mark.parametrize("rows", [1, LEAST_SPARED // 64 - 1, LEAST_SPARED // 64])
def test_spare_room_is_zero_and_for_large_results_alone(rows: int) -> None:
    """Whoever stores one in a file stores no memory that others have left."""
    out = empty_result(rows, 64, 100)
    assert out.shape == (rows, 64)
    assert out.is_contiguous()
    assert not out._is_view()
    assert spare(out) == (400 if rows * 64 >= LEAST_SPARED else 0)
    behind = torch.empty(0).set_(out.untyped_storage())[out.numel() :]
    assert bool((behind == 0).all())


@pytest.mark.parametrize("library", ["rows", "MKL"], indirect=True)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(256, 96), (8, 32, 96)])
def test_gradients_fit_where_outputs_lay(
    library: str, bias: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An aligned block of the output's size does, and one of a product with gradients, which in
    turn leaves room for a block without any.
    """
    layer = nn.Linear(96, 256, bias=bias)
    back: list[Tensor] = []
    multiplies = "by_mkl" if library == "MKL" else "compiled_linear"
    honest = getattr(multiplication, multiplies)

    def noted(x: Tensor, w: Tensor, b: Tensor | None, spare: int) -> Tensor:
        back.append(honest(x, w, b, spare))
        return back[-1]

    monkeypatch.setattr(multiplication, multiplies, noted)
    recorder = BackwardRecorder(may_round=True)
    recorder.close = lambda finished: None
    hooks = HookManager(layer, recorder)
    x = torch.randn(shape, requires_grad=True)
    try:
        output = layer(x)
        output.sum().backward()
    finally:
        hooks.undo()
    forward, gradient = back
    assert not output._is_view()
    assert (forward.shape, gradient.shape) == (output.shape, x.shape)
    assert spare(gradient) >= EXTRA
    assert spare(output) >= spare(gradient) + EXTRA
    assert spare(gradient) == OF_GRADIENTS * 4


@pytest.mark.parametrize("library", ["MKL"], indirect=True)
@pytest.mark.parametrize("biased", [True, False])
def test_products_with_spare_room_are_those_without(library: str, biased: bool) -> None:
    """To the same bits, for rows in one axis or two, and transposed matrices."""
    bias = torch.randn(96) if biased else None
    for shape in [(512, 64), (8, 65, 64)]:
        x = torch.randn(shape)
        for w in (torch.randn(96, 64), torch.randn(64, 96).T):
            with torch.no_grad():
                given = multiplication.linear(x, w, bias)
            assert spare(given) == OF_GRADIENTS * 4
            assert torch.equal(given, F.linear(x, w, bias))


@pytest.mark.parametrize("library", ["MKL"], indirect=True)
def test_spare_room_is_not_in_the_way_of_autograd(library: str) -> None:
    x, w = torch.randn(512, 64, requires_grad=True), torch.randn(96, 64)
    multiplication.linear(x, w).sum().backward()
    torch.testing.assert_close(x.grad, w.sum(0).expand(512, 64))
