"""Weights that torch's older hooks compute: made inside of forward passes while attached."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

from dpoptim.clipping import Clipping
from dpoptim.errors import PrivacyError
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.layers.torch_func import vmap
from dpoptim.gradients.layers.vmapped import VmapLayer
from dpoptim.gradients.oracle import clipped_sums, gradients_alone
from dpoptim.gradients.per_sample import lazy
from dpoptim.gradients.per_sample.parts import parts_of
from dpoptim.training.trials.isolation import choose_isolation
from support import joint_norm

ROWS = 7

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(batch[0]).square().flatten(1).sum(1)


def network() -> nn.Module:
    """A layer of each kind, and one with a single scale."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.utils.weight_norm(nn.Conv1d(2, 4, 3)),
        nn.ReLU(),
        nn.utils.spectral_norm(nn.Conv1d(4, 4, 3)),
        nn.Flatten(),
        nn.utils.weight_norm(nn.Linear(8, 3), dim=None),
    ).double()


@pytest.mark.parametrize("tier", ["rules", "vmap", "alone"])
def test_their_parameters_train_and_buffers_follow_between_steps(tier: str) -> None:
    model, x = network(), torch.randn(ROWS, 2, 6, dtype=torch.float64)
    model(x)
    keys, hooks = [*model.state_dict()], [dict(m._forward_pre_hooks) for m in model]
    before = model[2].weight_u.clone()
    engine = Engine(
        model, Clipping(0.3), capacity=ROWS, reduction="sum", isolation=Isolation.of(tier)
    )
    engine.attach()
    moved = None
    for part in x.split(1 if tier == "alone" else ROWS - 1):
        engine.begin_microbatch(len(part))
        moved = model[2].weight_u.clone() if moved is None else moved
        loss(model, part[None]).sum().backward()
        # neither forward passes nor later microbatches write, whose number is private
        assert torch.equal(model[2].weight_u, moved)
    assert moved is not None
    assert not torch.equal(moved, before)
    engine.refuse_changes(everything=True)
    assert not engine.writes_attributes
    sums = [t.clone() for t in engine.split(engine.take())]
    engine.detach()
    assert [*model.state_dict()] == keys
    assert [dict(m._forward_pre_hooks) for m in model] == hooks
    assert all("forward" not in vars(module) for module in model.modules())
    model[2].eval()
    alone = gradients_alone(model, loss, [(each,) for each in x.split(1)])
    expected = clipped_sums(alone, Clipping(0.3), ROWS, "sum")
    off = joint_norm([a - b for a, b in zip(sums, expected, strict=True)])
    assert off < 1e-6 * joint_norm(expected)


class Tied(nn.Module):
    """Reads a weight outside of the layer that computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.weight_norm(nn.Linear(4, 4))
        with torch.no_grad():
            self.layer(torch.zeros(1, 4))  # from now on what is there has no graph

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.layer(x.to(self.layer.weight.dtype)), self.layer.weight)


def test_computed_weights_are_for_their_layers_alone() -> None:
    """One from before attaching would be taken for a constant."""
    model, x = Tied(), torch.randn(ROWS, 4)
    engine = Engine(model, Clipping(0.3), capacity=ROWS)
    engine.attach()
    engine.begin_microbatch(ROWS)
    with pytest.raises(PrivacyError, match=r"'layer.weight' was read .* Fix: .*parametrizations"):
        model(x)
    for read in (lambda: model.layer.weight.norm(), lambda: x @ model.layer.weight):
        with pytest.raises(PrivacyError, match="was read outside"):
            read()
    engine.detach()
    torch.testing.assert_close(model.layer.weight, weight_of(model.layer))
    assert model(x).shape == x.shape


def weight_of(layer: nn.Module) -> Tensor:
    return torch._weight_norm(layer.weight_v, layer.weight_g, 0)


def test_recurrent_layers_hold_no_weights_of_a_pass() -> None:
    """They list their weights beside the attributes that are set."""
    layer = nn.utils.weight_norm(nn.LSTM(3, 2, batch_first=True), "weight_hh_l0")
    engine = Engine(
        layer, Clipping(0.3), capacity=1, reduction="sum", isolation=Isolation.of("alone")
    )
    engine.attach()
    engine.begin_microbatch(1)
    layer(torch.randn(1, 4, 3))[0].sum().backward()
    engine.refuse_changes(everything=True)
    assert not engine.writes_attributes
    engine.detach()
    assert any(each is layer.weight_hh_l0 for each in layer._flat_weights)


def test_a_copy_of_an_attached_model_computes_its_own() -> None:
    model, x = network().eval(), torch.randn(ROWS, 2, 6, dtype=torch.float64)
    with torch.no_grad():
        model(x)
    engine = Engine(model, Clipping(0.3), capacity=ROWS)
    engine.attach()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight_g.mul_(2.0)
        assert torch.equal(model(x), model(x))
        assert not torch.equal(other(x), model(x))
    engine.detach()
    with torch.no_grad():
        model[0].weight_g.mul_(2.0)
        torch.testing.assert_close(other(x), model(x))


def test_hooks_come_back_in_their_order() -> None:
    seen = []
    layer = nn.Linear(3, 3)
    layer.register_forward_pre_hook(lambda m, args: seen.append("first"))
    nn.utils.weight_norm(layer)
    layer.register_forward_pre_hook(lambda m, args: seen.append("last"))
    before = [*layer._forward_pre_hooks.items()]
    engine = Engine(nn.Sequential(layer), Clipping(0.3), capacity=ROWS)
    engine.attach()
    assert len(layer._forward_pre_hooks) == len(before) - 1
    engine.detach()
    assert [*layer._forward_pre_hooks.items()] == before


def of_parametrisations() -> nn.Module:
    """Layers with weights computed from several parameters, and of several kinds."""
    torch.manual_seed(0)
    return nn.Sequential(
        parametrizations.weight_norm(nn.Conv1d(2, 4, 3)),
        parametrizations.spectral_norm(nn.Conv1d(4, 4, 3)).eval(),
        nn.Flatten(),
        parametrizations.weight_norm(nn.Linear(8, 6), dim=1),
        parametrizations.weight_norm(nn.LayerNorm(6), dim=None),
        parametrizations.weight_norm(parametrizations.orthogonal(nn.Linear(6, 6)), "bias"),
        Masked(6),
    ).double()


class Masked(nn.Module):
    """Makes its weight itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.register_buffer("mask", torch.ones(width, width).tril())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask, self.weight.mean(1))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("build", [network, of_parametrisations])
@pytest.mark.parametrize("keeps", [True, False])
def test_weights_are_made_once_for_all_records(
    build: Callable[[], nn.Module], keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the derivative of how they are made takes each record's own gradient to the parameters,
    of all records at once or, where memory does not allow that, of some at a time.
    """
    monkeypatch.setattr(VmapLayer, "__call__", None)  # nothing is vectorised
    monkeypatch.setattr(lazy, "may_keep", lambda most, entries: keeps)
    few = 1 if keeps else 300
    monkeypatch.setattr(lazy, "parts_of", lambda group, each, most: parts_of(group, each, few))
    model, x = build(), torch.randn(ROWS, 2, 6, dtype=torch.float64)
    x[3] *= 1e4
    model.eval()  # spectral norms stay as they are
    alone = gradients_alone(model, lambda m, b: loss(m, b).sum(), [(row[None],) for row in x])
    for bound in (0.3, 1e9):
        engine = Engine(model, Clipping(bound), capacity=ROWS, reduction="sum")
        engine.attach()
        engine.begin_microbatch(ROWS)
        loss(model, (x,)).sum().backward()
        found = [t.clone() for t in engine.split(engine.take())]
        engine.detach()
        expected = clipped_sums(alone, Clipping(bound), ROWS, "sum")
        distances = [a - b for a, b in zip(found, expected, strict=True)]
        assert joint_norm(distances) <= 1e-7 * min(bound, joint_norm(expected)) * ROWS


@pytest.mark.filterwarnings("error")
def test_nobody_is_warned_of_what_is_vectorised_one_after_the_other() -> None:
    rows = torch.arange(6.0).view(2, 3)
    found = vmap(lambda x: torch.histc(x, 2, 0, 6))(rows)
    assert torch.equal(found, torch.tensor([[3.0, 0.0], [0.0, 3.0]]))
    with pytest.warns(UserWarning, match="performance drop"):  # the caller's own, as ever
        torch.func.vmap(lambda x: torch.histc(x, 2, 0, 6))(rows)


class Noisy(nn.Module):
    """Its weights are drawn in each pass, in a shape that a parameter tells."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = (nn.Parameter(torch.rand(3, 2)) for _ in range(2))
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.mean + self.spread * torch.randn_like(self.mean)
        return self.head(F.linear(x, weight))


def test_weights_of_random_numbers_are_not_made_again() -> None:
    """By other numbers the gradient of the spread would be off by more than it is long."""
    engine = Engine(Noisy(), Clipping(1.0), capacity=ROWS)
    engine.attach()
    engine.begin_microbatch(ROWS)
    with pytest.raises(PrivacyError, match="draws random numbers to make its weights"):
        loss(engine.model, (torch.randn(ROWS, 2),)).mean().backward()
    engine.detach()
    data = TensorDataset(torch.randn(ROWS, 2))
    assert choose_isolation(Noisy(), data).isolation.enforced
