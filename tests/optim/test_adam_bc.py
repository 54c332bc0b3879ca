"""AdamBC: Adam where there is no noise, and unbiased by it where there is; it is told the noise
that there is.
"""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.noise.correlated import (
    BandedToeplitz,
    BinaryTree,
    BufferedToeplitz,
    Strategy,
    ToeplitzSquareRoot,
)
from dpoptim.noise.stream import KeyStream
from dpoptim.optim import AdamBC


def moved(optimizer_of: Any, gradients: list[Tensor]) -> Tensor:
    p = nn.Parameter(torch.zeros_like(gradients[0]))
    optimizer = optimizer_of([p])
    for gradient in gradients:
        p.grad = gradient.clone()
        optimizer.step()
    return p.detach()


def test_without_noise_it_is_adam() -> None:
    gradients = [
        torch.randn(50, generator=torch.Generator().manual_seed(i)).double() for i in range(20)
    ]
    ours = moved(lambda ps: AdamBC(ps, lr=0.1, weight_decay=0.01), gradients)
    adam = moved(lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.01), gradients)
    assert torch.allclose(ours, adam, rtol=1e-9, atol=1e-12)


def test_the_noise_is_taken_off_the_second_moment() -> None:
    """Coordinates whose gradients are 1 and 5 under noise of 4: Adam moves them unlike, debiased
    steps are alike.
    """
    generator = torch.Generator().manual_seed(0)
    signal = torch.tensor([1.0, 5.0]).double()[:, None].expand(2, 1000)
    gradients = [
        signal + 4 * torch.randn(2, 1000, generator=generator).double() for _ in range(1200)
    ]
    settings = {"lr": 1.0, "betas": (0.99, 0.9999)}
    debiased = (
        moved(lambda ps: AdamBC(ps, noise_std=4.0, floor=0.01, **settings), gradients)
        .median(1)
        .values
    )
    plain = moved(lambda ps: torch.optim.Adam(ps, **settings), gradients).median(1).values
    assert float(plain[1] / plain[0]) > 2.5
    assert float(debiased[1] / debiased[0]) < 1.9


def test_a_tensor_moves_as_far_as_by_adam() -> None:
    """Of noise alone, of signal alone, and of gradients that are zero: what one learning rate means
    is Adam's. Without that, noise alone would go up to three times as far.
    """
    generator = torch.Generator().manual_seed(2)
    noise = [torch.randn(30, 40, generator=generator).double() for _ in range(25)]
    for shift in (0.0, 3.0):
        gradients = [each + shift for each in noise]
        for last in (1, 5, 24):
            adam, ours = (
                moved(make, gradients[: last + 1]) - moved(make, gradients[:last])
                for make in (
                    lambda ps: torch.optim.Adam(ps, lr=0.1),
                    lambda ps: AdamBC(ps, lr=0.1, noise_std=1.0),
                )
            )
            assert float(ours.norm()) == pytest.approx(float(adam.norm()), rel=1e-6)
            assert (ours - adam).abs().max() > 1e-4
    assert not moved(lambda ps: AdamBC(ps, noise_std=1.0), [torch.zeros(3, 4)] * 2).any()


def excess(make: Any, rate: float, *, span: float, steps: int, noise_std: float) -> float:
    """Minimise quadratics with curvatures of 1 / span to 1 under noise, from a distance of 1."""
    curvatures = torch.logspace(-math.log10(span), 0, 20).double()
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.zeros(40, 20).double())
    optimizer = make([p], rate)
    for _ in range(steps):
        noise = noise_std * torch.randn(p.shape, generator=generator).double()
        p.grad = curvatures * (p.detach() - 1) + noise
        optimizer.step()
    return float((curvatures * (p.detach() - 1).square()).sum(1).mean())


@pytest.mark.parametrize(
    ("span", "steps", "noise_std", "gain"),
    [
        (1, 22, 0.3, -0.02),
        (1, 60, 1.0, -0.02),
        (10, 22, 0.3, -0.03),
        (10, 200, 0.1, 0.1),
        (100, 22, 0.3, -0.03),
        (100, 200, 0.03, 0.1),
        (100, 200, 0.1, 0.05),
    ],
)
@pytest.mark.figures
def test_it_is_never_behind_adam_and_ahead_where_curvatures_differ(
    span: float, steps: int, noise_std: float, gain: float
) -> None:
    """Each at the best of some rates. By one standard error it is up to 15 % behind."""
    settings = {"span": span, "steps": steps, "noise_std": noise_std}
    rates = [0.6 / steps * 1.3**power for power in range(-4, 8)]
    ours, adam = (
        min(excess(make, rate, **settings) for rate in rates)
        for make in (lambda ps, rate: AdamBC(ps, rate, noise_std=noise_std), torch.optim.Adam)
    )
    assert ours < (1 - gain) * adam


def test_noise_that_changes_is_averaged_as_the_moment_is() -> None:
    p = nn.Parameter(torch.zeros(200_000).double())
    optimizer = AdamBC([p], betas=(0.0, 0.9))
    generator = torch.Generator().manual_seed(1)
    for step in range(30):
        std = 1.0 + step % 3
        p.grad = std * torch.randn(p.shape, generator=generator).double()
        optimizer.param_groups[0]["noise_std"] = std
        optimizer.step()
    state = optimizer.state[p]
    assert float(state["second"].mean()) == pytest.approx(state["variance"], rel=0.01)


@pytest.mark.parametrize(
    "strategy",
    [BandedToeplitz(3), BufferedToeplitz(2), BufferedToeplitz(2, True, 3), ToeplitzSquareRoot()],
    ids=str,
)
def test_increments_are_as_noisy_as_stated(strategy: Strategy) -> None:
    steps, size = 8, 60_000
    state = strategy.start(steps, [size], KeyStream.from_seed(3, "test"))
    for step in range(steps):
        buffer = torch.zeros(size, dtype=torch.float64)
        state.add([buffer], 1.0)
        assert float(buffer.std()) == pytest.approx(
            strategy.increment_std(steps)[step], rel=5 / math.sqrt(2 * size)
        )
    assert math.isnan(BinaryTree().increment_std(steps)[3])


METHODS = {
    "dp-sgd": dpoptim.DPSGD(0.3),
    "dp-ftrl": dpoptim.DPFTRL(0.3),
    "sampled by turns": dpoptim.DPFTRL(0.3, sampling="cyclic-poisson", bands=2),
    "turns by coins": dpoptim.DPFTRL(0.3, sampling="b-min-sep", bands=2),
    "bins": dpoptim.DPFTRL(0.3, sampling="balls-in-bins", bands=2),
    "toeplitz": dpoptim.DPFTRL(0.3, noise="toeplitz"),
    "fitted to a decay": dpoptim.DPFTRL(0.3, momentum=0.9, decay="cosine"),
    "dice-sgd": dpoptim.DiceSGD(0.3),
    "dice-sgd, automatic": dpoptim.DiceSGD(0.3, clipping="automatic"),
    "value-sgd": dpoptim.ValueClippedSGD(0.3),
    "noise as planned": dpoptim.DPSGD(0.3, noise_schedule=(2, 1, 0.5, 4)),
    "batches as planned": dpoptim.DPSGD(0.3, batch_schedule=((1, 2), (3, 0.5))),
    "batches cut": dpoptim.DPSGD(0.3, largest_batch=1.1),
    "clip norms as planned": dpoptim.DPSGD(dpoptim.PlannedClipNorm((0.3, 0.1, 2.0))),
    "found": dpoptim.DPSGD(dpoptim.PrivateQuantile(0.5, share=0.3, when="all along", start=0.3)),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", METHODS)
def test_gradients_are_as_noisy_as_optimizers_are_told(name: str) -> None:
    """Records without gradients, so that what is released is noise."""
    plan = METHODS[name].plan(
        n=8000, batch_size=2000, epochs=1, noise_multiplier=1.0, delta=1e-5, neighboring="zero-out"
    )
    model = nn.Linear(200, 200, bias=False)
    optimizer = AdamBC(model.parameters(), lr=1e-3)
    told = []

    def look(optimizer: Any, *given: Any) -> None:
        assert model.weight.grad is not None
        told.append((float(model.weight.grad.std()), optimizer.param_groups[0]["noise_std"]))

    data = TensorDataset(torch.zeros(8000, 200))
    with dpoptim.attach(plan, model, optimizer, data, noise_seed=0) as private:
        optimizer.register_step_pre_hook(look)
        assert private.noise_std > 0
        for (x,) in private.batches():
            private.backward(model(x).sum(1))
            optimizer.step()
    assert len(told) == plan.steps
    for seen, said in told:
        assert seen == pytest.approx(said, rel=5 / math.sqrt(2 * 40_000))


def test_noise_that_is_not_told_is_refused_before_anything_is_spent() -> None:
    plan = dpoptim.DPFTRL(1.0, noise="tree").plan(
        n=8, batch_size=4, epochs=1, noise_multiplier=1.0, delta=1e-5
    )
    model = nn.Linear(2, 1)
    with dpoptim.Ledger(neighboring="zero-out") as ledger:
        with pytest.raises(ValueError, match="AdamBC asks for the noise of each step"):
            dpoptim.attach(
                plan,
                model,
                AdamBC(model.parameters()),
                TensorDataset(torch.zeros(8, 2)),
                ledger=ledger,
            )
        assert not ledger.entries()


def test_it_learns() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 5, generator=generator)
    y = (x[:, 0] > 0).long()
    model = nn.Linear(5, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    plan = dpoptim.DPSGD(1.0).plan(n=2000, batch_size=200, epochs=5, epsilon=4, delta=1e-5)
    optimizer = AdamBC(model.parameters(), lr=0.05)
    with dpoptim.attach(plan, model, optimizer, TensorDataset(x, y), noise_seed=0) as private:
        for a, b in private.batches():
            private.backward(F.cross_entropy(model(a), b, reduction="none"))
            optimizer.step()
    assert float((model(x).argmax(1) == y).float().mean()) > 0.9


@pytest.mark.parametrize(
    "wrong", [{"lr": 0.0}, {"betas": (1.0, 0.9)}, {"floor": -1.0}, {"noise_std": math.nan}]
)
def test_bad_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        AdamBC([nn.Parameter(torch.zeros(1))], **wrong)
