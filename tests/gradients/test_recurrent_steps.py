"""Compiled steps of LSTM and GRU layers: right, each record's by itself, and not needed."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.layers import recurrent, recurrent_steps
from dpoptim.gradients.layers.recurrent_steps import Run, call_in_pieces, laid_in_panels
from dpoptim.gradients.per_sample import native
from dpoptim.runtime import compiled
from support import by_engine, joint_norm

built = pytest.mark.skipif(
    native.library() is None, reason="this package was built without compiled functions"
)
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU}
RECORDS, T, D, H = 19, 5, 21, 37  # no multiples of what is computed side by side


def with_level(level: int, patch: pytest.MonkeyPatch) -> None:
    found = native.library()
    patch.setattr(native, "library", lambda: compiled.Library(found.functions, level))


def layer_of(kind: str, d: int = D, h: int = H, **how: bool) -> nn.RNNBase:
    torch.manual_seed(0)
    return KINDS[kind](d, h, batch_first=True, **how)


def hooked(layer: nn.RNNBase, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and last states of each record, (B, ...), and gradients of the inputs."""
    engine = Engine(layer, Clipping(1.0), capacity=len(x), reduction="sum")
    engine.attach()
    try:
        engine.begin_microbatch(len(x))
        return passed(layer, x)
    finally:
        engine.detach()


def passed(layer: nn.RNNBase, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    output, last = layer(x)
    states = last if isinstance(last, tuple) else (last,)
    found = torch.cat([output.flatten(1), *(s.transpose(0, 1).flatten(1) for s in states)], 1)
    slopes = torch.linspace(-1, 2, found.shape[1], dtype=x.dtype)
    (dx,) = torch.autograd.grad((found * slopes).sum(), x)
    return found.detach(), dx


@built
@settings(max_examples=40)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    records=st.integers(1, 18),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 70)),
    bias=st.booleans(),
    level=st.integers(1, 2),
)
def test_values_and_gradients_are_those_of_twice_the_precision(
    kind: str, records: int, sizes: tuple[int, int, int], bias: bool, level: int
) -> None:
    steps, d, h = sizes
    layer = layer_of(kind, d, h, bias=bias, bidirectional=True)
    x = torch.randn(records, steps, d)
    with pytest.MonkeyPatch.context() as patch:
        with_level(min(level, native.library().level), patch)
        found = hooked(layer, x)
    exact = passed(copy.deepcopy(layer).double(), x.double())
    for one, other in zip(found, exact, strict=True):
        size = other.abs().amax().clamp(min=1)
        assert ((one - other).abs() <= 1e-5 * size).all()


@built
@pytest.mark.parametrize("level", [1, 2])
def test_bent_values_err_by_a_few_units_in_the_last_place(
    level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if level > native.library().level:
        pytest.skip("this processor has no such vectors")
    with_level(level, monkeypatch)
    special = [math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-40, 0.625, 88.0, 3e38]
    x = torch.cat([torch.linspace(-110, 110, 20_011), torch.linspace(-1, 1, 20_011)])
    x = torch.cat([x, 10 ** torch.linspace(-38, 0, 501), torch.tensor(special)])
    B = len(x)
    gates, states = torch.empty(B, 1, 4), torch.zeros(B, 2, 1)
    call_in_pieces(
        "dpoptim_lstm_forward",
        Run(inputs=1, reverse=0, x_stride=1, x_step=1),
        {"weights": laid_in_panels(torch.tensor([[1.0, 0.0]] * 4)), "bias": None},
        {"x": x.view(B, 1, 1), "gates": gates, "outputs": states.clone(), "cells": states},
    )
    sigmoid, tanh = gates[:, 0, 0], gates[:, 0, 2]
    for found, exact in ((sigmoid, x.double().sigmoid()), (tanh, x.double().tanh())):
        assert torch.equal(found.isnan(), x.isnan())
        known = ~x.isnan()
        # far below, a sigmoid ends at that of -86
        away = (found.double() - exact).abs() - 6e-38
        assert (away <= 4 * 2.0**-23 * exact.abs())[known].all()


@built
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_record_has_the_same_bits_anywhere(
    kind: str, reverse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, beside others that are no numbers, in any layout, and by narrower vectors."""
    layer = layer_of(kind, bidirectional=reverse)
    x = torch.randn(RECORDS, T, D)
    alone = [hooked(layer, x[i : i + 1]) for i in range(RECORDS)]
    x[3], x[17] = math.nan, math.inf
    outlandish = torch.randn(T, D + 2, RECORDS)
    outlandish[:, 1:-1] = x.permute(1, 2, 0)
    found = [hooked(layer, x), hooked(layer, outlandish[:, 1:-1].permute(2, 0, 1))]
    with_level(1, monkeypatch)
    found.append(hooked(layer, x))
    for outputs, dx in found:
        for i in set(range(RECORDS)) - {3, 17}:
            assert torch.equal(outputs[i], alone[i][0][0])
            assert torch.equal(dx[i], alone[i][1][0])
        assert outputs[3].isnan().all()


class Classifier(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = KINDS[kind](D, H, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * H, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, 2])


def sums(kind: str, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    model = Classifier(kind)
    target = torch.linspace(-1, 1, RECORDS)[: len(x)]
    return by_engine(model, x, target, Clipping(0.3), capacity=RECORDS, reduction="sum")


@built
@pytest.mark.parametrize("kind", KINDS)
def test_steps_have_the_same_bits_with_any_number_of_threads(kind: str) -> None:
    """And so have sums, as far as MKL's products over records have: not on all processors."""
    torch.manual_seed(0)
    x, before = torch.randn(RECORDS, T, D), torch.get_num_threads()
    steps, found = [], []
    try:
        for threads in (1, 2, 4, 7):
            torch.set_num_threads(threads)
            steps.append(hooked(layer_of(kind, bidirectional=True), x))
            found.append(sums(kind, x))
    finally:
        torch.set_num_threads(before)
    for outputs, dx in steps[1:]:
        assert torch.equal(outputs, steps[0][0])
        assert torch.equal(dx, steps[0][1])
    whole = joint_norm(found[0])
    assert whole > 0.1
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    for other in found[2:]:
        apart = joint_norm([a - b for a, b in zip(found[0], other, strict=True)])
        assert apart <= 1e-6 * whole


@built
@pytest.mark.parametrize("kind", KINDS)
def test_without_the_library_sums_are_the_same_but_for_rounding(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x = torch.randn(RECORDS, T, D)
    by_library = sums(kind, x)
    monkeypatch.setattr(native, "library", lambda: None)
    by_torch = sums(kind, x)
    apart = joint_norm([a - b for a, b in zip(by_library, by_torch, strict=True)])
    assert 0 < apart <= 1e-5 * joint_norm(by_library)  # other last bits: it was another way


@pytest.mark.parametrize("library", ["with", "without"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_record_moves_the_sum_by_no_more_than_the_clip_norm(
    kind: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is no number, which adds nothing."""
    if library == "without":
        monkeypatch.setattr(native, "library", lambda: None)
    torch.manual_seed(0)
    x = torch.randn(RECORDS, T, D)
    for scale in (1.0, 1e4, math.nan):
        x[-1] *= scale
        moved = [a - b for a, b in zip(sums(kind, x), sums(kind, x[:-1]), strict=True)]
        if math.isnan(scale):
            assert joint_norm(moved) <= 1e-6
        else:
            assert 0.29 <= joint_norm(moved) <= 0.3 * (1 + 1e-6)


@built
def test_what_they_serve_is_told_by_kinds_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(2, 3, 4)
    assert recurrent_steps.serves(x, None)
    assert not recurrent_steps.serves(x, x.double())
    assert not recurrent_steps.serves(x.to("meta"))
    monkeypatch.setattr(native, "library", lambda: None)
    assert not recurrent_steps.serves(x)


@built
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_steps_are_those_that_run(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    honest = recurrent_steps.call_in_pieces
    monkeypatch.setattr(
        recurrent_steps,
        "call_in_pieces",
        lambda name, *rest: [asked.append(name), honest(name, *rest)],
    )
    hooked(layer_of(kind), torch.randn(2, T, D))
    assert asked == [f"dpoptim_{kind}_forward", f"dpoptim_{kind}_backward"]
    assert recurrent.serves is recurrent_steps.serves
