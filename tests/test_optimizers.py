"""The list of optimizers: each trains, says what it is, and takes its own settings alone."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from dpoptim.optimizers import CHECKS, OPTIMIZERS, optimizer
from dpoptim.planning.ranking import REACH, adaptive_learning_rate

OTHER_VALUES: dict[str, Any] = {"momentum": 0.5, "betas": (0.5, 0.75)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_is_made_with_its_settings_and_moves_by_them(name: str) -> None:
    kind = OPTIMIZERS[name]
    given = {setting: OTHER_VALUES[setting] for setting in kind.defaults}
    plain, other = optimizer(name), optimizer(name, **given)
    assert dict(plain.settings) == dict(kind.defaults)
    ends = []
    for by in (plain, other):
        p = nn.Parameter(torch.tensor([1.0, 2.0]))
        made = by.make([p], 0.1)
        assert made.param_groups[0]["lr"] == 0.1
        assert all(made.param_groups[0][key] == value for key, value in by.settings.items())
        for gradient in ([1.0, -0.5], [0.1, 0.9], [-2.0, 0.3]):
            p.grad = torch.tensor(gradient)
            made.step()
        ends.append(p.detach())
    assert not torch.equal(*ends)
    assert str(plain) != str(other)
    assert str(plain).startswith(kind.words + ", ")


def test_in_words() -> None:
    assert str(optimizer("sgd")) == "SGD, momentum 0.9"
    assert str(optimizer("adam", betas=(0.8, 0.99))) == "Adam, betas 0.8 and 0.99"


def test_how_far_a_scaled_gradient_moves_is_as_stated() -> None:
    """By `adaptive` alone a default rate is chosen, so it must be true of each."""
    for name, kind in OPTIMIZERS.items():
        moves = []
        for scale in (1.0, 100.0):
            p = nn.Parameter(torch.zeros(3))
            made = optimizer(name).make([p], 0.1)
            p.grad = scale * torch.tensor([1.0, -2.0, 3.0])
            made.step()
            moves.append(float(p.detach().norm()))
        assert moves[1] / moves[0] == pytest.approx(1.0 if kind.adaptive else 100.0, rel=1e-3), name


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("adamw", {}, "optimizer must be one of 'sgd', 'adam', 'adam_bc', got 'adamw'"),
        ("sgd", {"betas": (0.9, 0.99)}, "use optimizer='adam' or 'adam_bc'"),
        ("adam", {"momentum": 0.9}, "leave out momentum, or use optimizer='sgd'"),
        ("sgd", {"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ("sgd", {"momentum": "much"}, "momentum must be a number"),
        ("adam", {"betas": 0.9}, r"betas must be two numbers such as \(0.9, 0.999\)"),
        ("adam_bc", {"betas": (0.9, -1)}, r"betas\[1\] must be in \[0, 1\)"),
    ],
)
def test_bad_settings_are_refused_by_name(name: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        optimizer(name, **settings)


@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), "fast", True])
def test_a_learning_rate_is_a_number_above_0(rate: Any) -> None:
    with pytest.raises(ValueError, match="learning_rate must be"):
        optimizer("adam").make([nn.Parameter(torch.zeros(1))], rate)


def test_every_setting_has_a_check_and_an_owner() -> None:
    assert {name for kind in OPTIMIZERS.values() for name in kind.defaults} == set(CHECKS)


def test_the_default_rate_lets_noise_move_all_weights_by_one_length() -> None:
    """Random signs, as gradients are that are mostly noise: T steps of d weights."""
    parameters, steps = 500, 200
    p = nn.Parameter(torch.zeros(parameters))
    made = optimizer("adam", betas=(0.0, 0.999)).make(
        [p], adaptive_learning_rate(parameters, steps)
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        p.grad = torch.randn(parameters, generator=generator)
        made.step()
    assert float(p.detach().norm()) == pytest.approx(REACH, rel=0.15)


def test_the_names_are_known_without_pytorch() -> None:
    check = "import sys, dpoptim.optimizers; print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "False"
