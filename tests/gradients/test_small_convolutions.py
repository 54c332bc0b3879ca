"""Convolutions in cache: right, of one order, and not needed."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.gradients.layers import image_places, small_convolutions
from dpoptim.gradients.layers.convolution import ConvolutionRule
from dpoptim.gradients.per_sample import native
from dpoptim.runtime import compiled
from support import by_engine, joint_norm

built = pytest.mark.skipif(
    native.library() is None, reason="this package was built without compiled functions"
)
CLASSES = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
U = 2.0**-24


@st.composite
def layers(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    """A strided convolution, and the size of its images."""
    axes = draw(st.integers(1, 3))
    of_axes = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(axes))  # noqa: E731
    kernel, dilation, padding = of_axes(1, 5), of_axes(1, 3), of_axes(0, 4)
    stride = (draw(st.integers(2, 4)), *of_axes(1, 3)[1:])
    least = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    size = tuple(
        max(1, low - 2 * side) + more
        for low, side, more in zip(least, padding, of_axes(0, 6), strict=True)
    )
    channels, outputs = draw(st.sampled_from([8, 11, 16, 25])), draw(st.integers(8, 40))
    bias = draw(st.booleans())
    module = CLASSES[axes](channels, outputs, kernel, stride, padding, dilation, bias=bias)
    return module, size


@pytest.fixture(autouse=True, scope="module")
def everything_served() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_places, "LEAST_FILLED", 0)
        yield


def both(module: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and gradients of inputs, by compiled functions."""
    output = small_convolutions.output(module, x)
    handed_back = small_convolutions.input_gradient(module, x, module.weight, g)
    assert output is not None
    assert handed_back is not None
    return output, handed_back


@built
@settings(max_examples=60)
@given(layer_and_size=layers(), seed=st.integers(0, 99))
def test_both_err_by_less_than_one_chain_of_additions_can(
    layer_and_size: tuple[nn.Module, tuple[int, ...]], seed: int
) -> None:
    """In any geometry: gamma_n of the sum of absolute values of the terms (Higham 2002, 3.1)."""
    layer, size = layer_and_size
    torch.manual_seed(seed)
    x = torch.randn(2, layer.in_channels, *size)
    g = torch.randn_like(layer(x)).detach()
    found = both(layer, x, g)
    exact, terms = [], []
    for of, into in ((lambda t: t, exact), (torch.abs, terms)):
        parameters = {k: of(p.detach().double()) for k, p in layer.named_parameters()}
        inputs = of(x.double()).requires_grad_()
        output = torch.func.functional_call(layer, parameters, inputs)
        (handed_back,) = torch.autograd.grad(output, inputs, of(g.double()))
        into += [output.detach(), handed_back]
    kernel = math.prod(layer.kernel_size)
    for one, truth, bound, channels in zip(
        found, exact, terms, (layer.in_channels, layer.out_channels), strict=True
    ):
        steps = channels * kernel + 1
        assert one.shape == truth.shape
        assert ((one - truth).abs() <= steps * U / (1 - steps * U) * bound).all()


@built
@settings(max_examples=30)
@given(layer_and_size=layers(), seed=st.integers(0, 99))
def test_a_record_has_the_same_bits_in_any_place(
    layer_and_size: tuple[nn.Module, tuple[int, ...]], seed: int
) -> None:
    """Alone or in a batch, in any layout, on any number of threads, and by narrower vectors."""
    layer, size = layer_and_size
    torch.manual_seed(seed)
    x = torch.randn(1, layer.in_channels, *size)
    g = torch.randn_like(layer(x)).detach()
    alone = both(layer, x, g)
    many_x, many_g = torch.randn(5, *x.shape[1:]), torch.randn(5, *g.shape[1:])
    many_x[3], many_g[3] = x[0], g[0]
    many_x[4], many_g[2] = math.nan, math.inf
    apart = [t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (many_x, many_g)]
    with pytest.MonkeyPatch.context() as patch:
        for threads in (1, 2, 3):
            patch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            patch.setattr("dpoptim.runtime.compiled_work.WORTH_A_THREAD", 1)
            for given in ((many_x, many_g), apart):
                for one, other in zip(both(layer, *given), alone, strict=True):
                    assert torch.equal(one[3], other[0])
        functions = native.library().functions
        patch.setattr(native, "library", lambda: compiled.Library(functions, 1))
        for one, other in zip(both(layer, x, g), alone, strict=True):
            assert torch.equal(one, other)


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 16, 5, 2, 2), nn.GroupNorm(4, 16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, (2, 1), 1), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)),
        )
        self(torch.zeros(1, 1, 12, 11))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def sums(records: int = 9) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = Strided(), torch.randn(records, 1, 12, 11)
    return by_engine(
        model, x, torch.randn(records), Clipping(0.3), capacity=records, reduction="sum"
    )


@built
def test_sums_are_the_same_but_for_rounding_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    in_cache = sums()
    monkeypatch.setattr(small_convolutions, "usual", lambda module, x: False)
    by_torch = sums()
    apart = joint_norm([a - b for a, b in zip(in_cache, by_torch, strict=True)])
    assert 0 < apart <= 1e-5 * joint_norm(in_cache)  # other last bits: it was another way
    monkeypatch.setattr(native, "library", lambda: None)
    apart = joint_norm([a - b for a, b in zip(sums(), by_torch, strict=True)])
    assert apart <= 1e-5 * joint_norm(in_cache)


@built
def test_what_they_serve_is_told_by_public_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_places, "LEAST_FILLED", 1 / 2)
    served = lambda module, x: small_convolutions.output(module, x) is not None  # noqa: E731
    x = torch.randn(2, 4, 9, 9)
    assert served(nn.Conv2d(4, 8, 3, stride=2), x)
    assert not served(nn.Conv2d(4, 8, 3), x)  # oneDNN is as fast
    assert not served(nn.Conv2d(4, 7, 3, stride=2), x)  # most of a vector for nothing
    assert not served(nn.Conv2d(4, 8, 3, stride=2, groups=2), x)
    assert not served(nn.Conv2d(4, 8, 3, stride=2).double(), x.double())
    assert not served(nn.Conv2d(4, 8, 3, stride=2), x[:0])
    assert not served(nn.Conv2d(4, 8, 3, stride=2), torch.randn(1, 4, 300, 300))  # not in cache
    monkeypatch.setattr(native, "library", lambda: None)
    assert not served(nn.Conv2d(4, 8, 3, stride=2), x)


@pytest.mark.parametrize("shape", [(2, 3, 9, 9), (2, 4, 2, 9)], ids=["channels", "too small"])
def test_inputs_that_do_not_fit_are_refused_as_by_torch(shape: tuple[int, ...]) -> None:
    layer, x = nn.Conv2d(4, 8, 3, stride=2), torch.randn(shape)
    with pytest.raises(RuntimeError) as refused:
        layer(x)
    with pytest.raises(RuntimeError) as by_rule:
        ConvolutionRule().forward(layer, x)
    assert str(by_rule.value) == str(refused.value)
