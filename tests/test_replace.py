"""replace_batchnorm: group normalisation in the same places, with the same parameters."""

import pytest
import torch
from torch import Tensor, nn

import dpoptim
from dpoptim.errors import PrivacyError
from support import mean_cross_entropy


def images() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3),
        nn.BatchNorm2d(12, eps=1e-3),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(12, 7, 3), nn.BatchNorm2d(7, affine=False)),
        nn.Flatten(),
        nn.LazyLinear(8),
        nn.BatchNorm1d(8),
        nn.Linear(8, 3),
    )
    model(torch.randn(2, 3, 8, 8))
    nn.init.uniform_(model[1].weight)
    return model.eval()


def test_places_parameters_and_modes_are_kept() -> None:
    model = images()
    weight, bias = model[1].weight, model[1].bias
    done = dpoptim.replace_batchnorm(model)
    with pytest.raises(AttributeError, match=r"not the model\. Fix: .*\.model"):
        done.parameters()
    assert done.model is model
    assert list(done.layers) == ["1", "3.1", "6"]
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    assert model[1].weight is weight
    assert model[1].bias is bias
    assert (model[1].num_groups, model[1].eps) == (6, 1e-3)
    # seven channels cannot be divided
    assert (model[3][1].num_groups, model[3][1].weight) == (1, None)
    assert model[6].num_groups == 4
    assert not model[1].training
    assert str(done).splitlines()[1] == "1: now GroupNorm(6 groups of 2 channels)"


def test_the_model_can_then_be_trained_privately() -> None:
    model = dpoptim.replace_batchnorm(images()).model.train()
    batch = torch.randn(6, 3, 8, 8), torch.randint(0, 3, (6,))
    assert dpoptim.check(model, mean_cross_entropy, batch).loss_reduction == "mean"


def test_single_values_are_not_normalised_to_zero() -> None:
    layer = dpoptim.replace_batchnorm(nn.BatchNorm1d(8)).model
    assert isinstance(layer, nn.GroupNorm)
    assert float(layer(torch.randn(4, 8)).detach().abs().min()) > 0


def test_a_shared_layer_stays_shared() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(norm, nn.Linear(4, 4), norm)
    assert list(dpoptim.replace_batchnorm(model).layers) == ["0", "2"]
    assert model[0] is model[2]


def test_nothing_to_replace() -> None:
    assert "nothing was replaced" in str(dpoptim.replace_batchnorm(nn.Linear(3, 3)))


def test_group_sizes_can_be_chosen() -> None:
    assert dpoptim.replace_batchnorm(nn.BatchNorm2d(64), max_groups=8).model.num_groups == 8
    for wrong in (0, True, 2.5):
        with pytest.raises(ValueError, match="max_groups"):
            dpoptim.replace_batchnorm(nn.BatchNorm2d(64), max_groups=wrong)


class NormThenAct(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class NormAndLayers(nn.BatchNorm2d):
    """As timm's ``BatchNormAct2d``: the layers that follow are inside."""

    def __init__(self, channels: int, *, first: bool = False) -> None:
        super().__init__(channels)
        self.drop, self.act, self.first = nn.Identity(), nn.ReLU(inplace=True), first

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            return super().forward(self.act(self.drop(x)))
        return self.act(self.drop(super().forward(x)))


class WithAGain(NormAndLayers):
    """A parameter of its own, which does nothing at first; or a training of its own."""

    def __init__(self, channels: int, *, in_training: bool = False) -> None:
        super().__init__(channels)
        if not in_training:
            self.gain = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "gain"):
            return super().forward(x) * self.gain
        return super().forward(x) * (2 if self.training else 1)


def test_layers_that_a_batch_norm_goes_on_through_are_kept() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), NormAndLayers(8), nn.Conv2d(8, 2, 3))
    weight, act = model[1].weight, model[1].act
    nn.init.uniform_(weight)
    done = dpoptim.replace_batchnorm(model)
    assert list(done.layers) == ["1.norm"]
    assert done.layers["1.norm"].weight is weight
    assert model[1].act is act
    x = torch.randn(2, 3, 9, 9)
    expected = nn.functional.group_norm(model[0](x), 4, weight, model[1].norm.bias).relu()
    assert torch.equal(model[1](model[0](x)), expected)
    alone = dpoptim.replace_batchnorm(NormAndLayers(8))
    assert list(alone.layers) == ["norm"]
    assert isinstance(alone.model[2], nn.ReLU)


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (NormThenAct(4), "replace it by hand.*what else"),
        (NormAndLayers(4, first=True), "replace it by hand.*what else"),
        (WithAGain(4), "replace it by hand.*what else"),
        (WithAGain(4, in_training=True), "replace it by hand.*what else"),
        (nn.LazyBatchNorm1d(), "run the model once"),
    ],
)
def test_other_kinds_are_refused_and_nothing_changes(layer: nn.Module, named: str) -> None:
    model = nn.Sequential(nn.BatchNorm2d(4), layer)
    with pytest.raises(PrivacyError, match=f"'1' .*{named}"):
        dpoptim.replace_batchnorm(model)
    assert isinstance(model[0], nn.BatchNorm2d)


def test_a_single_channel_is_named_with_what_to_put_there() -> None:
    done = dpoptim.replace_batchnorm(nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1)))
    assert "makes zero of a record's only value: put nn.Identity there" in str(done)
    done = dpoptim.replace_batchnorm(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    assert "zero" not in str(done)
