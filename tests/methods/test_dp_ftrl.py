"""DP-FTRL: fixed batches, correlated noise, one Gaussian for the whole run."""

import copy
import dataclasses
import pickle
from typing import Any, get_args

import dp_accounting
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.methods.dp_ftrl import STRATEGIES, Noise
from dpoptim.noise.correlated import Workload
from dpoptim.noise.correlated.workload import Decay

N = 12


def plan_of(noise: Any = "toeplitz", **changes: Any) -> dpoptim.Plan:
    names = {field.name for field in dataclasses.fields(dpoptim.DPFTRL)}
    settings = {name: changes.pop(name) for name in names & set(changes)}
    method = dpoptim.DPFTRL(clip_norm=1.0, noise=settings.pop("noise", noise), **settings)
    arguments = {
        "n": N,
        "batch_size": 4,
        "epochs": 2,
        "noise_multiplier": 2.0,
        "delta": 1e-3,
        **changes,
    }
    return method.plan(**{key: value for key, value in arguments.items() if value is not ...})


def train(plan: dpoptim.Plan, x: torch.Tensor, *, noise_seed: int = 3) -> torch.Tensor:
    """All iterates of SGD from zero on the loss <w, x>: shape (steps + 1, 2)."""
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    iterates = [torch.zeros(2).double()]
    with dpoptim.attach(
        plan, model, optimizer, TensorDataset(x), loss_reduction="sum", noise_seed=noise_seed
    ) as private:
        for (batch,) in private.batches():
            model(batch).sum().backward()
            optimizer.step()
            iterates.append(model.weight.detach()[0].clone())
    return torch.stack(iterates)


@pytest.mark.parametrize("noise", get_args(Noise))
@pytest.mark.parametrize("neighboring", ["zero-out", "replace-one"])
def test_the_run_is_one_gaussian_and_survives_json(noise: Any, neighboring: str) -> None:
    plan = plan_of(noise, neighboring=neighboring)
    assert plan.steps == 6
    assert plan.event == dp_accounting.GaussianDpEvent(2.0)
    assert dpoptim.Plan.from_json(plan.to_json()) == plan
    assert plan.guarantee.status == "proven"
    calibrated = plan_of(noise, neighboring=neighboring, noise_multiplier=..., epsilon=1.5)
    assert 0.99 * 1.5 <= calibrated.guarantee.epsilon <= 1.5


@pytest.mark.parametrize("noise", get_args(Noise))
def test_one_record_moves_the_run_as_often_and_as_far_as_the_plan_says(noise: Any) -> None:
    """Two runs with the same seed differ by the sums alone; what one record may do to these is
    what the noise hides (tests/privacy/test_correlated_noise.py)."""
    plan = plan_of(noise)
    x = torch.randn(N, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.1
    other = x.clone()
    other[5] = 1e30
    steps = (train(plan, other) - train(plan, x)).diff(dim=0).mul(-plan.batch_size)
    moved = steps.norm(dim=1)
    took_part = (moved > 1e-9).nonzero().flatten()
    assert len(took_part) == 2
    assert int(took_part.diff()) == plan.sampler.separation == 3
    assert float(moved.max()) <= 1 + float(x[5].norm()) + 1e-9


def test_without_noise_it_is_sgd_on_clipped_gradients() -> None:
    plan = plan_of(noise_multiplier=0)
    plan = dataclasses.replace(plan, method=dataclasses.replace(plan.method, order="given"))
    x = torch.linspace(-0.5, 0.5, 2 * N).double().view(N, 2)
    expected = -torch.cat(
        [torch.zeros(1, 2).double(), x.view(3, 4, 2).sum(1).div(4).repeat(2, 1).cumsum(0)]
    )
    assert torch.allclose(train(plan, x), expected, atol=1e-6)


def test_noise_of_the_last_iterate_is_what_the_mechanism_says() -> None:
    """Of 40,000 coordinates; the estimate's standard deviation is 0.35 %."""
    plan = plan_of("toeplitz", n=16, batch_size=1, epochs=1)
    model = nn.Linear(40_000, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = TensorDataset(torch.zeros(16, 40_000, dtype=torch.float64))
    with dpoptim.attach(
        plan, model, optimizer, data, loss_reduction="sum", noise_seed=1
    ) as private:
        for (x,) in private.batches():
            model(x).sum().backward()
            optimizer.step()
    expected = 2.0 * float(STRATEGIES["toeplitz"].prefix_std(16)[-1])
    assert float(model.weight.detach().std()) == pytest.approx(expected, rel=0.025)


DECAYING: dict[str, dict[str, Any]] = {
    "fixed": {"n": 48, "epochs": 3},
    "cyclic-poisson": {"n": 48, "epochs": 3, "noise_multiplier": ..., "epsilon": 2.0},
    "balls-in-bins": {"n": 48, "epochs": 1},
}


WARM_UP = (0.1, 1.0, 0.5, 0.05)


@pytest.mark.set_aside("cyclic-poisson")
@pytest.mark.parametrize("sampling", DECAYING)
def test_noise_is_fitted_to_the_decay_that_the_plan_names(sampling: Any) -> None:
    """JSON, describe and mechanism know it; what it costs is the same for another decay."""
    bands = {"bands": 3} if sampling == "balls-in-bins" else {}
    plans = {
        decay: plan_of(sampling=sampling, noise="best", decay=decay, **bands, **DECAYING[sampling])
        for decay in (*get_args(Decay), WARM_UP)
    }
    cosine, constant, warm = plans["cosine"], plans["none"], plans[WARM_UP]
    assert dpoptim.Plan.from_json(warm.to_json()) == warm
    assert "learning rates of a plan from 0.1 over 1 to 0.05" in warm.describe()
    assert warm.query.strategy not in (cosine.query.strategy, constant.query.strategy)
    assert warm.guarantee.epsilon == pytest.approx(constant.guarantee.epsilon, rel=0.05)
    assert dpoptim.Plan.from_json(cosine.to_json()) == cosine
    assert cosine.method.workload == Workload(0.0, "cosine")  # type: ignore[attr-defined]
    assert "fitted to learning rates of cosine decay" in cosine.describe()
    assert "fitted to" not in constant.describe()
    assert cosine.query.strategy != constant.query.strategy
    assert type(cosine.event) is type(constant.event)
    assert cosine.guarantee.status == constant.guarantee.status == "proven"
    assert cosine.guarantee.epsilon == pytest.approx(constant.guarantee.epsilon, rel=0.05)


def test_the_guarantee_rests_on_no_learning_rate() -> None:
    """A loop with other rates releases the same noisy sums: only what it makes of them differs."""
    plan = plan_of("best", decay="cosine", n=16, batch_size=1, epochs=2)
    x = torch.zeros(16, 2, dtype=torch.float64)
    released = []
    for rates in (Workload(decay="cosine").rates(32), np.linspace(1, 9, 32)):
        model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t, r=rates: r[min(t, 31)])
        steps = []
        with dpoptim.attach(
            plan, model, optimizer, TensorDataset(x), loss_reduction="sum", noise_seed=1
        ) as private:
            for (batch,) in private.batches():
                model(batch).sum().backward()
                before = model.weight.detach().clone()
                optimizer.step()
                steps.append((before - model.weight.detach()) / schedule.get_last_lr()[0])
                schedule.step()
            assert private.spent().epsilon == pytest.approx(plan.guarantee.epsilon)
        released.append(torch.stack(steps))
    torch.testing.assert_close(released[0], released[1], rtol=1e-6, atol=1e-9)


def test_decay_is_for_noise_that_is_fitted() -> None:
    with pytest.raises(ValueError, match=r"decay='linear' is for noise='best'"):
        dpoptim.DPFTRL(clip_norm=1.0, noise="tree", decay="linear")
    with pytest.raises(ValueError, match="decay must be one of"):
        dpoptim.DPFTRL(clip_norm=1.0, decay="exponential")  # type: ignore[arg-type]


def test_a_plan_refuses_what_has_no_guarantee() -> None:
    with pytest.raises(ValueError, match="no guarantee under it is known"):
        plan_of(neighboring="add-or-remove-one")
    with pytest.raises(ValueError, match="no guarantee under it is known"):
        dataclasses.replace(plan_of(), neighboring="add-or-remove-one")
    with pytest.raises(ValueError, match="epochs must be a whole number"):
        plan_of(epochs=1.5)
    with pytest.raises(ValueError, match="order must be one of"):
        dpoptim.DPFTRL(clip_norm=1.0, order="sorted")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="noise must be one of"):
        dpoptim.DPFTRL(clip_norm=1.0, noise="pink")  # type: ignore[arg-type]


def test_more_steps_are_charged_as_more_participations() -> None:
    plan = plan_of(noise="independent")
    longer = dataclasses.replace(plan, steps=7)  # the third pass has begun
    assert longer.query.standard_deviation > plan.query.standard_deviation


def test_attach_compares_n() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(
        ValueError, match=f"train_set has 11 records but the plan was made for n={N}"
    ):
        dpoptim.attach(plan_of(), model, optimizer, TensorDataset(torch.zeros(11, 2)))


def test_a_private_training_cannot_be_pickled() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with dpoptim.attach(plan_of(), model, optimizer, TensorDataset(torch.zeros(N, 2))) as private:
        for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="cannot be pickled"):
                attempt(private)
