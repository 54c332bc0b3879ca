"""Parameters used in a module's own forward pass: exact without the fallback where it is plain
whose gradient is whose.
"""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.errors import PrivacyError
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.layers.bare import BareParameters
from dpoptim.gradients.oracle import clipped_sums, engine_sums, gradients_alone
from support import (
    by_engine,
    clipped,
    joint_norm,
    loss_of_outputs,
    record_loss,
    reduced,
    vmap_gradients,
)
from support import mismatch as mismatch_with_records_alone

ROWS, T, D = 7, 4, 6
AS_TRIED = Isolation()


def mismatch(model: nn.Module, x: Tensor) -> float:
    """Relative distance of the engine's sum from the oracle's; half of the records are clipped."""
    target = torch.randn(len(x), dtype=x.dtype)
    truth = vmap_gradients(model, x, target)
    norms = torch.stack([g.reshape(len(g), -1).square().sum(1) for g in truth]).sum(0).sqrt()
    clipping = Clipping(float(norms.median()))
    expected = clipped(truth, clipping, len(x))
    sums = by_engine(model, x, target, clipping, capacity=len(x))
    return joint_norm([a - b for a, b in zip(sums, expected, strict=True)]) / joint_norm(expected)


def decided(model: nn.Module, x: Tensor, isolation: Isolation = AS_TRIED) -> bool | None:
    """The decision of a first call: whether the model itself, with a parameter, falls back."""
    engine = Engine(model, Clipping(1.0), capacity=len(x), isolation=isolation)
    engine.attach()
    try:
        model(x)
        runner = next(
            c.cell_contents
            for c in model.forward._forward.__closure__
            if isinstance(c.cell_contents, BareParameters)
        )
        # nothing is left on the module
        assert not any(key in vars(m) for m in model.modules() for key in m._parameters)
        return runner.falls_back
    finally:
        engine.detach()


def falls_back(model: nn.Module, x: Tensor) -> bool:
    """Whether the model itself went through the fallback; it owns a bare parameter."""
    found = decided(model, x)
    assert found is not None
    return found


def masked(h: Tensor, mask: Tensor, token: Tensor) -> Tensor:
    h = h.clone()
    h[mask] = token
    return h


class User(nn.Module):
    """A bare parameter of some shape, used in some way, between two layers."""

    def __init__(self, shape: tuple[int, ...], use: str) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.rand(shape) + 0.5)
        self.register_buffer("wave", torch.linspace(0.5, 2, D))
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 3)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        scope = {"p": self.p, "h": h, "B": x.shape[0], "torch": torch, "F": F, "T": T, "self": self}
        scope["masked"] = masked
        return self.last(eval(self.use, scope))


EXACT = [
    ((1, T, D), "h + p"),
    ((T, D), "p + h"),
    ((D,), "h * p"),
    ((D,), "h * (1 + p)"),
    ((), "h / p"),
    ((1,), "p - h"),
    ((D,), "p.exp() * h"),
    ((1, 1, D), "torch.cat([p.expand(B, -1, -1), h], 1)"),
    ((1, 1, D), "torch.cat((h, p.repeat(B, 1, 1)), dim=-2)"),
    ((D,), "torch.cat([p.expand(B, 1, D), h], dim=1)"),
    ((1, 1, D), "torch.cat([p.expand_as(h[:, :1]), h], dim=1)"),
    ((1, 2 * T, D), "h + p[:, :h.shape[1]]"),
    ((2 * T, D), "h + p[:h.shape[1]].unsqueeze(0)"),
    ((D, T), "h + p.T"),
    ((1, 1, D), "torch.where(h > 0, h, p)"),
    ((D,), "h + p * self.wave"),
    ((D,), "torch.addcmul(h, h, p)"),
    ((D,), "h.clone().mul_(p)"),
    ((2, D), "h * p[0] + p[1]"),
    ((1, T, D), "h + p.type_as(h) + p.to(h)"),
    ((1, T, D), "h.to(p).type_as(p).expand_as(h + p) + p"),
    (
        (1, T // 2, D),
        "h + F.interpolate(p.transpose(1, 2), scale_factor=2.0, mode='linear').transpose(1, 2)",
    ),
    ((1, 1, D), "torch.cat([self.first(p.expand(B, -1, -1)), h], 1)"),
    ((1, 1, D), "torch.cat([self.first(p).expand(B, -1, -1), h], 1)"),
    ((1, D), "torch.stack([p.expand(B, -1), h.mean(1)], 1)"),
    # positions made on the way are not data
    ((1, 1, D), "h + p * torch.arange(1.0, T + 1)[None, :, None].to(h.dtype)"),
]

EXACT += [
    ((D, D), "F.linear(h, p)"),
    ((D, D), "h @ p"),
    ((D,), "F.layer_norm(h, (D,), p)"),
    ((2, D), "h[:, 0] * F.embedding((h[:, 0, 0] > 0).long(), p)"),
    ((2, D), "h + F.embedding((h[..., 0] > 0).long(), p, padding_idx=1)"),
    ((D, D), "(p @ h.transpose(1, 2)).transpose(1, 2)"),
    ((D, D), "(p.exp() @ h.transpose(1, 2)).transpose(1, 2)"),
    ((D, D), "torch.matmul(h, p.exp())"),
    # a causal convolution of one channel each
    (
        (D, 1, 2),
        "F.conv1d(h.mT, p.squeeze(1).unsqueeze(1), None, 1, 1, groups=D)[..., :T].mT",
    ),
    ((D, 2, 1, 1), "F.conv2d(h.mT[..., None], p, padding='same', groups=3)[..., 0].mT"),
]

# other operations tell what these do
EXACT += [
    ((D, D), "torch.einsum('btd,de->bte', h, p)"),
    ((D, D), "torch.einsum('btd,ed->bte', h, p) * torch.einsum('bd,de->be', h[:, 0], p)[:, None]"),
    (
        (D, D),
        "torch.einsum('btd,dd->btd', h, p) + torch.einsum('btd,be->bte', h[..., :1], h[:, 0])",
    ),
    ((2, D, D), "torch.einsum('btd, kde, k->bte', h, p, p[:, 0, 0])"),
    ((D, D), "torch.einsum('btd,td,de->bte', [h, p[:T], p.exp()])"),
    ((D, D), "F.linear(h, p * 2)"),
    ((D, D), "F.linear(h[:, 0], p.clamp(0.6, 1.2), p[0] * 2)"),
    ((D, D), "h.mean(1) @ (p * p[0, 0])"),
    ((D, D), "F.linear(h, p.t(), self.wave) @ p.T"),
    ((D, D), "torch.mm(h[:, 0], p) + F.linear(h[:, 1], p.mT.contiguous())"),
    # to be seen as no parameter, nor as its transposition: views without its gradient
    ((D, D), "F.linear(h, p) + F.linear(h, p.squeeze().detach().view(D, D))"),
    ((D, D), "F.linear(h, p.detach().T) + h @ p.detach() + F.linear(h, p.T)"),
    ((D, D), "h + p[h[:, 0].argmax(1)][:, None] * p[-1 - h.argmax(2)]"),
    ((D, D), "h * p[h.argmax(2), h.argmin(2)][..., None] + p[0][h[:, 0].argmin(1)][:, None, None]"),
    # copies of a memory or of queries, one for each record
    ((T, D), "F.cosine_similarity(p.expand(B, -1, -1), h[:, :1], -1)[..., None] * h"),
    ((T, D), "h * p.expand(B, -1, -1).gather(1, h.argsort(1))"),
    ((2, D), "F.scaled_dot_product_attention(p[None].repeat(B, 1, 1), h, h)"),
    ((D, D), "torch.einsum('btd,be->bte', h, p[:1].expand(B, -1))"),
    ((2, D), "self.first(torch.zeros_like(q := p.repeat(B, 1, 1)) + q) * h.mean(1, keepdim=True)"),
    # layers whose weights are made of a parameter, or of one beside it
    ((D, 1, 2), "F.conv1d(h.mT, p.flip(2), None, 1, 1, groups=D)[..., :T].mT"),
    ((D,), "h * F.embedding((h[:, 0, 0] * 0).long(), p.expand(B, -1))[:, None]"),
    ((D, D), "F.linear(h, p.tanh() * self.wave, p[0])"),
    ((D, D), "F.linear(h, p, p.mean(1))"),
    ((D, D), "h[:, 0] @ (p / p.norm()) + F.layer_norm(h, (D,), p[1], 2 * p[0]).sum(1)"),
]

FALLBACK = [
    ((T,), "F.prelu(h, p)"),
    ((D, D), "torch.tensordot(h, p, ([2], [0]))"),
    # records' values say whose copy each of them gets, here the first one's
    ((D,), "h * p.expand(B, -1).gather(0, (h[:, 0] * 0).long())[:, None]"),
    ((D,), "h * p.expand(B, -1).index_select(0, (h[:, 0, 0] * 0).long())[:, None]"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("shape", "use"), EXACT + FALLBACK, ids=lambda value: str(value))
@pytest.mark.thinned(2)
def test_every_use_is_exact(shape: tuple[int, ...], use: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    use = use.replace("D", str(D))
    model = User(shape, use).to(dtype)
    x = torch.randn(ROWS, T, D, dtype=dtype)
    assert mismatch(model, x) < (3e-5 if dtype == torch.float32 else 1e-7)
    assert mismatch(model, x[:1]) < (3e-5 if dtype == torch.float32 else 1e-7)  # a single record
    assert falls_back(model, x) == (
        (shape, use) in [(s, u.replace("D", str(D))) for s, u in FALLBACK]
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("shape", "use"), EXACT, ids=lambda value: str(value))
def test_as_many_records_as_positions(shape: tuple[int, ...], use: str) -> None:
    """Axes of the same length must not be taken for each other."""
    torch.manual_seed(0)
    assert (
        mismatch(
            User(shape, use.replace("D", str(D))).double(),
            torch.randn(T, T, D, dtype=torch.float64),
        )
        < 1e-7
    )
    assert (
        mismatch(
            User(shape, use.replace("D", str(D))).double(),
            torch.randn(D, T, D, dtype=torch.float64),
        )
        < 1e-7
    )


@pytest.mark.parametrize("rows", [ROWS, T, D, 1])
@pytest.mark.parametrize(
    ("shape", "mask"), [((D,), "h[..., 0] > 0"), ((1, D), "h[:, 0, 0] > 0"), ((), "h > 0")]
)
def test_where_a_mask_chooses_a_parameter_is_written(
    shape: tuple[int, ...], mask: str, rows: int
) -> None:
    """Mask tokens: of Wav2Vec2 in training, which had passed record by record."""
    torch.manual_seed(0)
    model = User(shape, f"masked(h, {mask}, p)").double()
    x = torch.randn(rows, T, D, dtype=torch.float64)
    target = torch.randn(rows, dtype=torch.float64)
    assert mismatch_with_records_alone(model, (x, target)) < 1e-7
    assert not falls_back(model, x)


def test_rows_written_one_by_one_are_not_taken_for_one_for_all() -> None:
    """Which of a parameter's rows a place gets depends on how many others chose before it."""
    model = User((ROWS * T, D), "masked(h, h[..., 0] < 9, p)")
    with pytest.raises(PrivacyError, match="vectorise"):
        falls_back(model, torch.randn(ROWS, T, D))


class Positions(nn.Module):
    """Returns parameters without having met data."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 2 * T, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[:, : x.shape[1]]


def test_a_parameter_may_meet_data_in_another_module() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions, self.last = Positions(), nn.Linear(D, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(x + self.positions(x)))

    torch.manual_seed(0)
    assert mismatch(Model(), torch.randn(ROWS, T, D)) < 3e-5


class Lists(nn.Module):
    """Parameters in a list and in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.rand(D) + 0.5, torch.rand(D) + 0.5])
        self.named = nn.ParameterDict({"shift": torch.randn(1, T, D)})
        self.last = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = torch.tanh(x * scale)
        return self.last(x + self.named["shift"])


def test_lists_and_dictionaries_of_parameters() -> None:
    torch.manual_seed(0)
    model, x = Lists(), torch.randn(ROWS, T, D)
    assert mismatch(model, x) < 3e-5
    assert not falls_back(model, x)


REFUSED = [
    ("h * model.owner.p", "'owner.p' was used outside"),  # not in the owner's forward pass
    ("torch.tensordot(h, model.owner(h), ([2], [0]))", "'owner' meets data in 'tensordot'"),
    ("h * model.owner(h) + 0 * model.owner.p.square().sum()", "'owner.p' was used outside"),
    (
        "F.linear(model.owner(h).expand(B, 1, D), model.linear.weight) + h",
        "was used outside|meets data|saw different",
    ),
]


@pytest.mark.parametrize(("use", "named"), REFUSED)
def test_uses_that_cannot_be_told_apart_are_refused(use: str, named: str) -> None:
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.ones(D))

        def forward(self, x: Tensor) -> Tensor:
            return self.p * 2

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.owner, self.linear = Owner(), nn.Linear(D, D)

        def forward(self, h: Tensor) -> Tensor:
            return eval(use, {"h": h, "model": self, "torch": torch, "B": len(h), "F": F, "D": D})

    model = Model()
    engine = Engine(model, Clipping(1.0), capacity=ROWS)
    engine.attach()
    engine.begin_microbatch(ROWS)
    with pytest.raises(PrivacyError, match=named):
        model(torch.randn(ROWS, T, D)).sum().backward()
    assert all(p.grad is None for p in model.parameters())


def test_random_numbers_made_of_a_parameter_are_refused() -> None:
    """They cannot be drawn again record by record; a mask of dropout is kept."""
    model = User((1, T, D), "h + F.alpha_dropout(p, training=True)")
    engine = Engine(model, Clipping(1.0), capacity=ROWS)
    engine.attach()
    engine.begin_microbatch(ROWS)
    with pytest.raises(PrivacyError, match="dropout"):
        model(torch.randn(ROWS, T, D)).sum().backward()


class SmallViT(nn.Module):
    """A vision transformer written the usual way."""

    def __init__(self, width: int = 8, depth: int = 2, patches: int = 4, heads: int = 2) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.1)
        self.pos_embed = nn.Parameter(torch.randn(1, patches + 1, width) * 0.1)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


class Block(nn.Module):
    """Attention and an MLP, each scaled by a parameter (LayerScale)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.gamma1, self.gamma2 = (
            nn.Parameter(torch.full((width,), 0.5)),
            nn.Parameter(torch.full((width,), 0.5)),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.gamma1 * self.out(
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )
        return x + self.gamma2 * self.mlp(self.norm2(x))


def test_a_vision_transformer_without_the_fallback() -> None:
    torch.manual_seed(0)
    model, x = SmallViT(), torch.randn(ROWS, 3, 8, 8)
    assert not falls_back(model, x)
    assert mismatch(model, x) < 3e-5


class BesideConstants(nn.Module):
    """A parameter beside a buffer with more axes than the data, or one of as many entries as there
    are records.
    """

    def __init__(
        self, shape: tuple[int, ...], use: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.p, self.use = nn.Parameter(torch.randn(D)), use
        self.register_buffer("constant", (torch.arange(math.prod(shape)) % 3 - 1.0).view(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.p, self.constant)


BESIDE = {
    "where": ((ROWS, 1, 1), lambda x, p, c: torch.where(c, x, p).transpose(0, 1)),
    "where made of a buffer": (
        (ROWS, 1, 1),
        lambda x, p, c: torch.where(c > 0, x, p).transpose(0, 1),
    ),
    "addcmul": ((ROWS, 1, 1), lambda x, p, c: torch.addcmul(x, p, c).transpose(0, 1)),
    "lerp": ((ROWS, 1, 1), lambda x, p, c: torch.lerp(x, p, c).transpose(0, 1)),
    "as long as a batch": ((ROWS, 1), lambda x, p, c: torch.addcmul(x[:, None], p, c)),
    "made of one as long": ((ROWS, 1), lambda x, p, c: torch.where(c > 0, x[:, None], p)),
    "made of both": ((ROWS, 1), lambda x, p, c: x[:, None] * 2 + p * (c + 1)),
    "time": ((ROWS, 1), lambda x, p, c: x[:, None] + p * torch.arange(float(len(c)))[:, None]),
    "records elsewhere": (
        (ROWS, 1),
        lambda x, p, c: (x.expand(ROWS, *x.shape) * p).transpose(0, 1),
    ),
}


@pytest.mark.parametrize("use", BESIDE)
@pytest.mark.parametrize("rows", [1, 3, ROWS])
def test_constants_with_more_axes_than_the_data(use: str, rows: int) -> None:
    """Their first axis is no batch, even where it is as long: taken for one, a record moved the
    sum by 7.9 C.
    """
    torch.manual_seed(0)
    shape, operation = BESIDE[use]
    model = BesideConstants(shape, operation).double()
    if use == "where":
        model.constant = model.constant > 0
    x, weights = torch.randn(rows, D).double(), torch.randn(rows, ROWS, D).double()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]) * batch[1]).sum()

    truth = gradients_alone(model, loss, [(x[i : i + 1], weights[i : i + 1]) for i in range(rows)])
    norms = truth[0].norm(dim=1)
    clipping = Clipping(float(norms.median()) * 0.9)
    expected = clipped_sums(truth, clipping, rows, "sum")
    engine = Engine(model, clipping, capacity=rows, reduction="sum")
    engine.attach()
    # as attach does: a batch unlike every other axis shows which axis is the records'
    model(torch.randn(11, D).double())
    engine.begin_microbatch(rows)
    loss(model, (x, weights)).backward()
    sums = engine.split(engine.take())
    engine.detach()
    assert joint_norm([a - b for a, b in zip(sums, expected, strict=True)]) <= 1e-12 * joint_norm(
        expected
    )


@pytest.mark.parametrize("shape", [(), (D,), (1, 1)])
def test_no_positions_at_all(shape: tuple[int, ...]) -> None:
    """An empty sequence: the parameter's gradient is zero."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p, self.head = nn.Parameter(torch.randn(shape)), nn.Linear(D, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((x[:, :0] * self.p).sum(1) + x[:, 0])

    torch.manual_seed(0)
    model, x, target = Model(), torch.randn(ROWS, T, D), torch.randn(ROWS)
    sums = by_engine(model, x, target, Clipping(1.0), capacity=ROWS)
    assert float(sums[0].abs().sum()) == 0
    assert joint_norm(sums) > 0


GIVEN = {  # what an outer module passes in is no record, whatever its axes
    "a scale": ((D,), lambda x, p, c: torch.addcmul(x / 255, p, c)),
    "times": ((T, 1), lambda x, p, c: torch.addcmul(x.unsqueeze(1), p, c)),
    "a mask": ((T, T), lambda x, p, c: torch.where(c > 0, x[:, None, :T], p[0])),
}


class Given(nn.Module):
    """Hands a constant of its own to a module with a bare parameter."""

    def __init__(self, shape: tuple[int, ...], inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("constant", (torch.arange(math.prod(shape)) % 3 - 1.0).view(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, self.constant)


class Inner(nn.Module):
    def __init__(self, use: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.p, self.use = nn.Parameter(torch.randn(D)), use

    def forward(self, x: Tensor, constant: Tensor) -> Tensor:
        return self.use(x, self.p, constant)


@pytest.mark.parametrize("case", GIVEN)
@pytest.mark.parametrize("rows", [T, 9])
def test_constants_that_are_passed_in(case: str, rows: int) -> None:
    torch.manual_seed(0)
    shape, use = GIVEN[case]
    model, x = Given(shape, Inner(use)), torch.randn(rows, D)
    assert mismatch(model, x) < 3e-5


def test_a_number_in_a_module_without_a_rule() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.randn(()))

        def forward(self, x: Tensor) -> Tensor:
            return torch.hypot(x, self.p)

    torch.manual_seed(0)
    model, x = Model(), torch.randn(ROWS, D)
    assert falls_back(model, x)
    assert mismatch(model, x) < 3e-5


def test_the_first_input_may_be_no_batch() -> None:
    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p, self.head = nn.Parameter(torch.randn(D)), nn.Linear(D, 3)

        def forward(self, times: Tensor, x: Tensor) -> Tensor:
            return self.head(torch.tanh(x * self.p) + times.mean())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.timed = Timed()

        def forward(self, x: Tensor) -> Tensor:
            return self.timed(torch.arange(3.0), x)

    torch.manual_seed(0)
    x, target, model = torch.randn(ROWS, D), torch.randn(ROWS), Model()
    sums = by_engine(model, x, target, Clipping(0.5), capacity=ROWS)

    engine = Engine(model.timed, Clipping(0.5), capacity=ROWS)
    engine.attach()
    engine.begin_microbatch(ROWS)
    reduced(record_loss(model.timed(torch.arange(3.0), x), target), "mean").backward()
    again = engine.split(engine.take())
    engine.detach()
    assert joint_norm([a - b for a, b in zip(again, sums, strict=True)]) <= 1e-6 * joint_norm(sums)


def test_a_mask_that_all_records_share_is_made_again() -> None:
    """Dropout on a shared table before it meets data: sums are those of autograd, mask included."""
    torch.manual_seed(0)
    model = TableOfPositions().double()
    x = torch.randint(0, 11, (5, 4))

    def loss() -> Tensor:
        torch.manual_seed(7)
        return model(x).square().sum()

    expected = torch.autograd.grad(loss(), list(model.parameters()))
    told = Isolation(shared=frozenset({"norm"}), outside=frozenset({"places"}), windows=True)
    engine = Engine(model, Clipping(1e9), capacity=5, reduction="sum", isolation=told)
    engine.attach()
    engine.begin_microbatch(5)
    loss().backward()
    found = [t.clone() for t in engine.split(engine.take())]
    engine.detach()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-9)
    assert model.places.weight is model.places._parameters["weight"]


class TableOfPositions(nn.Module):
    """Reads a table of positions outside of its layer, and drops some of it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 6), nn.Embedding(9, 6)
        self.norm, self.drop = nn.LayerNorm(6), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        table = self.drop(self.norm(self.places.weight))[: x.shape[1]]
        return self.words(x) @ table.unsqueeze(0).repeat(len(x), 1, 1).transpose(1, 2)


class Copied(nn.Module):
    """Copies of a parameter, scaled by numbers that are nobody's, but as many as records."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.p, self.first = nn.Parameter(torch.rand(2, D)), nn.Linear(D, D)
        self.register_buffer("scale", torch.rand(rows, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.p.repeat(len(x), 1, 1) * self.scale) * x.mean(1, keepdim=True)


def test_copies_that_were_made_unequal_are_not_taken_for_equal() -> None:
    """Else all records would get the first one's, in the forward pass as well."""
    x = torch.randn(ROWS, T, D, dtype=torch.float64)
    assert mismatch(Copied(1).double(), x) < 1e-7
    with pytest.raises(PrivacyError, match="first axis is not the batch"):
        mismatch(Copied(ROWS).double(), x)


class AtPositions(nn.Module):
    """Looks a parameter up at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.head = nn.Parameter(torch.randn(9, D)), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.p[torch.arange(x.shape[1]) * 2]).tanh()).mean(1)


@pytest.mark.parametrize("rows", [ROWS, T, 9])
def test_an_untried_call_with_as_many_records_as_something_else_has_decides_nothing(
    rows: int,
) -> None:
    """As many as positions, or as rows of a parameter: such a call goes through the fallback."""
    torch.manual_seed(0)
    model, x = AtPositions().double(), torch.randn(rows, T, D, dtype=torch.float64)
    untried, target = Isolation(untried=True), torch.randn(rows, dtype=torch.float64)
    assert (decided(model, x, untried) is None) == (rows != ROWS)
    truth = vmap_gradients(model, x, target)
    sums = engine_sums(model, loss_of_outputs, (x, target), rows, Clipping(0.1), "mean", untried)
    expected = clipped(truth, Clipping(0.1), rows)
    assert joint_norm([a - b for a, b in zip(sums, expected, strict=True)]) < 1e-6
