"""A layer rule from outside takes one function; its contract takes one call."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpoptim
from dpoptim.audit import check_layer_rule
from dpoptim.gradients.backward_pass import BackwardRecorder
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.layers.custom_rules import REGISTERED, RegisteredLayer
from dpoptim.gradients.layers.registry import RULES, runner_for
from dpoptim.training.trials.isolation import choose_isolation
from support import image_model

BILINEAR = """
@dpoptim.register_layer_rule(nn.Bilinear)
def bilinear(layer, inputs, g):
    x, y = inputs  # (B, d1), (B, d2); g: (B, p)
    return {"weight": torch.einsum("bp,bi,bj->bpij", g, x, y), "bias": g}
"""


@pytest.fixture(autouse=True)
def _nothing_stays_registered() -> Iterator[None]:
    before = dict(REGISTERED)
    yield
    REGISTERED.clear()
    REGISTERED.update(before)


def register(rule: Any, kind: type[nn.Module] = nn.Bilinear) -> None:
    dpoptim.register_layer_rule(kind)(rule)


def bilinear_inputs(rows: int = 5) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, 3), torch.randn(rows, 4)


def test_the_documented_rule_is_short_and_keeps_its_contract() -> None:
    assert len(BILINEAR.strip().splitlines()) <= 25
    assert BILINEAR.strip() in (dpoptim.register_layer_rule.__doc__ or "").replace(
        "\n        ", "\n"
    )
    exec(BILINEAR, {"dpoptim": dpoptim, "nn": nn, "torch": torch})
    for layer in (nn.Bilinear(3, 4, 2), nn.Bilinear(3, 4, 2, bias=False)):
        found = check_layer_rule(layer, *bilinear_inputs())
        assert found.verdict == "consistent"
        assert found.trials > 10


def test_the_rule_is_what_runs() -> None:
    seen = []

    def rule(layer: nn.Bilinear, inputs: tuple[Tensor, ...], g: Tensor) -> dict[str, Tensor]:
        seen.append(len(inputs))
        return {"weight": torch.einsum("bp,bi,bj->bpij", g, *inputs), "bias": g}

    register(rule)
    assert isinstance(
        runner_for(BackwardRecorder(), nn.Bilinear(3, 4, 2), "", Isolation()),
        RegisteredLayer,
    )
    check_layer_rule(nn.Bilinear(3, 4, 2), *bilinear_inputs())
    assert set(seen) == {2}


class Inner(nn.Bilinear):
    """Keeps the forward pass, and so the rule."""


class Other(nn.Bilinear):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return super().forward(a, b) * 2


def test_subclasses_share_a_rule_with_the_forward_pass() -> None:
    exec(BILINEAR, {"dpoptim": dpoptim, "nn": nn, "torch": torch})
    assert check_layer_rule(Inner(3, 4, 2), *bilinear_inputs()).verdict == "consistent"
    with pytest.raises(ValueError, match="Other has no rule"):
        check_layer_rule(Other(3, 4, 2), *bilinear_inputs())


WRONG = {
    "twice too long": lambda layer, inputs, g: {
        "weight": 2 * torch.einsum("bp,bi,bj->bpij", g, *inputs),
        "bias": g,
    },
    "half the bias": lambda layer, inputs, g: {
        "weight": torch.einsum("bp,bi,bj->bpij", g, *inputs),
        "bias": g / 2,
    },
    "of the batch": lambda layer, inputs, g: {
        "weight": torch.einsum("bp,bi,bj->bpij", g, *inputs)
        .mean(0, keepdim=True)
        .expand(len(g), -1, -1, -1),
        "bias": g,
    },
    "shifted by one record": lambda layer, inputs, g: {
        "weight": torch.einsum("bp,bi,bj->bpij", g, *inputs).roll(1, 0),
        "bias": g,
    },
}


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_rules_are_found(mistake: str) -> None:
    register(WRONG[mistake])
    with pytest.raises(
        dpoptim.PrivacyError, match="other gradients than those of the records taken one at a time"
    ):
        check_layer_rule(nn.Bilinear(3, 4, 2), *bilinear_inputs())


def test_incomplete_rules_name_what_is_missing() -> None:
    register(lambda layer, inputs, g: {"bias": g})
    with pytest.raises(dpoptim.PrivacyError, match="gradients of 'weight', .*Got nothing"):
        check_layer_rule(nn.Bilinear(3, 4, 2), *bilinear_inputs())
    REGISTERED.clear()
    register(lambda layer, inputs, g: {"weight": g, "bias": g})
    with pytest.raises(dpoptim.PrivacyError, match="Got another one"):
        check_layer_rule(nn.Bilinear(3, 4, 2), *bilinear_inputs())


def test_what_cannot_be_registered() -> None:
    with pytest.raises(TypeError, match="kind must be a class of layers"):
        dpoptim.register_layer_rule(nn.Bilinear(3, 4, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="three arguments"):
        register(lambda layer: {})
    register(lambda layer, inputs, g: {})
    with pytest.raises(ValueError, match="Bilinear has a rule already"):
        register(lambda layer, inputs, g: {})
    with pytest.raises(ValueError, match="at least 3 records"):
        check_layer_rule(nn.Linear(3, 2), torch.randn(2, 3))


def test_a_registered_layer_in_a_model_needs_no_vmap() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 4)
            self.pair = nn.Bilinear(3, 4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.pair(self.left(x), input2=torch.tanh(self.right(x)))

    exec(BILINEAR, {"dpoptim": dpoptim, "nn": nn, "torch": torch})
    data = torch.utils.data.TensorDataset(torch.randn(8, 6), torch.zeros(8))
    model = Pair()
    model.pair.bias.requires_grad_(False)
    chosen = choose_isolation(model, data)
    assert not chosen.isolation.by_vmap
    assert "it did on random inputs" in chosen.basis[0].text


BUILT_IN: dict[type[nn.Module], tuple[nn.Module, tuple[int, ...]]] = {
    nn.Linear: (nn.Linear(5, 3), (4, 5)),
    nn.Conv1d: (nn.Conv1d(3, 4, 3), (3, 7)),
    nn.Conv2d: (nn.Conv2d(3, 4, 3), (3, 5, 6)),
    nn.Conv3d: (nn.Conv3d(2, 3, 2), (2, 3, 4, 3)),
    nn.LayerNorm: (nn.LayerNorm(6), (4, 6)),
    nn.RMSNorm: (nn.RMSNorm(6), (4, 6)),
    nn.GroupNorm: (nn.GroupNorm(2, 6), (6, 4)),
    nn.InstanceNorm1d: (nn.InstanceNorm1d(3, affine=True), (3, 7)),
    nn.InstanceNorm2d: (nn.InstanceNorm2d(3, affine=True), (3, 4, 5)),
    nn.InstanceNorm3d: (nn.InstanceNorm3d(3, affine=True), (3, 4, 2, 3)),
    nn.Embedding: (nn.Embedding(9, 4), ()),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.__name__)
def test_every_rule_of_the_package_keeps_the_contract(kind: type[nn.Module]) -> None:
    layer, shape = BUILT_IN[kind]
    torch.manual_seed(0)
    x = torch.randint(0, 9, (5, 4)) if kind is nn.Embedding else torch.randn(5, *shape)
    assert check_layer_rule(layer, x).verdict == "consistent"


def test_the_tested_layer_stays_as_it_is() -> None:
    layer = image_model(nn.Conv2d(3, 4, 3), 4)[0]  # type: ignore[index]
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    check_layer_rule(layer, torch.randn(4, 3, 5, 5))
    assert all(torch.equal(before[key], value) for key, value in layer.state_dict().items())
    assert layer.weight.dtype == torch.float32
