"""Clipping by layers and by groups of layers: each by itself, and all together never above C."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.audit import audit_sensitivity
from dpoptim.clipping import Clipping, Groups, SplitClipping, Style
from dpoptim.gradients.engine import Engine

LAST, REST = 3.0, 4.0
GROUPS = (("3", LAST), ("", REST))  # the last layer; and the first two together


def sums_of(
    model: nn.Module, x: Tensor, y: Tensor, norm: float, style: Style | Groups = "per-layer"
) -> list[Tensor]:
    engine = Engine(model, Clipping(norm, style), capacity=max(1, len(x)))
    engine.attach()
    engine.begin_microbatch(len(x))
    F.cross_entropy(model(x), y).backward()
    engine.detach()
    return [total.clone() for total in engine.split(engine.take())]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).double()


@settings(max_examples=15)
@given(
    size=st.sampled_from([0.0, 1.0, 100.0, 1e8]),
    norm=st.sampled_from([0.1, 1.0, 50.0]),
    seed=st.integers(0, 100),
)
def test_each_layer_is_clipped_by_itself(size: float, norm: float, seed: int) -> None:
    model = net()
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 4, generator=generator, dtype=torch.float64) * size
    y = torch.randint(0, 3, (1,), generator=generator)
    F.cross_entropy(model(x), y).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    third = 1 / math.sqrt(3)  # of the bound; weight and bias of each of the three layers
    kinds: dict[Style | Groups, dict[tuple[int, ...], float]] = {
        "per-layer": {(0, 1): third, (2, 3): third, (4, 5): third},
        GROUPS: {(0, 1, 2, 3): REST / 5, (4, 5): LAST / 5},
    }
    for style, parts in kinds.items():
        sums = sums_of(model, x, y, norm, style)
        for part, share in parts.items():
            gradient = torch.cat([gradients[i].flatten() for i in part])
            factor = min(1.0, norm * share / max(float(gradient.norm()), 1e-30))
            clipped = torch.cat([sums[i].flatten() for i in part])
            torch.testing.assert_close(clipped, gradient * factor, rtol=1e-4, atol=1e-12)
        assert float(torch.cat([total.flatten() for total in sums]).norm()) <= norm


def test_a_record_counts_in_all_layers_or_in_none() -> None:
    model = net()
    x, y = torch.ones(3, 4, dtype=torch.float64), torch.tensor([0, 1, 2])
    spoilt = x.clone()
    spoilt[1] = math.nan
    without = sums_of(model, x[[0, 2]], y[[0, 2]], 1.0)
    for total, expected in zip(sums_of(model, spoilt, y, 1.0), without, strict=True):
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-9)


def moved(dtype: torch.dtype, style: Style | Groups) -> str:
    """Whether the audit of the sensitivity finds a record that moves the sums too far."""
    model = net().to(dtype)

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return model(batch[0]).square().sum() * 100

    records = (torch.randn(9, 4, dtype=dtype),)
    return audit_sensitivity(model, records, loss, Clipping(0.5, style)).verdict


@pytest.mark.set_aside("layers, float64")
@pytest.mark.parametrize(
    ("dtype", "style"),
    [(torch.float32, "per-layer"), (torch.float64, "per-layer"), (torch.float32, GROUPS)],
    ids=["layers, float32", "layers, float64", "groups"],
)
def test_one_record_moves_all_layers_together_by_at_most_c(
    dtype: torch.dtype, style: Style | Groups
) -> None:
    assert moved(dtype, style) == "consistent"


def test_groups_whose_bounds_do_not_make_up_c_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded bug: proportions of the largest, in place of their norm."""
    monkeypatch.setattr(math, "hypot", max)
    assert moved(torch.float64, GROUPS) == "refuted"


@pytest.mark.parametrize("clipping", ["per-layer", {"2": 1, "": 2}], ids=["layers", "groups"])
def test_it_trains_through_attach(clipping: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(600, 4)
    y = (x[:, 0] > 0).long()
    method = dpoptim.DPSGD(1.0, clipping=clipping)
    plan = method.plan(n=600, batch_size=200, epochs=15, epsilon=4, delta=1e-5)
    assert dpoptim.Plan.from_json(plan.to_json()) == plan
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with dpoptim.attach(plan, model, optimizer, TensorDataset(x, y), noise_seed=0) as private:
        for a, b in private.batches():
            F.cross_entropy(model(a), b).backward()
            optimizer.step()
    assert float((model(x).argmax(1) == y).double().mean()) > 0.85


def test_error_feedback_has_layers_too() -> None:
    (rule, *_) = SplitClipping(1.0, 2.0, "per-layer").units("abcd").rules.values()
    assert rule.norm == pytest.approx(0.5)
    assert rule.residual_clip == pytest.approx(1.0)
    assert rule.style == "flat"
    assert 4 * rule.norm**2 < 1
    with pytest.raises(
        ValueError, match="clipping must be one of 'flat', 'automatic', 'per-layer'"
    ):
        Clipping(1.0, "by layer")  # type: ignore[arg-type]


def test_groups_hold_every_layer_and_each_group_one() -> None:
    layers = ("encoder.0", "encoder.0", "encoder.1", "encoders", "head")
    rule = Clipping(1.0, (("encoder", 1.0), ("encoder.1", 2.0), ("", 2.0)))
    units = rule.units(layers)
    assert list(units.of) == ["encoder", "encoder", "encoder.1", "", ""]
    assert [each.norm for each in units.rules.values()] == pytest.approx([1 / 3, 2 / 3, 2 / 3])
    for groups, message in {
        (("encoder", 1.0),): "no group for the layer 'encoders'",
        (("", 1.0), ("decoder", 1.0)): "clipping names 'decoder'",
    }.items():
        with pytest.raises(ValueError, match=message):
            Clipping(1.0, groups).units(layers)
    with pytest.raises(ValueError, match="clipping must be a finite number above 0"):
        dpoptim.DPSGD(1.0, clipping={"": 0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="clipping must be one of"):
        SplitClipping(1.0, 2.0, GROUPS)  # type: ignore[arg-type]
