"""Normalisations that go by the statistics they hold: served in evaluation mode, refused else."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim import DPSGD, PrivacyError
from dpoptim.audit import check_layer_rule
from dpoptim.clipping import Clipping
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.layers.registry import rule_for
from dpoptim.training.trials.isolation import choose_isolation

ROWS = 5
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "of vectors": (lambda: nn.BatchNorm1d(3), (3,)),
    "of sequences": (lambda: nn.BatchNorm1d(3), (3, 7)),
    "of images": (lambda: nn.BatchNorm2d(3), (3, 4, 5)),
    "of volumes": (lambda: nn.BatchNorm3d(3), (3, 2, 4, 3)),
    "of processes": (lambda: nn.SyncBatchNorm(3), (3, 4)),
    "of instances": (
        lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
        (3, 4, 5),
    ),
}


def with_statistics(layer: nn.Module) -> nn.Module:
    """In evaluation mode, with numbers of which no two channels have the same."""
    torch.manual_seed(0)
    for name, tensor in layer.state_dict().items():
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5, 2.0)
        assert name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    return layer.eval()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", LAYERS)
def test_each_record_gets_its_own_gradient_by_a_rule(kind: str) -> None:
    build, shape = LAYERS[kind]
    layer = with_statistics(build())
    assert rule_for(layer) is not None
    assert check_layer_rule(layer, torch.randn(ROWS, *shape)).verdict == "consistent"
    only_bias = copy.deepcopy(layer)
    only_bias.weight.requires_grad_(False)
    assert check_layer_rule(only_bias, torch.randn(ROWS, *shape)).verdict == "consistent"


def test_a_recipe_of_fine_tuning_goes_by_rules() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
            self.last = nn.Linear(4, 2)

        def train(self, mode: bool = True) -> "Net":
            super().train(mode)
            self.norm.eval()
            return self

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(F.relu(self.norm(self.conv(x))).mean((2, 3)))

    data = TensorDataset(torch.randn(6, 3, 5, 5), torch.zeros(6, dtype=torch.long))
    model = Net().train()
    chosen = choose_isolation(model, data)
    assert chosen.isolation.tier == "rules"
    assert not chosen.isolation.by_vmap
    assert not chosen.message
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = DPSGD(clip_norm=1.0).plan(n=6, batch_size=6, steps=2, noise_multiplier=1.0, delta=1e-5)
    statistics = model.norm.running_mean.clone()
    with dpoptim.attach(plan, model, optimizer, data) as private:
        for x, y in private.batches():
            model.train()
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
    assert torch.equal(statistics, model.norm.running_mean)


@pytest.mark.parametrize("frozen", [True, False])
def test_batch_statistics_that_are_switched_on_are_refused_at_the_next_pass(frozen: bool) -> None:
    norm = nn.BatchNorm1d(4).requires_grad_(not frozen).eval()
    model = nn.Sequential(nn.Linear(5, 4), norm, nn.Linear(4, 2))
    engine = Engine(model, Clipping(1.0), capacity=ROWS)
    engine.attach()
    engine.begin_microbatch(ROWS)
    model(torch.randn(ROWS, 5)).mean().backward()
    engine.take()
    copied = copy.deepcopy(model).train()
    copied(torch.randn(ROWS, 5))  # a copy is nobody's concern
    x = torch.randn(ROWS, 4)
    model.train()
    before = norm.running_mean.clone()
    for call in (lambda: model(torch.randn(ROWS, 5)), lambda: norm(x), lambda: model[1:](x)):
        with pytest.raises(PrivacyError, match=r"'1' .BatchNorm1d.*eval\(\) for this layer after"):
            call()
    norm.eval()
    norm.running_mean = None  # by the batch in either mode
    with pytest.raises(PrivacyError, match="'1' .BatchNorm1d"):
        model(torch.randn(ROWS, 5))
    norm.running_mean = before
    engine.begin_microbatch(ROWS)
    model(torch.randn(ROWS, 5)).mean().backward()
    assert engine.take() is not None
