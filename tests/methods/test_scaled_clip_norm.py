"""Gradients scaled tensor by tensor before they are clipped: exact in every layer rule, by moments
that are released, and unscaled where the optimizer sees them.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.clipping import Clipping
from dpoptim.gate import Gate
from dpoptim.gradients.arithmetic.norms import taper
from dpoptim.gradients.arithmetic.products import COMMON_FACTOR_ERROR
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.isolation import Isolation
from dpoptim.methods import scaled_clip_norm
from dpoptim.methods.scaled_clip_norm import MOST, PrivateScales, scales_of
from dpoptim.optim import AdamBC
from dpoptim.scaled_clipping import ScaledClipping

DATA = {"n": 600, "batch_size": 60, "delta": 1e-5, "neighboring": "zero-out"}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(7, 5), nn.LayerNorm(5)
        self.shift, self.head = nn.Parameter(torch.zeros(5)), nn.Linear(5, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.table(x) + self.shift)).mean(1)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Embedding(7, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return self.out(h + self.attend(h, h, h, need_weights=False)[0]).mean(1)


def pixels(rows: int) -> Tensor:
    return torch.randn(rows, 2, 6, 6)


def words(rows: int) -> Tensor:
    return torch.randint(0, 7, (rows, 4))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 9), nn.Tanh(), nn.Linear(9, 3)),
        pixels,
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 3)
        ),
        pixels,
    ),
    "tied": (Tied, words),
    "attention": (Heads, words),
}


def expected(
    model: nn.Module, x: Tensor, y: Tensor, scales: list[float]
) -> tuple[list[Tensor], float]:
    """Sums by per-sample gradients, scaled, measured, half of them clipped; and the bound."""
    names = [name for name, _ in model.named_parameters()]
    values = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: Any, row: Tensor, label: Tensor) -> Tensor:
        out = functional_call(model, parameters, (row[None],))
        return F.cross_entropy(out, label[None]) * 3

    each = vmap(grad(loss), (None, 0, 0))(values, x, y)
    scaled = [s * each[name].flatten(1) for name, s in zip(names, scales, strict=True)]
    norms = torch.cat(scaled, 1).norm(dim=1)
    bound = float(norms.median()) * 1.001
    factor = (bound / norms).clamp(max=1)
    return [torch.einsum("b,b...->...", factor, each[name]) for name in names], bound


@pytest.mark.parametrize("isolation", ["rules", "vmap"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", MODELS)
def test_every_rule_clips_by_the_scaled_norm(
    name: str, dtype: torch.dtype, isolation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    make, draw = MODELS[name]
    model = make().to(dtype)
    x, y = draw(11), torch.randint(0, 3, (11,))
    x = x.to(dtype) if x.is_floating_point() else x
    trained = list(model.parameters())
    scales = [0.2 * 1.7**i for i in range(len(trained))]
    wanted, bound = expected(model, x, y, scales)
    rule = ScaledClipping(Clipping(bound), tuple(scales))
    engine = Engine(model, rule, capacity=11, reduction="sum", isolation=Isolation.of(isolation, 0))
    assert [id(p) for p in engine.parameters] == [id(p) for p in trained]
    monkeypatch.setattr(engine, "margin", lambda: 0.0)
    engine.attach()
    engine.begin_microbatch(11)
    engine.backward(F.cross_entropy(model(x), y, reduction="none") * 3)
    engine.detach()
    for found, want in zip(engine.split(engine.take()), wanted, strict=True):
        torch.testing.assert_close(
            found, want.double(), rtol=1e-5, atol=1e-6 if dtype == torch.float64 else 3e-5
        )


STYLES: list[Any] = ["flat", "automatic", "per-layer", {"0": 1, "": 3}]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("style", STYLES, ids=str)
@pytest.mark.parametrize("heavy", ["weights", "biases"])
def test_one_record_moves_what_is_released_by_at_most_the_bound(
    style: Any, heavy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both worlds the same is released, so the scales are the same; they are uneven."""
    plan = dpoptim.DPSGD(dpoptim.ScaledClipNorm(0.7, 1, 0.5, share=0.3), style).plan(
        **(DATA | {"n": 12, "batch_size": 12}), steps=4, noise_multiplier=0.01
    )
    worlds: list[list[Tensor]] = []

    def spy(self: Gate, sums: list[Tensor]) -> list[Tensor]:
        worlds[-1].append(torch.cat([total.clone() for total in sums]))
        self.released += 1
        generator = torch.Generator().manual_seed(len(worlds[-1]))
        *gradients, moments = sums
        noise = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in gradients]
        uneven = [(1.0, 200.0)[place % 2] for place in range(len(moments))]
        return [*noise, torch.tensor(uneven, dtype=torch.float64)]

    monkeypatch.setattr(Gate, "release_sum", spy)
    shares = []
    for weight in (0.0, 40.0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        x = torch.randn(12, 3, dtype=torch.float64)
        x[4] *= 50.0 if heavy == "weights" else 0.0
        scale = torch.ones(12, dtype=torch.float64)
        scale[4] = weight
        worlds.append([])
        data = TensorDataset(x, torch.arange(12) % 2, scale)
        with dpoptim.attach(plan, model, optimizer, data, noise_seed=0) as private:
            for a, b, w in private.batches():
                private.backward(F.cross_entropy(model(a), b, reduction="none") * w)
                optimizer.step()
                shares.append(private._steps.noise_shares)
    moved = [float((a - b).norm()) for a, b in zip(*worlds, strict=True)]
    assert max(moved) <= 1 + 1e-9
    assert min(moved) > 0.3
    if style == "flat" and heavy == "weights":
        assert max(moved) > 0.95
    assert shares[:4] == shares[4:]
    assert max(shares[3]) > 1.5 * min(shares[3])


def test_without_noise_and_clipping_it_is_sgd() -> None:
    """What was scaled is unscaled: the optimizer sees gradients in their own units."""
    plan = dpoptim.DPSGD(dpoptim.ScaledClipNorm(1e6, every=2)).plan(
        **(DATA | {"n": 20, "batch_size": 20}), steps=8, noise_multiplier=0
    )
    x, y = torch.randn(20, 3, dtype=torch.float64), torch.arange(20) % 2
    found = []
    for private_run in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if private_run:
            with dpoptim.attach(
                plan, model, optimizer, TensorDataset(x, y), noise_seed=0
            ) as private:
                for a, b in private.batches():
                    private.backward(F.cross_entropy(model(a), b, reduction="none"))
                    optimizer.step()
                scales = private._steps.noise_shares
                assert max(scales) > 1.2 * min(scales)
        else:
            for _ in range(8):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-8)


def test_each_tensor_is_as_noisy_as_optimizers_are_told() -> None:
    """Records without gradients: what is released is noise, and scales follow its size alone."""
    plan = dpoptim.DPSGD(dpoptim.ScaledClipNorm(0.3, every=1, power=0.5)).plan(
        **DATA, steps=6, noise_multiplier=1.0
    )
    model = nn.Linear(300, 300)
    optimizer = AdamBC(model.parameters(), lr=1e-3)
    told: list[tuple[float, float, int]] = []

    def look(optimizer: Any, *given: Any) -> None:
        for p in model.parameters():
            assert p.grad is not None
            std = optimizer.param_groups[0]["noise_std"] * optimizer.noise_shares[p]
            told.append((float(p.grad.square().mean().sqrt()), std, p.numel()))

    with dpoptim.attach(
        plan, model, optimizer, TensorDataset(torch.zeros(600, 300)), noise_seed=0
    ) as private:
        optimizer.register_step_pre_hook(look)
        for (x,) in private.batches():
            private.backward(model(x).sum(1) * 0)
            optimizer.step()
    assert len(told) == 12
    for seen, said, entries in told:
        assert seen == pytest.approx(said, rel=5 / math.sqrt(2 * entries))
    assert max(said for _, said, _ in told) > 1.5 * min(said for _, said, _ in told)
    state = optimizer.state[model.bias]
    assert float(state["second"].mean()) == pytest.approx(state["variance"], rel=0.4)


def test_scales_leave_the_length_of_the_noise_and_shorten_it_for_given_moments() -> None:
    entries, moments, quiet = [5000, 50, 400], [250.0, 200.0, 80.0], [0.0] * 3
    for power in (0.25, 0.5):
        scales = scales_of(moments, quiet, entries, power)
        length = sum(d / s**2 for d, s in zip(entries, scales, strict=True))
        assert length == pytest.approx(sum(entries))
        ratios = [s * (m / d) ** power for s, m, d in zip(scales, moments, entries, strict=True)]
        assert max(ratios) == pytest.approx(min(ratios))

    def noise(scales: list[float]) -> float:
        """Of gradients of these moments that are all clipped to one norm, relative to them."""
        norm = sum(s**2 * m for s, m in zip(scales, moments, strict=True))
        return norm * sum(d / s**2 for d, s in zip(entries, scales, strict=True))

    best = noise(scales_of(moments, quiet, entries, 0.25))
    assert best < noise([1.0, 1.0, 1.0])
    assert best < noise(scales_of(moments, quiet, entries, 0.2))
    assert best < noise(scales_of(moments, quiet, entries, 0.3))


def test_drowned_and_empty_moments_make_no_endless_scales() -> None:
    assert scales_of([0.0, 0.0], [0.0, 0.0], [3, 4], 0.5) == [1.0, 1.0]
    scales = scales_of([1e9, 0.0], [0.0, 0.0], [3, 4], 0.5)
    assert scales[1] / scales[0] == pytest.approx(MOST)
    # not above its noise: 2 an entry, on all alike
    drowned = scales_of([190.0, -80.0, 7.0], [10000.0, 10000.0, 10000.0], [100, 40, 10], 0.5)
    assert drowned == pytest.approx([1.0, 1.0, 1.0])
    seen = scales_of([1000.0, -80.0], [10000.0, 10000.0], [80, 20], 0.5)
    assert seen[1] / seen[0] == pytest.approx(math.sqrt((800 / 80 + 2) / 2))
    assert scales_of([math.inf, 1.0], [0.0, 0.0], [3, 4], 0.5) == [1.0, 1.0]


def test_moments_are_those_of_scaled_and_clipped_gradients() -> None:
    """Without noise; of the records that count: one is not finite."""
    rule = Clipping(2.0)
    scales = PrivateScales(dpoptim.ScaledClipNorm(2.0, 1, 0.5, 0.25), rule, 4)
    scales.see([3, 1], lambda sums: [*sums[0].split([3, 1])], lambda step: 0.0)
    squares = {"0": torch.tensor([1.0, 0.0, 9.0, math.nan]).double()}
    squares["1"] = torch.tensor([0.5, 0.0, 27.0, 1.0]).double()
    for step in range(2):
        s, t = (scale**2 for scale in scales._scales)
        norm = s * 9 + t * 27
        scales.observe(squares["0"] + squares["1"], None, squares)
        *_, moments = scales.query([torch.zeros(4, dtype=torch.float64)])
        least = max(s * 1 + t * 0.5, 4.0)
        want = torch.tensor([s / least + s * 9 / norm, t * 0.5 / least + t * 27 / norm])
        torch.testing.assert_close(moments / 0.5, want.double(), rtol=1e-4, atol=0)
        if step == 0:
            assert moments.tolist() == pytest.approx([0.5 * 0.5, 0.5 * 0.875], rel=1e-4)
        scales.answer([torch.zeros(4, dtype=torch.float64), moments])
        assert not scales._observed.any()  # of the next step
    ratio = scales._scales[0] / scales._scales[1]
    assert ratio == pytest.approx(math.sqrt(scales._moments[1] / (scales._moments[0] / 3)))


def most_moved(around: float, signs: tuple[int, int]) -> float:
    """How far one record more moves the moments, of which it may move 1, under a mean: all norms
    are rounded anew, each by at most `COMMON_FACTOR_ERROR`, and so is what they are tapered by.
    """
    capacity, queries = 20_000, []
    for more in (0, 1):
        settings = dpoptim.ScaledClipNorm(1.0, share=0.25)
        scales = PrivateScales(settings, Clipping(1.0), capacity)
        scales.see([3, 1], lambda sums: [*sums[0].split([3, 1])], lambda step: 0.0)
        squares = {}
        for tensor, sign, part in zip("01", signs, (0.7, 0.3), strict=True):
            norm = around * math.sqrt(part) * (1 + more * sign * COMMON_FACTOR_ERROR)
            each = torch.full((capacity,), norm**2, dtype=torch.float64)
            one = torch.tensor([1.0 - int(tensor)], dtype=torch.float64)
            squares[tensor] = torch.cat([each, one]) if more else each
        both = squares["0"] + squares["1"]
        scales.observe(both, taper(both), squares)
        *_, moments = scales.query([torch.zeros(4, dtype=torch.float64)])
        queries.append(moments / 0.5)  # the root of their share
    return float((queries[1] - queries[0]).norm())


@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, 1), (-1, -1)])
@pytest.mark.parametrize("around", [0.5, 0.99, 1.0, 1.01, 30.0, 2.0**55, 2.0**61])
def test_rounding_that_all_records_share_moves_moments_less_than_they_are_shrunk(
    around: float, signs: tuple[int, int]
) -> None:
    assert most_moved(around, signs) <= 1.0


def test_moments_that_are_not_shrunk_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled_clip_norm, "SLOPE", 0.0)
    assert most_moved(0.99, (1, 1)) > 1.0


def test_it_survives_json_and_says_what_is_enforced() -> None:
    for method in (
        dpoptim.DPSGD(dpoptim.ScaledClipNorm(0.5, 7, 0.5, 0.1)),
        dpoptim.DPFTRL(dpoptim.ScaledClipNorm(0.5), order="given"),
    ):
        plan = method.plan(**DATA, epochs=10, epsilon=4.0)
        assert dpoptim.Plan.from_json(plan.to_json()) == plan
        assert "scaled before they are clipped, by noisy second moments" in plan.describe()
        plain = type(method)(0.5).plan(**DATA, epochs=10, epsilon=4.0)
        assert plan.noise_multiplier == plain.noise_multiplier  # nothing is charged


def test_what_it_does_not_go_with() -> None:
    with pytest.raises(ValueError, match="value clipping bounds none by itself"):
        dpoptim.ValueClippedSGD(dpoptim.ScaledClipNorm(1.0))
    with pytest.raises(ValueError, match="value clipping bounds none by itself"):
        dpoptim.DPFTRL(dpoptim.ScaledClipNorm(1.0), value_bound="sharp")
    with pytest.raises(ValueError, match="every=10 leaves no step"):
        dpoptim.DPSGD(dpoptim.ScaledClipNorm(1.0)).plan(**DATA, steps=10, noise_multiplier=1.0)
    for wrong in ({"norm": 0}, {"every": 0}, {"power": -1}, {"share": 1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            dpoptim.ScaledClipNorm(**{"norm": 1.0, **wrong})  # type: ignore[arg-type]
    tree = dpoptim.DPFTRL(dpoptim.ScaledClipNorm(1.0, 2), noise="tree").plan(
        **DATA, epochs=1, noise_multiplier=1.0
    )
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = TensorDataset(torch.zeros(600, 2))
    with dpoptim.Ledger(neighboring="zero-out") as ledger:
        with pytest.raises(ValueError, match="which this noise does not tell"):
            dpoptim.attach(tree, model, optimizer, data, ledger=ledger)
        assert not ledger.entries()
