"""Under torch.autocast the recorder hold what was saved in the narrow dtype, and widen it before
they measure.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.errors import PrivacyError
from dpoptim.gradients.engine import Engine
from dpoptim.training.trials.memory import LiveTensors
from support import CASES, Case, joint_norm, record_loss

ROWS = 8
SUPPORTED = [
    case
    for case in CASES
    if case.name in ("linear-2d", "linear-3d", "linear-no-bias", "linear-gram")
]
NARROW = [torch.bfloat16, torch.float16]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.Flatten(2),
        nn.Linear(9, 16),
        nn.LayerNorm(16),
        nn.RMSNorm(16),
        nn.Flatten(),
        nn.Linear(128, 5),
    )


class Language(nn.Module):
    """Embeddings, attention, a bare position parameter and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(13, 8)
        self.position = nn.Parameter(torch.randn(1, 6, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 13)

    def forward(self, x: Tensor) -> Tensor:
        h = self.token(x) + self.position
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.head(h)


class Recurrent(nn.Module):
    """A recurrent layer between layers that run in the narrow dtype."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inputs = nn.Linear(5, 4)
        self.layer = kind(4, 3, num_layers=2, bidirectional=True, batch_first=True)  # type: ignore[call-arg]
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.layer(self.inputs(x))
        return self.head(output)


class Scaled(nn.Module):
    """No rule of its own: two inputs, one of them integers, and a matrix that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight + shift[:, None]) @ self.weight.T


class WithoutRules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.scaled, self.slope, self.head = (
            nn.Linear(5, 4),
            Scaled(),
            nn.PReLU(4),
            nn.Linear(4, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        shift = torch.ones(len(x), dtype=torch.long, device=x.device)
        return self.head(self.slope(self.scaled(self.inputs(x), shift)))


MODELS = [
    *SUPPORTED,
    Case("network", network, (3, 8, 8)),
    Case("language", Language, (6,), integers=13),
    *(Case(kind.__name__, partial(Recurrent, kind), (6, 5)) for kind in (nn.LSTM, nn.GRU, nn.RNN)),
    Case("without rules", WithoutRules, (5,)),
]


def sums(
    model: nn.Module,
    x: Tensor,
    target: Tensor,
    clipping: Clipping,
    dtype: torch.dtype,
    *,
    inside: bool,
) -> list[Tensor]:
    engine = Engine(model, clipping, capacity=64, reduction="sum")
    engine.attach()
    try:
        engine.begin_microbatch(len(x))
        with torch.autocast("cpu", dtype=dtype):
            output = model(x)
            loss = record_loss(output.float(), target).sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [s.clone() for s in engine.split(engine.take())]
    finally:
        engine.detach()


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # torch's own, of RMSNorm under autocast
@pytest.mark.parametrize("inside", [False, True], ids=["backward-outside", "backward-inside"])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_without_clipping_it_is_autograd_s_gradient(
    case: Case, dtype: torch.dtype, inside: bool
) -> None:
    torch.manual_seed(0)
    model = case.build()
    x, target = case.inputs(ROWS, torch.float32)
    ours = sums(model, x, target, Clipping(float("inf")), dtype, inside=inside)
    with torch.autocast("cpu", dtype=dtype):
        loss = record_loss(model(x).float(), target).sum()
    truth = torch.autograd.grad(loss, list(model.parameters()))
    exact = torch.autograd.grad(record_loss(model(x), target).sum(), list(model.parameters()))
    # As near to the float32 gradient as autograd's own autocast is, up to the luck of rounding.
    theirs = joint_norm([a - b for a, b in zip(truth, exact, strict=True)])
    mine = joint_norm([a - b for a, b in zip(ours, exact, strict=True)])
    assert 0 < mine <= 1.5 * theirs + 1e-3 * joint_norm(list(exact))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
@pytest.mark.thinned(2)
def test_each_record_and_each_neighbour_stay_within_the_bound(
    case: Case, dtype: torch.dtype
) -> None:
    clipping = Clipping(0.05)
    for seed in range(2):
        torch.manual_seed(seed)
        model = case.build()
        x, target = case.inputs(ROWS, torch.float32)
        target[1], target[2] = 1e30, float("nan")
        whole = sums(model, x, target, clipping, dtype, inside=False)
        for i in range(ROWS):
            keep = [j for j in range(ROWS) if j != i]
            alone = sums(model, x[i : i + 1], target[i : i + 1], clipping, dtype, inside=False)
            assert joint_norm(alone) <= clipping.norm
            rest = sums(model, x[keep], target[keep], clipping, dtype, inside=False)
            assert joint_norm([a - b for a, b in zip(whole, rest, strict=True)]) <= clipping.norm


def test_the_books_hold_the_narrow_dtype() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    engine = Engine(model, Clipping(1.0), capacity=ROWS, reduction="sum")
    engine.attach()
    held = []

    def note(saved: Tensor) -> Tensor:
        held.append(saved.dtype)
        return saved

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved)
    with hooks, torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(ROWS, 5))
    engine.detach()
    assert held.count(torch.bfloat16) == 2  # both inputs; the weights are saved as they are


class Chain(nn.Module):
    """Large inputs, small layers: what is kept of a batch takes nearly all the memory."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        make = {"linear": lambda: nn.Linear(16, 16), "convolution": lambda: nn.Conv1d(16, 16, 1)}[
            kind
        ]
        self.layers = nn.Sequential(*(make() for _ in range(10)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize(("kind", "shape"), [("linear", (128, 16)), ("convolution", (16, 128))])
def test_books_stay_narrow_until_they_are_read(kind: str, shape: tuple[int, ...]) -> None:
    """They hold both sides of each product to the end of a pass, up to twice what autograd does;
    widened at once, 4.3.
    """
    torch.manual_seed(0)
    x = torch.randn(32, *shape)
    peaks = []
    for private in (False, True):
        model = Chain(kind)
        engine = Engine(model, Clipping(1.0), capacity=32, reduction="sum", positions={})
        if private:
            engine.attach()
            engine.begin_microbatch(32)
        with LiveTensors() as live:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x).float().square().sum()
            loss.backward()
        peaks.append(live.peak)
        if private:
            engine.detach()
    assert peaks[1] <= 2 * peaks[0]


@pytest.mark.parametrize("case", MODELS[-4:], ids=lambda case: case.name)
def test_what_runs_in_float32_still_refuses_a_mean(case: Case) -> None:
    model = case.build()
    part = getattr(model, "layer", None) or model.scaled
    engine = Engine(part, Clipping(1.0), capacity=ROWS, reduction="mean")
    engine.attach()
    x = torch.randn(ROWS, 6, 4) if isinstance(part, nn.RNNBase) else torch.randn(ROWS, 4)
    inputs = (x,) if isinstance(part, nn.RNNBase) else (x, torch.ones(ROWS).long())
    engine.begin_microbatch(ROWS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = part(*inputs)
    losses = (output[0] if isinstance(part, nn.RNNBase) else output).float().flatten(1).sum(1)
    with pytest.raises(PrivacyError, match=r"with a loss that is a mean"):
        losses.mean().backward(retain_graph=True)
    engine.backward(losses)  # one loss for each record has no such factor
    engine.detach()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_frozen_head_under_autocast_needs_a_sum(reduction: Any) -> None:
    """It rounds the gradients on their way to the recorder, under a mean together with the mean's
    factor: 1.97 C.
    """
    torch.manual_seed(0)
    rows, target = 1901, torch.zeros(1901, dtype=torch.long)
    body, head = nn.Linear(4, 4), nn.Linear(4, 3).requires_grad_(False)
    model = nn.Sequential(body, head)
    x = torch.ones(rows, 4) + 1e-3 * torch.randn(rows, 4)

    def total(n: int, norm: float) -> list[Tensor]:
        engine = Engine(model, Clipping(norm), capacity=2048, reduction=reduction)
        engine.attach()
        try:
            engine.begin_microbatch(n)
            h = body(x[:n])
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = head(h)
            nn.functional.cross_entropy(output.float(), target[:n], reduction=reduction).backward()
            return [s.clone() for s in engine.split(engine.take())]
        finally:
            engine.detach()
            assert not head._forward_pre_hooks

    if reduction == "mean":
        with pytest.raises(
            PrivacyError,
            match=r"layer '1' ran in bfloat16 or float16 with a "
            r"loss that is a mean",
        ):
            total(rows, 1.0)
        return
    norm = 1.02 * joint_norm(total(1, 1e6))
    assert (
        joint_norm([a - b for a, b in zip(total(rows, norm), total(rows - 1, norm), strict=True)])
        <= norm
    )


def test_float64_layers_are_left_alone() -> None:
    """As autocast leaves them."""
    torch.manual_seed(0)
    model, x, target = (
        nn.Linear(5, 4).double(),
        torch.randn(ROWS, 5).double(),
        torch.randn(ROWS).double(),
    )
    ours = sums(model, x, target, Clipping(float("inf")), torch.bfloat16, inside=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(x)
    assert output.dtype == torch.float64
    truth = torch.autograd.grad(record_loss(output.float(), target).sum(), list(model.parameters()))
    assert joint_norm([a - b for a, b in zip(ours, truth, strict=True)]) < 1e-6 * joint_norm(
        list(truth)
    )
