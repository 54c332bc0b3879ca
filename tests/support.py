"""What several tests need: the vmap(grad) oracle and small models of every supported layer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.gradients.arithmetic import multiplication, row_products
from dpoptim.gradients.arithmetic.onednn import keeps_rows_apart
from dpoptim.gradients.arithmetic.precision import computed_in
from dpoptim.gradients.arithmetic.products import margin
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.layers import kernels
from dpoptim.gradients.oracle import clipped_sums, engine_sums, gradients_alone
from dpoptim.gradients.per_sample import native


def pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of options, one of each axis, such that any two options of two axes meet in some row.

    What goes wrong by two options together shows as in the whole product of the axes, in far fewer
    rows. Greedy, hence always the same.
    """
    sizes = [range(len(axis)) for axis in axes]
    left = {
        (i, a, j, b)
        for i, j in combinations(range(len(axes)), 2)
        for a, b in product(sizes[i], sizes[j])
    }

    def met(row: dict[int, int]) -> set[tuple[int, int, int, int]]:
        return {(i, row[i], j, row[j]) for i, j in combinations(sorted(row), 2)} & left

    rows = []
    while left:
        i, a, j, b = min(left)
        row = {i: a, j: b}
        for k in set(range(len(axes))) - {i, j}:
            row = max(({**row, k: c} for c in sizes[k]), key=lambda each: len(met(each)))
        left -= met(row)
        rows.append(tuple(axis[row[k]] for k, axis in enumerate(axes)))
    return rows


def record_loss(output: Tensor, target: Tensor) -> Tensor:
    """One smooth number per record from outputs of any shape: (B, ...) -> (B,)."""
    flat = output.flatten(1)
    weights = torch.linspace(-1, 2, flat.shape[1], dtype=flat.dtype, device=flat.device)
    return (flat * weights).sum(1).tanh() * 3 + 0.1 * (flat - target[:, None]).square().mean(1)


def reduced(losses: Tensor, reduction: str) -> Tensor:
    return losses.mean() if reduction == "mean" else losses.sum()


def vmap_gradients(model: nn.Module, x: Tensor, target: Tensor) -> list[Tensor]:
    """Per-record gradients of the whole model by torch.func: one tensor a trainable parameter, (B,
    *shape).
    """
    trainable = {k: p.detach() for k, p in model.named_parameters() if p.requires_grad}

    def loss(parameters: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
        output = torch.func.functional_call(model, parameters, (x[None],))
        return record_loss(output, target[None])[0]

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(trainable, x, target)
    return [gradients[k] for k in trainable]


def clipped(
    gradients: list[Tensor], clipping: Clipping, capacity: int, reduction: str = "mean"
) -> list[Tensor]:
    squared = sum(g.double().reshape(len(g), -1).square().sum(1) for g in gradients)
    dtype = min((computed_in(g.dtype) for g in gradients), key=lambda d: d.itemsize)
    factors = clipping.factors(squared, margin(dtype, capacity, common_factor=reduction == "mean"))
    finite = factors > 0
    return [torch.einsum("i,i...->...", factors[finite], g[finite].double()) for g in gradients]


def by_engine(
    model: nn.Module,
    x: Tensor,
    target: Tensor,
    clipping: Clipping,
    *,
    capacity: int,
    reduction: str = "mean",
    microbatches: int = 1,
    positions: Mapping[str, int] | None = None,
) -> list[Tensor]:
    """The engine's sums, the batch delivered in ``microbatches``."""
    engine = Engine(model, clipping, capacity=capacity, reduction=reduction, positions=positions)
    engine.attach()
    try:
        for part_x, part_t in zip(x.chunk(microbatches), target.chunk(microbatches), strict=True):
            engine.begin_microbatch(len(part_x))
            reduced(record_loss(model(part_x), part_t), reduction).backward()
        assert all(p.grad is None for p in model.parameters())
        return engine.split(engine.take())
    finally:
        engine.detach()


def joint_norm(tensors: list[Tensor]) -> float:
    return float(torch.stack([t.double().norm() for t in tensors]).norm())


def loss_of_outputs(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return record_loss(model(*batch[:-1]), batch[-1]).mean()


def mismatch(
    model: nn.Module, batch: tuple[Tensor, ...], isolation: Isolation | None = None
) -> float:
    """The engine's clipped sum of a batch (inputs, then targets) against its records alone."""
    rows = len(batch[0])
    truth = gradients_alone(
        model, loss_of_outputs, [tuple(t[i : i + 1] for t in batch) for i in range(rows)]
    )
    norms = torch.stack([g.reshape(rows, -1).square().sum(1) for g in truth]).sum(0).sqrt()
    clipping = Clipping(float(norms.median()))
    expected = clipped_sums(truth, clipping, rows)
    sums = engine_sums(model, loss_of_outputs, batch, rows, clipping, "mean", isolation)
    return joint_norm([a - b for a, b in zip(sums, expected, strict=True)]) / joint_norm(expected)


@dataclass(frozen=True)
class Case:
    """A small model and what it eats."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    integers: int = 0  # vocabulary of integer inputs; 0: floats

    def __str__(self) -> str:
        return self.name

    def inputs(self, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        target = torch.randn(rows, dtype=dtype)
        if self.integers:
            return torch.randint(0, self.integers, (rows, *self.shape)), target
        return torch.randn(rows, *self.shape, dtype=dtype), target


class Twice(nn.Module):
    """A layer used twice in one pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Positions(nn.Module):
    """Token plus position embeddings, positions of shape (1, T) shared by all records."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(11, 6), nn.Embedding(9, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(
            self.token(x) + self.position(torch.arange(x.shape[1], device=x.device)[None])
        )


class TiedHead(nn.Module):
    """Embedding and output layer share one table."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.token(x))))


class OwnParameter(nn.Module):
    """A bare parameter, hence the fallback for the whole module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(5) + 0.5)
        self.inner = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.sin(x * self.scale))


class ScaleLayer(nn.Module):
    """The smallest module without a rule."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def image_model(layer: nn.Module, channels: int, *, one_axis: bool = False) -> nn.Module:
    head = nn.Conv1d(channels, 2, 1) if one_axis else nn.Conv2d(channels, 2, 1)
    return nn.Sequential(layer, nn.Tanh(), head)


def volume_model(layer: nn.Module, channels: int) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), nn.Conv3d(channels, 2, 1))


class Product(nn.Module):
    """A layer with two inputs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, torch.sin(x))


def sequential(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


EVERY_LIBRARY = ("MKL", "oneDNN", "compiled", "rows")  # of products; see `using`


def missing(library: str) -> str:
    """Why products by a library cannot be tried here; "" where they can."""
    if library == "oneDNN" and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this PyTorch has no products by oneDNN"
    if library == "oneDNN" and not keeps_rows_apart():
        return "this PyTorch's oneDNN rounds a row by its company, so multiplies nothing"
    if library == "compiled" and native.library() is None:
        return "this package was built without compiled functions"
    if library == "rows" and not row_products.serve():
        return "no compiled products of rows for this processor"
    return ""


@contextmanager
def using(library: str) -> Iterator[None]:
    """All float32 products by "MKL", or all by "oneDNN", whatever the processor and the sizes; or
    "compiled": those of convolutions by the compiled functions, others by MKL; or "rows": as
    "oneDNN", but those of rows with a matrix by the compiled functions.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "LEAST_FILLED", 0)
        if library not in ("compiled", "rows"):
            patch.setattr(native, "library", lambda: None)
        by_onednn = library in ("oneDNN", "rows")
        patch.setattr(multiplication, "onednn_is_faster", lambda: by_onednn)
        patch.setattr(multiplication, "compiles_thin_rows", lambda: False)
        patch.setattr(multiplication, "whole_vectors", lambda: True)
        patch.setattr(multiplication, "compiles_rows", lambda: library == "rows")
        patch.setattr(multiplication, "LEAST_ENTRIES", 0)
        yield


LIBRARIES = tuple(library for library in EVERY_LIBRARY if not missing(library))

CASES = [
    Case("linear-2d", lambda: sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)), (7,)),
    Case("linear-3d", lambda: sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)), (4, 7)),
    Case("linear-4d", lambda: sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)), (2, 3, 7)),
    Case(
        "linear-gram", lambda: sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20)), (3, 40)
    ),
    Case(
        "linear-no-bias",
        lambda: sequential(nn.Linear(7, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)),
        (7,),
    ),
    Case("conv1d", lambda: image_model(nn.Conv1d(3, 4, 3, padding=1), 4, one_axis=True), (3, 9)),
    Case(
        "conv1d-options",
        lambda: image_model(nn.Conv1d(4, 6, 3, 2, 2, 2, groups=2), 6, one_axis=True),
        (4, 11),
    ),
    Case("conv2d", lambda: image_model(nn.Conv2d(3, 4, 3, padding=1), 4), (3, 6, 7)),
    Case(
        "conv2d-options",
        lambda: image_model(nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 2), (1, 2), groups=2), 6),
        (4, 8, 9),
    ),
    Case(
        "conv2d-depthwise",
        lambda: image_model(nn.Conv2d(4, 8, 3, groups=4, bias=False), 8),
        (4, 6, 6),
    ),
    Case("conv2d-same", lambda: image_model(nn.Conv2d(3, 4, (4, 3), padding="same"), 4), (3, 6, 7)),
    Case(
        "conv2d-reflect",
        lambda: image_model(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), 4),
        (3, 6, 7),
    ),
    Case(
        "conv2d-circular",
        lambda: image_model(nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode="circular"), 4),
        (3, 6, 7),
    ),
    Case("conv2d-wide", lambda: image_model(nn.Conv2d(20, 24, 3), 24), (20, 4, 4)),
    Case("conv3d", lambda: volume_model(nn.Conv3d(2, 4, 3, padding=1), 4), (2, 4, 5, 3)),
    Case(
        "conv3d-options",
        lambda: volume_model(
            nn.Conv3d(4, 6, (3, 2, 1), (2, 1, 3), (1, 2, 0), (1, 2, 1), groups=2), 6
        ),
        (4, 5, 6, 7),
    ),
    Case(
        "conv3d-same",
        lambda: volume_model(nn.Conv3d(2, 4, (2, 3, 3), padding="same"), 4),
        (2, 4, 5, 3),
    ),
    Case(
        "conv3d-replicate",
        lambda: volume_model(
            nn.Conv3d(2, 4, 3, padding=(1, 2, 1), padding_mode="replicate", bias=False), 4
        ),
        (2, 4, 5, 3),
    ),
    Case(
        "conv3d-circular",
        lambda: volume_model(nn.Conv3d(2, 4, 3, padding=1, padding_mode="circular"), 4),
        (2, 4, 5, 3),
    ),
    Case(
        "instance-norm-1d",
        lambda: sequential(nn.Conv1d(3, 6, 2), nn.InstanceNorm1d(6, affine=True), nn.Tanh()),
        (3, 7),
    ),
    Case(
        "instance-norm-2d",
        lambda: sequential(nn.Conv2d(3, 6, 2), nn.InstanceNorm2d(6, affine=True)),
        (3, 6, 7),
    ),
    Case(
        "instance-norm-3d",
        lambda: sequential(nn.Conv3d(3, 6, 2), nn.InstanceNorm3d(6, affine=True)),
        (3, 4, 3, 5),
    ),
    Case(
        "fallback-transposed-1d",
        lambda: sequential(nn.ConvTranspose1d(3, 4, 3, 2), nn.Tanh(), nn.Conv1d(4, 2, 1)),
        (3, 5),
    ),
    Case(
        "fallback-transposed-3d",
        lambda: sequential(nn.ConvTranspose3d(3, 4, 2, 2, groups=1), nn.Tanh(), nn.Conv3d(4, 2, 1)),
        (3, 2, 4, 3),
    ),
    Case("fallback-bilinear", lambda: Product(nn.Bilinear(5, 5, 4)), (5,)),
    Case("embedding-2d", lambda: sequential(nn.Embedding(11, 6), nn.Linear(6, 3)), (), 11),
    Case(
        "embedding-3d",
        lambda: sequential(nn.Embedding(11, 6, padding_idx=2), nn.Linear(6, 3)),
        (5,),
        11,
    ),
    Case("embedding-4d", lambda: sequential(nn.Embedding(11, 6), nn.Linear(6, 3)), (2, 4), 11),
    Case(
        "layer-norm-2d", lambda: sequential(nn.Linear(7, 6), nn.LayerNorm(6), nn.Linear(6, 3)), (7,)
    ),
    Case(
        "layer-norm-3d",
        lambda: sequential(nn.Linear(7, 6), nn.LayerNorm(6), nn.Linear(6, 3)),
        (4, 7),
    ),
    Case(
        "layer-norm-two-axes",
        lambda: sequential(nn.Linear(7, 6), nn.LayerNorm((4, 6)), nn.Linear(6, 3)),
        (4, 7),
    ),
    Case(
        "layer-norm-no-bias",
        lambda: sequential(nn.Linear(7, 6), nn.LayerNorm(6, bias=False)),
        (4, 7),
    ),
    Case("rms-norm-2d", lambda: sequential(nn.Linear(7, 6), nn.RMSNorm(6), nn.Linear(6, 3)), (7,)),
    Case(
        "rms-norm-3d",
        lambda: sequential(nn.Linear(7, 6), nn.RMSNorm(6, eps=1e-3), nn.Linear(6, 3)),
        (4, 7),
    ),
    Case(
        "group-norm-2d",
        lambda: sequential(nn.Linear(7, 6), nn.GroupNorm(2, 6), nn.Linear(6, 3)),
        (7,),
    ),
    Case(
        "group-norm-4d",
        lambda: sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(3, 6), nn.Tanh()),
        (3, 6, 7),
    ),
    Case("shared-linear", lambda: Twice(nn.Linear(6, 6)), (6,)),
    Case("shared-linear-3d", lambda: Twice(nn.Linear(6, 6)), (4, 6)),
    Case("shared-conv", lambda: Twice(nn.Conv2d(3, 3, 3, padding=1)), (3, 5, 6)),
    Case("shared-norm", lambda: Twice(nn.LayerNorm(6)), (4, 6)),
    Case("positions", Positions, (5,), 11),
    Case("tied-head", TiedHead, (5,), 11),
    Case("fallback-whole", OwnParameter, (5,)),
    Case(
        "fallback-3d",
        lambda: sequential(nn.Linear(7, 6), ScaleLayer(6), nn.Tanh(), nn.Linear(6, 3)),
        (4, 7),
    ),
    Case(
        "fallback-transposed-conv",
        lambda: sequential(nn.ConvTranspose2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 1)),
        (3, 5, 6),
    ),
    Case("fallback-prelu", lambda: sequential(nn.Linear(7, 6), nn.PReLU(6), nn.Linear(6, 3)), (7,)),
]


class Recurrent(nn.Module):
    """A recurrent layer with a head on its output and on its last state."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(layer.hidden_size, 3)
        self.state = nn.Linear(layer.hidden_size, 3)

    def forward(self, x: Tensor) -> Tensor:
        axis = 0 if self.layer.batch_first else 1
        x = x.movedim(0, axis)
        # An explicit state: torch.func, which the oracle uses, cannot see through the one made
        # inside.
        shape = (
            self.layer.num_layers * (1 + self.layer.bidirectional),
            x.shape[axis],
            self.layer.hidden_size,
        )
        start = (x.select(1 - axis, 0)[:, :1] * 0).expand(shape).contiguous()
        out, last = self.layer(x, (start, start) if isinstance(self.layer, nn.LSTM) else start)
        last = last[0] if isinstance(last, tuple) else last
        return self.head(out[..., : self.layer.hidden_size].movedim(axis, 0).sum(1)) + self.state(
            last[-1]
        )


CASES += [
    Case("lstm", lambda: Recurrent(nn.LSTM(5, 4, batch_first=True)), (6, 5)),
    Case("lstm-time-major", lambda: Recurrent(nn.LSTM(5, 4, num_layers=2)), (6, 5)),
    Case(
        "gru-both-ways",
        lambda: Recurrent(nn.GRU(5, 4, batch_first=True, bidirectional=True)),
        (6, 5),
    ),
    Case("rnn", lambda: Recurrent(nn.RNN(5, 4, batch_first=True)), (6, 5)),
]


class Attention(nn.Module):
    """Self-attention, or attention of a learned query over the input, with every option that adds
    parameters.
    """

    def __init__(self, *, learned: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, add_bias_kv=learned)
        self.query = nn.Parameter(torch.randn(1, 2, 6)) if learned else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        query = h if self.query is None else self.query.expand(x.shape[0], -1, -1)
        return self.attention(query, h, h, need_weights=False)[0]


class Tokens(nn.Module):
    """Class token, position embedding, a scale and a matrix of its own around a layer: what vision
    transformers do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cls_token, self.positions = (
            nn.Parameter(torch.randn(1, 1, 6)),
            nn.Parameter(torch.randn(1, 9, 6)),
        )
        self.gamma, self.matrix = nn.Parameter(torch.rand(6)), nn.Parameter(torch.randn(6, 4))
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = (
            torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1)
            + self.positions[:, : x.shape[1] + 1]
        )
        return torch.tanh(x + self.gamma.exp() * self.inner(x)) @ self.matrix


class WeightedBag(nn.Module):
    """The input weighs the rows of a bag of embeddings, some of which it holds twice."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(7, 4, mode="sum"), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        index = torch.tensor([1, 3, 3, 0, 6, 1], device=x.device).expand(x.shape[0], -1)
        return self.head(torch.tanh(self.bag(index, per_sample_weights=x)))


CASES += [
    Case("attention", lambda: Attention(learned=False), (5, 6)),
    Case("attention-learned", lambda: Attention(learned=True), (5, 6)),
    Case("bare-tokens", Tokens, (5, 6)),
]
WITHOUT_ORACLE = [Case("weighted-bag", WeightedBag, (6,))]  # torch.func cannot differentiate it


def mean_cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])
