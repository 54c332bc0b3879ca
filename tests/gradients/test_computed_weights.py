"""Weights that torch's older hooks compute: made inside of forward passes while attached."""

import copy

import pytest
import torch
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.oracle import clipped_sums, gradients_alone
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
def test_their_parameters_train_and_buffers_follow_between_batches(tier: str) -> None:
    model, x = network(), torch.randn(ROWS, 2, 6, dtype=torch.float64)
    model(x)
    keys, hooks = [*model.state_dict()], [dict(m._forward_pre_hooks) for m in model]
    before = model[2].weight_u.clone()
    engine = Engine(
        model, Clipping(0.3), capacity=ROWS, reduction="sum", isolation=Isolation.of(tier)
    )
    engine.attach()
    size = 1 if tier == "alone" else ROWS
    for part in x.split(size):
        engine.begin_microbatch(size)
        u = model[2].weight_u.clone()
        assert not torch.equal(u, before)
        loss(model, (part,)).sum().backward()
        assert torch.equal(model[2].weight_u, u)  # the forward pass writes nothing
    engine.refuse_changes(everything=True)
    assert not engine.writes_attributes
    sums = [t.clone() for t in engine.split(engine.take())]
    engine.detach()
    assert [*model.state_dict()] == keys
    assert [dict(m._forward_pre_hooks) for m in model] == hooks
    assert all("forward" not in vars(module) for module in model.modules())
    if tier != "alone":
        model[2].eval()
        alone = gradients_alone(model, loss, [(each,) for each in x.split(1)])
        expected = clipped_sums(alone, Clipping(0.3), ROWS, "sum")
        off = joint_norm([a - b for a, b in zip(sums, expected, strict=True)])
        assert off < 1e-6 * joint_norm(expected)


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
