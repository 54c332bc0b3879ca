"""Convolutions whose gradients are smaller than images: formed in the backward pass."""

import pytest
import torch
from torch import Tensor, nn

from dpoptim.gradients.layers.convolution import ConvolutionRule
from dpoptim.gradients.layers.kernels import Compiled, Formed, write
from dpoptim.gradients.per_sample.lazy import Lazy

SMALL = nn.Conv2d(3, 16, 3, padding=1)
pytestmark = pytest.mark.skipif(
    not Compiled.serves(SMALL, torch.empty(0)), reason="needs the compiled functions"
)


def images(records: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(records)
    x = torch.randn(records, 3, 12, 12, generator=generator)
    return x, torch.randn(records, 16, 12, 12, generator=generator)


def weight_of(x: Tensor, g: Tensor) -> Lazy:
    weight = ConvolutionRule().per_sample_grads(SMALL, (x, SMALL.weight), g)["weight"]
    assert isinstance(weight, Lazy)
    return weight


def test_gradients_are_those_of_the_kernels_alone() -> None:
    x, g = images(7)
    formed = weight_of(x, g)
    assert isinstance(formed.singly, Formed)
    for i in range(7):
        alone = Formed.of(Compiled(SMALL, x[i : i + 1], g[i : i + 1]), 1, SMALL.weight.numel())
        assert torch.equal(formed.materialise(slice(i, i + 1)), alone.part(slice(0, 1), 1))


def test_gradients_are_right() -> None:
    x, g = images(4)
    formed = weight_of(x, g).materialise(slice(0, 4))
    for i in range(4):
        output = torch.nn.functional.conv2d(x[i : i + 1], SMALL.weight, padding=1)
        (expected,) = torch.autograd.grad((output * g[i : i + 1]).sum(), SMALL.weight)
        torch.testing.assert_close(formed[i], expected.flatten(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_no_number(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, g = images(5)
    whole = torch.empty(5, SMALL.weight.numel())
    write(Compiled(SMALL, x, g), slice(0, 5), whole)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert torch.equal(weight_of(x, g).singly.gradients, whole)  # type: ignore[union-attr]


def test_an_image_smaller_than_its_gradient_is_kept_instead() -> None:
    x, g = torch.randn(2, 3, 2, 2), torch.randn(2, 16, 2, 2)
    assert not ConvolutionRule().forms_at_once(SMALL, (x, SMALL.weight), g)
    assert isinstance(weight_of(x, g).singly, Compiled)


def test_what_gradients_were_made_of_is_free_to_go() -> None:
    x, g = images(3)
    before = {x.untyped_storage().data_ptr(), g.untyped_storage().data_ptr()}
    formed = weight_of(x, g)
    assert isinstance(formed.singly, Formed)
    held = {formed.singly.gradients.untyped_storage().data_ptr()}
    assert not before & held
    assert formed.form == formed.singly.part  # which knows nothing else
