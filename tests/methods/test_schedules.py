"""Planned clip norms, noise and batches: what was planned is what happens, and what is
accounted.
"""

import json
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.accounting import compute_epsilon
from dpoptim.audit.attack_families import attack
from dpoptim.audit.side_by_side import releases_kept
from dpoptim.sampling import PlannedPoissonSampling

PLAN: dict[str, Any] = {
    "n": 400,
    "batch_size": 400,
    "steps": 6,
    "delta": 1e-5,
    "neighboring": "zero-out",
}


def releases(
    plan: dpoptim.Plan, size: int = 40_000, **options: Any
) -> tuple[list[torch.Tensor], list[float]]:
    """What each step releases of records without gradients, and the clip norm before each step."""
    model = nn.Linear(1, size, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    with (
        releases_kept(size) as kept,
        dpoptim.attach(
            plan, model, optimizer, TensorDataset(torch.zeros(400, 1)), noise_seed=0, **options
        ) as private,
    ):
        for (x,) in private.batches():
            norms.append(private.clip_norm)
            private.backward(model(x).sum(1))
            optimizer.step()
    return kept, norms


def test_noise_follows_its_schedule_and_so_does_the_charge() -> None:
    plan = dpoptim.DPSGD(0.5, noise_schedule=(2, 1, 0.5)).plan(noise_multiplier=1.5, **PLAN)
    gaussian = dp_accounting.GaussianDpEvent
    steps = [dp_accounting.SelfComposedDpEvent(gaussian(1.5 * scale), 2) for scale in (0.5, 1, 2)]
    expected = compute_epsilon(dp_accounting.ComposedDpEvent(steps), 1e-5, "zero-out").epsilon
    assert plan.guarantee.epsilon == pytest.approx(expected)
    kept, _ = releases(plan)
    for released, scale in zip(kept, (2, 2, 1, 1, 0.5, 0.5), strict=True):
        assert float(released.std()) == pytest.approx(0.5 * 1.5 * scale, rel=0.02)
    assert dpoptim.Plan.from_json(plan.to_json()) == plan


def test_sampled_noise_schedules_are_composed_and_calibrated() -> None:
    method = dpoptim.DPSGD(1.0, noise_schedule=(1.5, 1.0))
    plan = method.plan(n=10_000, batch_size=100, steps=50, epsilon=2.0, delta=1e-5)
    assert 1.98 <= plan.guarantee.epsilon <= 2
    events = plan.event.events  # type: ignore[attr-defined]
    assert [
        (one.event.event.noise_multiplier / plan.noise_multiplier, one.count) for one in events
    ] == [
        (pytest.approx(1.0), 25),
        (pytest.approx(1.5), 25),
    ]


def test_the_attack_knows_the_schedule() -> None:
    plan = dpoptim.DPSGD(1.0, noise_schedule=(3, 1)).plan(noise_multiplier=2.0, **PLAN)
    found = attack(plan, 8000, 0)
    assert found.verdict != "refuted"
    assert 0.6 * found.claimed < found.lower_bound <= found.claimed


def test_clip_norms_follow_their_plan_at_no_cost() -> None:
    plan = dpoptim.DPSGD(dpoptim.PlannedClipNorm((1.0, 0.25))).plan(noise_multiplier=2.0, **PLAN)
    assert plan.event == dpoptim.DPSGD(1.0).plan(noise_multiplier=2.0, **PLAN).event
    _, norms = releases(plan)
    assert norms == [1.0] * 3 + [0.25] * 3
    assert dpoptim.Plan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["method"]["clip_norm"] == {"norms": [1.0, 0.25]}


def test_a_plan_of_clip_norms_survives_a_checkpoint(tmp_path: Path) -> None:
    plan = dpoptim.DPSGD(dpoptim.PlannedClipNorm((1.0, 0.25))).plan(noise_multiplier=2.0, **PLAN)

    def run(stop: int, **options: Any) -> list[float]:
        model, norms = nn.Linear(1, 2), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.ones(400, 1))
        with dpoptim.attach(plan, model, optimizer, data, noise_seed=0, **options) as private:
            for (x,) in private.batches():
                norms.append(private.clip_norm)
                private.backward(model(x).sum(1))
                optimizer.step()
                if private.steps_done == stop:
                    private.save(tmp_path / "run.secret")
                    break
        return norms

    assert run(2) == [1.0, 1.0]
    assert run(99, resume=tmp_path / "run.secret") == [1.0, 0.25, 0.25, 0.25]


GROWING = ((2, 2.0), (4, 4.0))  # 100 records, 200 from step 2 on, all 400 from step 4 on


def growing(noise: float = 1.5, **changes: Any) -> dpoptim.Plan:
    numbers = PLAN | {"batch_size": 100} | changes
    return dpoptim.DPSGD(1.0, batch_schedule=GROWING).plan(noise_multiplier=noise, **numbers)


def means(plan: dpoptim.Plan, **options: Any) -> list[float]:
    """What the steps release of records whose gradients are 1."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = TensorDataset(torch.ones(400, 1))
    found = []
    with dpoptim.attach(plan, model, optimizer, data, noise_seed=0, **options) as private:
        for (x,) in private.batches(physical_batch_size=64):
            before = model.weight.item()
            private.backward(model(x).sum(1))
            optimizer.step()
            if private.finished_step:
                found.append(before - model.weight.item())
    return found


def test_batches_follow_their_schedule_and_so_does_the_charge() -> None:
    plan = growing()
    steps: list[dp_accounting.DpEvent] = [
        dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(1.5)), 2
        )
        for q in (0.25, 0.5)
    ]
    whole = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(1.5), 2)
    expected = compute_epsilon(dp_accounting.ComposedDpEvent([whole, *steps]), 1e-5, "zero-out")
    assert plan.guarantee.epsilon == pytest.approx(expected.epsilon, rel=1e-9)
    assert dpoptim.Plan.from_json(plan.to_json()) == plan
    assert plan.event_of_part(3, 1) == plan.event  # the step made twice may have had any rate
    assert [each.count for each in plan.event_of_part(3).events] == [2, 1]  # type: ignore[attr-defined]
    assert plan.epochs == pytest.approx(3.5)
    assert growing(steps=None, epochs=3.5).steps == 6
    assert growing().sampler.steps(0.6) == 3  # a plan so short would never see the last change


def test_sums_are_those_of_growing_batches_over_their_own_expected_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kept() -> bool:
        found = means(growing(0.0))  # deviations of the coins: 0.087 and 0.05
        drawn = len(set(found[:4])) > 1 and found[:4] == pytest.approx([1.0] * 4, abs=0.3)
        return drawn and found[4:] == pytest.approx([1.0, 1.0], abs=0.01)

    assert kept()
    honest = PlannedPoissonSampling.rate
    with monkeypatch.context() as seeded:  # bugs: grown from the start; divided by the first size
        seeded.setattr(PlannedPoissonSampling, "rate", lambda self, factor: honest(self, 4.0))
        assert not kept()
    monkeypatch.setattr(dpoptim.Plan, "expected_batch", lambda self, step: self.batch_size)
    assert not kept()


def test_noise_of_a_growing_batch_is_told_step_by_step() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(400, 1))
    told = []
    with dpoptim.attach(growing(), model, optimizer, data, noise_seed=0) as private:
        for (x,) in private.batches():
            private.backward(model(x).sum(1))
            optimizer.step()
            told.append(private.noise_std * 100 / 1.5)
    assert told == pytest.approx([1, 1, 1 / 2, 1 / 2, 1 / 4, 1 / 4])


@pytest.mark.variants
def test_the_attack_knows_growing_batches() -> None:
    found = attack(growing(2.0), 4000, 0)
    assert found.verdict != "refuted"
    assert 0.5 * found.claimed < found.lower_bound <= found.claimed


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (
            lambda: dpoptim.DPSGD(1.0, noise_schedule=(1, 0)),
            "noise_schedule must be a finite number above 0",
        ),
        (lambda: dpoptim.PlannedClipNorm(()), "norms is empty"),
        (lambda: dpoptim.DPSGD(1.0, batch_schedule=((2, 1.0), (2, 2.0))), "ascending steps"),
        (lambda: dpoptim.DPSGD(1.0, batch_schedule=((0, 2.0),)), "batch_schedule"),
        (lambda: growing(batch_size=101), "more than n=400"),
        (
            lambda: dpoptim.DPSGD(dpoptim.PrivateQuantile(0.5), batch_schedule=GROWING),
            "neither largest_batch nor a PrivateQuantile",
        ),
        (lambda: dpoptim.PlannedClipNorm((1.0, -1.0)), "norms must be a finite number above 0"),
        (
            lambda: dpoptim.DPSGD(dpoptim.PlannedClipNorm((1.0,) * 9)).plan(
                noise_multiplier=2.0, **PLAN
            ),
            "at most one a step",
        ),
        (
            lambda: dpoptim.DPSGD(1.0, noise_schedule=(2,) * 6 + (1,)).plan(
                noise_multiplier=2.0, **PLAN
            ),
            "noise_schedule plans more stretches than the 6 steps",
        ),
        (
            lambda: dpoptim.SparseSGD(1.0, share=0.2, noise_schedule=(2,) * 7).plan(
                noise_multiplier=2.0, **PLAN
            ),
            "noise_schedule plans more stretches than the 6 steps",
        ),
        (
            lambda: dpoptim.DPSGD(1.0, batch_schedule=((2, 0.5), (6, 1.0))).plan(
                epsilon=1.0, **PLAN
            ),
            "batch_schedule changes the batches from step 6 on",
        ),
    ],
)
def test_bad_schedules_are_refused(method: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        method()
