"""A loss that does not suit the way found for its model: another way is taken, and gives each
record its own gradient.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import Dataset, TensorDataset, default_collate

import dpoptim
from dpoptim.gradients.arithmetic.products import margin
from dpoptim.gradients.isolation import Isolation
from dpoptim.runtime.parametrizations import parametrizations_kept

N, TIME, WIDTH = 7, 3, 4
Loss = Callable[[nn.Module, Any], Tensor]
Collate = Callable[[list[Any]], Any]


class Records(Dataset[Any]):
    def __init__(self, records: Sequence[Any]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Any:
        return self.records[index]


def sequences() -> Records:
    generator = torch.Generator().manual_seed(1)
    return Records([torch.randn(TIME, WIDTH, generator=generator) for _ in range(N)])


def alone(model: nn.Module, loss: Loss, batches: Sequence[Any]) -> list[Tensor]:
    """Each record's gradient, as one vector."""
    parameters = list(model.parameters())
    found = [torch.autograd.grad(loss(model, b).sum(), parameters) for b in batches]
    return [torch.cat([g.flatten().double() for g in each]) for each in found]


def holds(
    model: nn.Module, records: Dataset[Any], loss: Loss, collate: Collate | None = None
) -> tuple[Isolation, str]:
    """Hold what a step without noise releases against records by themselves.

    Returns:
        the way that was taken, and what was said of it.
    """
    collated = collate or default_collate
    own = alone(model, loss, [collated([records[i]]) for i in range(N)])
    own = [g for g in own if bool(g.isfinite().all())]
    norms = torch.stack([g.norm() for g in own])
    bound = float(norms.median())
    plan = dpoptim.DPSGD(clip_norm=bound).plan(
        n=N, batch_size=N, steps=1, noise_multiplier=0.0, delta=1e-5
    )
    shrunk = bound * (1 - margin(next(model.parameters()).dtype, N, common_factor=False))
    expected = sum(g * min(1.0, shrunk / float(g.norm())) for g in own)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    released: list[Tensor] = []

    def note(*_: Any) -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if grads:  # else more microbatches are to come
            released.append(torch.cat([g.flatten().double() for g in grads]) * N)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", dpoptim.IsolationWarning)
        private = dpoptim.attach(plan, model, optimizer, records, loss=loss, collate_fn=collate)
    with private:
        optimizer.register_step_pre_hook(note)
        for batch in private.batches():
            private.backward(loss(model, batch))
            optimizer.step()
    torch.testing.assert_close(released, [expected], rtol=1e-5, atol=1e-6)
    return private._chosen.isolation, " ".join(str(each.message) for each in said)


def time_first(records: list[Any]) -> Tensor:
    return torch.stack(records, 1)


def of_second_axis(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).tanh().sum((0, 2))


@pytest.mark.parametrize(
    "layer", [nn.Linear(WIDTH, 2), nn.LayerNorm(WIDTH)], ids=lambda layer: type(layer).__name__
)
def test_records_on_the_second_axis_of_what_takes_either_go_by_rules(layer: nn.Module) -> None:
    """Only the loss and the collate function show which axis it is."""
    torch.manual_seed(0)
    model = nn.Sequential(layer, nn.Linear(layer(torch.ones(WIDTH)).numel(), 3))
    isolation, said = holds(model, sequences(), of_second_axis, time_first)
    assert (isolation.tier, isolation.batch_axis) == ("rules", 1)
    assert not said


def test_what_fails_under_hooks_alone_passes_alone() -> None:
    """An encoder that has records on its second axis, given them one by one, without an axis."""

    def one_by_one(model: nn.Module, batch: Tensor) -> Tensor:
        return torch.stack([model(x).square().mean() for x in batch])

    torch.manual_seed(0)
    for batch_first in (True, False):
        model = nn.TransformerEncoderLayer(
            WIDTH, 2, 8, 0.0, batch_first=batch_first, norm_first=True
        ).double()
        records = Records([x.double() for x in sequences().records])  # type: ignore[attr-defined]
        isolation, said = holds(model, records, one_by_one)
        assert isolation.alone
        assert "records pass alone" in said


def test_a_record_whose_gradient_is_not_finite_hides_no_way() -> None:
    def penalised(model: nn.Module, batch: Any) -> Tensor:
        x, bad = batch
        penalty = sum(p.square().sum() for p in model.parameters())
        return (model(x).square().mean((1, 2)) + penalty) * torch.where(bad > 0.5, math.nan, 1.0)

    x = sequences().records
    torch.manual_seed(0)
    for bad in ((), (3,)):
        records = Records([(each, torch.tensor(float(i in bad))) for i, each in enumerate(x)])
        assert holds(nn.Linear(WIDTH, 2), records, penalised)[0].alone


class Scored(nn.Module):
    """A layer that runs in two places, and an activation that is somebody's function."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(WIDTH, WIDTH)
        self.first, self.second = nn.Sequential(layer, nn.Tanh()), nn.Sequential(layer)
        self.activation = nn.Module()
        self.activation.forward = torch.sin

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.activation(self.first(x)))


def of_record(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().sum((1, 2))


def test_functions_in_the_places_of_layers_run_as_they_are() -> None:
    torch.manual_seed(0)
    isolation, said = holds(Scored(), sequences(), of_record)
    assert isolation.tier == "rules"
    assert not said


def test_an_exported_program_is_vectorised() -> None:
    """Its guards are a function in the place of a layer; it reads parameters outside of layers."""
    torch.manual_seed(0)
    rows = {0: torch.export.Dim("rows", min=1, max=64)}
    example = torch.randn(3, TIME, WIDTH)
    net = nn.Sequential(nn.Linear(WIDTH, 2))
    exported = torch.export.export(net, (example,), dynamic_shapes=(rows,))
    isolation, _ = holds(exported.module(), sequences(), of_record)
    assert isolation.tier == "vmap"


class Borrowed(nn.Module):
    """Convolves with its layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.kernel.weight.view(WIDTH, 1, WIDTH).transpose(1, 2)
        return torch.nn.functional.conv1d(x.transpose(1, 2), weight, self.kernel.bias).mT.tanh()


class Contracted(Borrowed):
    """Multiplies by its layer's weight in a way that no rule knows."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensordot(x, self.kernel.weight, ([2], [1])).tanh() + self.kernel.bias


@pytest.mark.parametrize("kind", [Borrowed, Contracted])
def test_what_reads_its_layers_weight_goes_by_itself_and_not_the_model_around_it(
    kind: type[nn.Module],
) -> None:
    """By the rule of a layer with such a weight, as the time-delay layers of Wav2Vec2; or it is
    vectorised.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), nn.Linear(WIDTH, 2))
    isolation, said = holds(model, sequences(), of_record)
    assert isolation.by_vmap == (("1",) if kind is Contracted else ())
    assert ("'1.kernel" in said) == (kind is Contracted)


class BackwardWithin(torch.autograd.Function):
    """Computes a layer again on the way back, and differentiates it there, as reversible ones."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor) -> Tensor:
        ctx.layer, ctx.x = layer, x
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            ctx.layer(x).backward(g)
        return None, x.grad


@pytest.mark.parametrize("choice", ["auto", "alone"])
def test_what_fails_with_records_alone_is_refused_before_anything_is_charged(choice: Any) -> None:
    outside = nn.Parameter(torch.ones(()))

    def of_another(model: nn.Module, batch: Tensor) -> Tensor:
        return of_record(model, batch) * outside

    def reversible(model: nn.Module, batch: Tensor) -> Tensor:
        hidden = BackwardWithin.apply(model[1], model[0](batch))
        return hidden.square().sum((1, 2))

    def of_two_layers(model: nn.Module, batch: Tensor) -> Tensor:
        hidden = model[0](batch)
        parts = (BackwardWithin.apply(model[1], x) for x in (hidden, 2 * hidden))
        return sum(parts).square().sum((1, 2))

    for loss, said in (
        (of_another, "outside of the model"),
        (reversible, "backward pass ran inside"),
        (of_two_layers, "reversible layers.* No isolation serves them"),
    ):
        model, ledger = nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, 2)), dpoptim.Ledger()
        plan = dpoptim.DPSGD(clip_norm=1.0).plan(
            n=N, batch_size=N, steps=1, noise_multiplier=1.0, delta=1e-5
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(dpoptim.PrivacyError, match=said):
            dpoptim.attach(
                plan, model, optimizer, sequences(), loss=loss, isolation=choice, ledger=ledger
            )
        assert ledger.spent(1e-5).epsilon == 0


def test_a_warning_that_is_made_an_error_leaves_the_model_as_it_was() -> None:
    class Custom(nn.Module):
        """Mixes nothing, and has no rule: the first layer's weight is used as it is."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.layer(row) for row in x])

    model, backward = Custom(), torch.autograd.backward
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=12, batch_size=4, steps=1, noise_multiplier=1.0, delta=1e-3
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(12, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error", dpoptim.IsolationWarning)
        with pytest.raises(dpoptim.IsolationWarning):
            dpoptim.attach(plan, model, optimizer, data)
    assert torch.autograd.backward is backward
    assert "forward" not in vars(model.layer)
    assert not optimizer._optimizer_step_pre_hooks


class Plus(nn.Module):
    def __init__(self, delta: Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.delta


class AddsToAWeight(nn.Module):
    """Adds a trained product to a frozen weight around each pass, as peft does to parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        added = Plus(self.up.weight @ self.down.weight)
        parametrize.register_parametrization(self.base, "weight", added)
        # which vmap forbids; as in peft, nothing takes the parametrization off again
        self.base.parametrizations.weight.original.requires_grad_(False)
        try:
            return self.base(x)
        finally:
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


def test_a_trial_that_raises_leaves_no_parametrization_behind() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(AddsToAWeight(), nn.Flatten(), nn.Linear(3 * TIME, 2))
    keys, classes = {*model.state_dict()}, [*map(type, model.modules())]
    trained = [p for p in model.parameters() if p.requires_grad]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().sum(1)

    plan = dpoptim.DPSGD(clip_norm=1e6).plan(
        n=N, batch_size=N, steps=1, noise_multiplier=0.0, delta=1e-5
    )
    records, optimizer = sequences(), torch.optim.SGD(trained, lr=0.0)
    own = torch.autograd.grad(loss(model, default_collate(records.records)).mean(), trained)
    with pytest.warns(dpoptim.IsolationWarning, match="record by record"):
        private = dpoptim.attach(plan, model, optimizer, records, loss=loss)
    assert {*model.state_dict()} == keys
    assert [*map(type, model.modules())] == classes
    with private:
        for batch in private.batches():
            private.backward(loss(model, batch))
            optimizer.step()
            for p, expected in zip(trained, own, strict=True):
                torch.testing.assert_close(p.grad, expected)


def test_parametrizations_of_the_models_own_stay_where_others_are_left_behind() -> None:
    layer = parametrize.register_parametrization(nn.Linear(2, 2), "weight", nn.Tanh())
    plain = nn.Linear(2, 2)
    model, expected = nn.Sequential(layer, plain), layer(torch.ones(1, 2))
    keys = [*model.state_dict()]
    with pytest.raises(ZeroDivisionError), parametrizations_kept(model):
        for each in model:
            parametrize.register_parametrization(each, "weight", nn.Sigmoid())
        raise ZeroDivisionError
    assert [*model.state_dict()] == keys
    assert type(plain) is nn.Linear
    torch.testing.assert_close(layer(torch.ones(1, 2)), expected)
