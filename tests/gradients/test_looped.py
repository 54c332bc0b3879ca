"""Modules that nobody can vectorise run record by record inside a batch: each record's gradient is
its own, and the rest of the model keeps its rules.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.clipping import Clipping
from dpoptim.errors import PrivacyError
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.oracle import engine_sums
from dpoptim.training.trials import isolation_fallback
from dpoptim.training.trials.isolation import Chosen, choose_isolation
from support import mismatch

D, WIDTH, ROWS, POSITIONS = 6, 8, 7, 3


class Slope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor) -> Tensor:
        ctx.save_for_backward(x, a)
        return torch.where(x > 0, x, a * x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, a = ctx.saved_tensors
        return torch.where(x > 0, g, a * g), (g * x * (x <= 0)).sum()


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class ServedSign(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Activation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return Slope.apply(x, self.a)


class Binary(nn.Linear):
    sign: Any = Sign

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.sign.apply(self.weight), self.bias)


class Served(Binary):
    sign = ServedSign


class Rounded(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return Sign.apply(weight)


class Experts(nn.Module):
    """Gives each position to the expert of its choice."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = chosen == i
            if mine.any():
                out[mine] += weights[mine, None] * expert(x[mine])
        return out


class Several(nn.Module):
    """Results of many kinds, each with its records at another place; writes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor, times: Tensor) -> tuple[Any, ...]:
        x[..., 0] *= 2
        scale = 1.0 if x.isfinite().all() else 0.5
        y = scale * Slope.apply(x, self.a) + times
        return y, y.flatten(0, 1), {"mean": y.mean(), "none": None, "kind": "y"}


class WithSeveral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.several, self.last = nn.Linear(D, WIDTH), Several(), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        each, flat, rest = self.several(self.first(x) + 1, torch.ones(WIDTH))
        means = rest["mean"] if rest["mean"].dim() else each.flatten(1).mean(1)
        return self.last(each + flat.view(each.shape)) * means.view(-1, 1, 1)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.activation = nn.Linear(D, WIDTH), Activation()
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.activation(self.activation(self.first(x)) - 1))


class Frames(nn.Module):
    """Folds records and positions together before its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.activation = nn.Linear(D, WIDTH), Activation()
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        frames = self.activation(self.first(x.flatten(0, 1)))
        return self.last(frames).unflatten(0, x.shape[:2])


def parametrised() -> nn.Module:
    model = nn.Sequential(nn.Linear(D, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
    parametrize.register_parametrization(model[2], "weight", Rounded())
    return model


def around(middle: nn.Module, first: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(first or nn.Linear(D, WIDTH), nn.Tanh(), middle, nn.Linear(WIDTH, 2))


def chosen_for(model: nn.Module) -> Chosen:
    return choose_isolation(model, TensorDataset(torch.zeros(9, POSITIONS, D)))


@pytest.mark.parametrize(
    ("build", "where"),
    [
        (lambda: around(Activation()), "2"),
        (lambda: around(nn.ReLU(), Binary(D, WIDTH)), "0"),
        (lambda: around(Experts()), "2"),
        (parametrised, "2"),
        (Twice, "activation"),
        (Frames, "activation"),
        (WithSeveral, "several"),
    ],
    ids=["function", "straight through", "experts", "parametrised", "twice", "folded", "several"],
)
def test_each_record_has_its_own_gradient(build: Callable[[], nn.Module], where: str) -> None:
    torch.manual_seed(0)
    model = build()
    chosen = chosen_for(model)
    assert (chosen.isolation.by_loop, chosen.isolation.by_vmap) == ((where,), ())
    assert any("called once for each" in each.text for each in chosen.basis)
    assert f"modules {where!r} run record by record" in chosen.message
    assert "torch.func cannot vectorise it" in chosen.message
    batch = torch.randn(ROWS, POSITIONS, D), torch.randn(ROWS)
    assert mismatch(model, batch, chosen.isolation) < 1e-5


def test_what_hides_a_parameter_s_gradient_is_seen_untried() -> None:
    """Inside a custom function, and where gradients are off: by `vmap`, not by rules of torch's."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                size = self.weight.abs().mean()
            return F.linear(x, self.weight * size, self.bias)

    torch.manual_seed(0)
    for kind in (Served, Scaled):
        batch = torch.randn(ROWS, D), torch.randn(ROWS)
        assert mismatch(around(nn.Tanh(), kind(D, WIDTH)), batch, Isolation()) < 1e-5


def test_what_fixes_it_is_faster() -> None:
    torch.manual_seed(0)
    assert chosen_for(around(nn.Tanh(), Served(D, WIDTH))).isolation == Isolation()


def test_never_the_model_nor_a_large_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records alone take less memory."""
    torch.manual_seed(0)
    chosen = choose_isolation(Experts(), TensorDataset(torch.zeros(9, POSITIONS, WIDTH)))
    assert chosen.isolation.alone
    assert "or a module of its own" in chosen.message
    monkeypatch.setattr(isolation_fallback, "LARGE", 200)
    assert chosen_for(around(Experts())).isolation.alone
    assert chosen_for(around(Activation())).isolation.by_loop == ("2",)


def trained(model: nn.Module, loss: Any, x: Tensor, **options: Any) -> Any:
    plan = dpoptim.DPSGD(clip_norm=0.5).plan(
        n=len(x), batch_size=len(x), steps=1, noise_multiplier=0.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.warns(dpoptim.IsolationWarning):
        private = dpoptim.attach(plan, model, optimizer, TensorDataset(x), loss=loss, **options)
    with private:
        for batch in private.batches():
            private.backward(loss(model, batch))
            optimizer.step()
    return private


def test_random_numbers_are_each_record_s_own() -> None:
    class Noisy(Activation):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x + 0.1 * torch.randn_like(x)), 0.3)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0] + 0.1 * torch.rand_like(batch[0])).square().sum((1, 2))

    torch.manual_seed(0)
    private = trained(around(Noisy()), loss, torch.randn(ROWS, POSITIONS, D))
    assert private._chosen.isolation.by_loop == ("2",)


class Flagged(nn.PReLU):
    """Says beside its result whether the record is large."""

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return super().forward(x), bool((x > 100).any())


class Columns(Flagged):
    """Says so in a tensor that has no axis of records."""

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return nn.PReLU.forward(self, x), (x > 100).any(0)[:1]


class Reads(nn.Module):
    def __init__(self, flagged: nn.Module) -> None:
        super().__init__()
        self.flagged, self.last = flagged, nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        out, large = self.flagged(x)
        return self.last(out * (1e3 if large else 1e-3))


@pytest.mark.parametrize(
    ("kind", "way", "place"),
    [
        (Flagged, Isolation(by_loop=("flagged",)), -1),
        (Columns, Isolation(by_loop=("flagged",)), 0),
        (Columns, Isolation(by_vmap=("flagged",)), 0),
    ],
    ids=["plain value", "tensor", "vectorised"],
)
def test_what_is_said_of_one_record_is_nobody_else_s(
    kind: type[nn.Module], way: Isolation, place: int
) -> None:
    """One large record would make every other one's gradient a million times as large."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, D)
    others = x.clone()
    x[place] = 1e3
    model = Reads(kind())

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum()

    engine_sums(model, loss, others, ROWS, Clipping(1.0), "sum", way)
    with pytest.raises(PrivacyError, match="not the same for all"):
        engine_sums(model, loss, x, ROWS, Clipping(1.0), "sum", way)


def test_results_of_other_shapes_are_refused() -> None:
    class Picks(Activation):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[x > 0][None]

    model = nn.Sequential(Picks(), nn.Flatten(0), nn.Unflatten(0, (1, -1)))
    x, way = torch.randn(ROWS, D), Isolation(by_loop=("0",))
    with pytest.raises(PrivacyError, match="differ in shape"):
        engine_sums(model, lambda m, x: m(x).sum(), x, ROWS, Clipping(1.0), "sum", way)


def test_rules_by_name_serve_it_and_vmap_by_name_says_why_it_fails() -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.zeros(9, D))
    model = around(Activation())
    assert choose_isolation(model, data, "rules").isolation == chosen_for(model).isolation
    with pytest.raises(PrivacyError) as raised:
        choose_isolation(model, data, "vmap")
    said = str(raised.value)
    assert "records are mixed" not in said
    assert "setup_context and generate_vmap_rule" in said
    assert 'isolation="vmap"' not in said


def test_a_batch_without_anything_to_tell_runs_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not chosen_for(around(nn.Tanh())).message


class Writes(Activation):
    """Writes what it sees into a tensor that all records share."""

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        memory += x.detach().mean()
        return super().forward(x) * memory.clone()


class GivesRoom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.writes, self.last = Writes(), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.writes(x, torch.zeros(())))


def test_a_tensor_that_all_share_takes_nothing_from_one_record_to_the_next() -> None:
    torch.manual_seed(0)
    batch = torch.randn(ROWS, D), torch.randn(ROWS)
    assert mismatch(GivesRoom(), batch, Isolation(by_loop=("writes",))) < 1e-5
