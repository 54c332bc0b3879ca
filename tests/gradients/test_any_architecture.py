"""Random small architectures: the engine's sum is that of micro-batches of one, or the model is
refused by name.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.errors import PrivacyError
from dpoptim.gradients.oracle import clipped_sums, engine_sums, gradients_alone
from support import joint_norm, record_loss

ODD = 7  # records, unlike any other axis
T, D = 4, 6  # every block maps (B, T, D) to (B, T, D)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Scaled(nn.Module):
    """A parameter of its own around other layers, used in one of many ways."""

    USES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
        lambda x, p: x * p,
        lambda x, p: x + p[None, None],
        lambda x, p: torch.where(x > 0, x, p * x),
        lambda x, p: torch.cat([p.expand(len(x), 1, -1), x[:, 1:]], 1),
        lambda x, p: F.layer_norm(x, (D,), p),
        lambda x, p: x * p.softmax(0).mean(),
        lambda x, p: x + torch.einsum("btd,d->bt", x, p)[..., None],
        lambda x, p: x * p[: x.shape[0]].mean(),  # reads how many records there are
        lambda x, p: x - (x * p).mean(0),  # mixes records
        lambda x, p: (x.transpose(0, 1) * p).transpose(0, 1),  # another axis first
        lambda x, p: x.flatten(0, 1).mul(p).view_as(x),  # records folded into positions
    )

    def __init__(self, inner: nn.Module, use: int) -> None:
        super().__init__()
        self.inner, self.use, self.p = inner, use, nn.Parameter(torch.rand(D) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.USES[self.use](self.inner(x), self.p)


class Borrowed(nn.Module):
    """Applies another module's weight functionally, then the module."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(F.linear(x, self.layer.weight)))


class Over(nn.Module):
    """A layer that wants channels second, or a recurrent or attention layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.layer, nn.MultiheadAttention):
            return self.layer(x, x, x, need_weights=False)[0]
        if isinstance(self.layer, nn.RNNBase):
            return self.layer(x)[0]
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(D, D),
    "linear without bias": lambda: nn.Linear(D, D, bias=False),
    "layer norm": lambda: nn.LayerNorm(D),
    "rms norm": lambda: nn.RMSNorm(D),
    "two axes norm": lambda: nn.LayerNorm((T, D)),
    "activation": lambda: nn.GELU(),
    "prelu": lambda: nn.PReLU(),
    "convolution": lambda: Over(nn.Conv1d(D, D, 3, padding=1, groups=2)),
    "transposed convolution": lambda: Over(nn.ConvTranspose1d(D, D, 3, padding=1)),
    "group norm": lambda: Over(nn.GroupNorm(2, D)),
    "instance norm": lambda: Over(nn.InstanceNorm1d(D, affine=True)),
    "batch norm": lambda: Over(nn.BatchNorm1d(D)),
    "attention": lambda: Over(nn.MultiheadAttention(D, 2, batch_first=True)),
    "lstm": lambda: Over(nn.LSTM(D, D // 2, batch_first=True, bidirectional=True)),
    "gru time first": lambda: Over(nn.GRU(D, D)),
    "encoder": lambda: nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(D, D)),
    "borrowed": lambda: Borrowed(nn.Linear(D, D)),
}


@st.composite
def blocks(draw: st.DrawFn, depth: int = 3, shared: list[nn.Module] | None = None) -> nn.Module:
    """A nest of layers, some of which stand in several places."""
    shared = [] if shared is None else shared
    kinds = ["layer", "layer", "shared"] + (["sequence", "residual", "scaled"] * 2 if depth else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "shared" and shared:
        return draw(st.sampled_from(shared))
    if kind in ("layer", "shared"):
        module = LAYERS[draw(st.sampled_from(sorted(LAYERS)))]()
    elif kind == "sequence":
        module = nn.Sequential(
            *(draw(blocks(depth - 1, shared)) for _ in range(draw(st.integers(1, 3))))
        )
    elif kind == "residual":
        module = Residual(draw(blocks(depth - 1, shared)))
    else:
        module = Scaled(draw(blocks(depth - 1, shared)), draw(st.integers(0, len(Scaled.USES) - 1)))
    shared.append(module)
    return module


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    torch.manual_seed(draw(st.integers(0, 1000)))
    model = nn.Sequential(draw(blocks()), nn.Linear(D, 2))
    for p in model.parameters():
        if draw(st.integers(0, 5)) == 0:
            p.requires_grad_(False)
    return model.to(draw(st.sampled_from([torch.float32, torch.float64]))).train(
        draw(st.booleans())
    )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return record_loss(model(batch[0]), batch[1]).mean()


def truth(model: nn.Module, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    return gradients_alone(
        model, loss, [(batch[0][i : i + 1], batch[1][i : i + 1]) for i in range(len(batch[0]))]
    )


def mixes_records(model: nn.Module, x: Tensor) -> bool:
    """Whether the model's outputs in a batch differ from those of records alone: no engine can
    mend that.
    """
    with torch.no_grad():
        together, alone = model(x), torch.cat([model(row[None]) for row in x])
    return together.shape != alone.shape or not torch.allclose(
        together, alone, rtol=1e-3, atol=1e-4
    )


def refused(model: nn.Module, batch: tuple[Tensor, Tensor], clipping: Clipping) -> str:
    """The message by which a model is refused; empty if it is not."""
    try:
        engine_sums(model, loss, batch, len(batch[0]), clipping, "mean")
    except PrivacyError as error:
        return str(error)
    return ""


@settings(max_examples=40)
# Not T: which axis is the batch's where both are as long, `attach` shows the engine beforehand
# (tests/catalogue has as many records as each axis).
@given(models(), st.sampled_from([1, 3, T + 1, D]), st.sampled_from(["flat", "automatic"]))
def test_equal_or_refused_by_name(model: nn.Module, rows: int, style: str) -> None:
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        return
    dtype = trainable[0].dtype
    clipping = Clipping(0.5, style)
    # As the probe does: first with as many records as no other axis has, so that no other axis can
    # pass for the batch.
    for count in (ODD, rows):
        batch = torch.randn(count, T, D, dtype=dtype), torch.randn(count, dtype=dtype)
        message = refused(model, batch, clipping)
        if message:
            event("refused: " + message[:60])
            assert "Fix: " in message
            assert all("forward" not in vars(m) for m in model.modules())
            assert all(p.grad is None for p in model.parameters())
            return
        if mixes_records(model, batch[0]):
            event("records mixed by the model")
            return
        sums = engine_sums(model, loss, batch, count, clipping, "mean")
        expected = clipped_sums(truth(model, batch), clipping, count)
        error = joint_norm([a - b for a, b in zip(sums, expected, strict=True)])
        # Behind normalisations that undo a scale, true gradients are zero and float32 ones 1e-5:
        # hence the floor.
        tolerance, floor = (1e-3, 0.02) if dtype == torch.float32 else (1e-6, 1e-3)
        assert error <= tolerance * max(joint_norm(expected), floor * count)
    event("equal")
