"""Projection onto a ball and a random iterate (Das et al. 2023, Algorithm 1): made of what was
released, so at no charge; kept by checkpoints.
"""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.distributed.ranks import ALONE
from dpoptim.noise.stream import KeyStream
from dpoptim.training.iterates import Iterates

N, STEPS, RADIUS = 40, 6, 0.5
PLAN = dpoptim.DPSGD(clip_norm=1.0).plan(
    n=N, batch_size=10, steps=STEPS, epsilon=2.0, delta=1e-3, neighboring="zero-out"
)


def problem(changed: bool = False) -> tuple[nn.Linear, TensorDataset]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x = torch.randn(N, 3).double()
    y = (x[:, 0] > 0).long()
    if changed:  # one record is another
        x[0], y[0] = 5.0, 1 - y[0]
    return model, TensorDataset(x, y)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Run:
    """A run, and the points that it visited."""

    def __init__(self, *, halves: bool = False, changed: bool = False, **options: Any) -> None:
        self.model, data = problem(changed)
        held = list(self.model.parameters())
        parts = [[p] for p in held] if halves else [held]
        self.optimizers = [torch.optim.SGD(part, lr=1.0, momentum=0.5) for part in parts]
        self.private = dpoptim.attach(
            PLAN, self.model, self.optimizers, data, noise_seed=1, **options
        )
        self.points = [weights(self.model)]

    def go_on(self, steps: int = STEPS) -> "Run":
        """Until so many steps are done; without `with`, so that a run may be left behind."""
        for x, y in self.private.batches():
            self.private.backward(F.cross_entropy(self.model(x), y, reduction="none"))
            for optimizer in self.optimizers:
                optimizer.step()
            self.points.append(weights(self.model))
            if self.private.steps_done == steps:
                break
        return self

    def whole(self) -> "Run":
        with self.private:
            return self.go_on()

    def kept(self) -> Tensor:
        self.private.swap_random_iterate()
        found = weights(self.model)
        self.private.swap_random_iterate()
        return found


def projected(point: Tensor, start: Tensor, radius: float = RADIUS) -> Tensor:
    move = point - start
    return start + move * min(1.0, radius / float(move.norm()))


@pytest.mark.parametrize("halves", [False, True])
def test_every_point_is_in_the_ball_and_the_nearest_there(halves: bool) -> None:
    free, held = Run(halves=halves).whole(), Run(halves=halves, projection=RADIUS).whole()
    start = free.points[0]
    for point in held.points:
        assert float((point - start).norm()) <= RADIUS * (1 + 1e-12)
    assert max(float((point - start).norm()) for point in free.points) > 2 * RADIUS
    if not halves:  # else in between, too
        torch.testing.assert_close(held.points[1], projected(free.points[1], start))
    wide = Run(halves=halves, projection=1e6).whole()
    assert torch.equal(wide.points[-1], free.points[-1])


def test_it_is_made_of_what_was_released_alone() -> None:
    """Gradients as the optimizer got them, and the coins, make the same points without data."""
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given: list[Tensor] = []

    def note(*_: Any) -> None:
        given.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )

    start = weights(model)
    options: dict[str, Any] = {"projection": RADIUS, "random_iterate": True, "noise_seed": 1}
    with dpoptim.attach(PLAN, model, optimizer, data, **options) as private:
        optimizer.register_step_pre_hook(note)
        for x, y in private.batches():
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
    points = [start]
    for gradient in given:
        points.append(projected(points[-1] - gradient, start))
    torch.testing.assert_close(weights(model), points[-1])
    private.swap_random_iterate()
    coins = KeyStream.from_seed(1, "random iterate")
    kept = [k for k in range(STEPS) if len(coins.coins(1, 1 / (k + 1)))][-1]
    torch.testing.assert_close(weights(model), points[kept])


def test_nothing_else_changes_and_nothing_is_charged() -> None:
    """Neither the noise nor who takes part, for whom all coins but these are meant."""
    ledger = dpoptim.Ledger(neighboring="zero-out", epsilon=2.01, delta=1e-3)
    plain, ours = Run().whole(), Run(random_iterate=True, ledger=ledger).whole()
    assert all(map(torch.equal, plain.points, ours.points))
    assert ours.private.spent() == plain.private.spent()
    assert len(list(ledger.entries())) == 1
    assert any(torch.equal(ours.kept(), point) for point in ours.points[:-1])
    assert torch.equal(weights(ours.model), ours.points[-1])


def test_which_one_is_kept_does_not_depend_on_records() -> None:
    found = []
    for changed in (False, True):
        run = Run(changed=changed, random_iterate=True).whole()
        kept = run.kept()
        found.append([torch.equal(kept, point) for point in run.points])
    assert found[0] == found[1]
    assert sum(found[0]) == 1


def test_each_point_that_a_step_left_is_as_likely() -> None:
    counts: Counter[int] = Counter()
    coins = KeyStream.from_seed(3, "a test")
    for _ in range(2_000):
        p = nn.Parameter(torch.zeros(1))
        iterates = Iterates({"p": p}, None, coins, ALONE)
        for step in range(1, 5):
            iterates.leave()
            p.data.fill_(step)  # the last one is left by no step
        iterates.swap()
        counts[int(p)] += 1
    assert set(counts) == set(range(4))
    assert all(abs(count - 500) < 5 * math.sqrt(500) for count in counts.values())


@pytest.mark.parametrize("halves", [False, True])
def test_a_run_goes_on_from_a_checkpoint_with_its_ball_and_its_iterate(
    halves: bool, tmp_path: Path
) -> None:
    """From another start, so that the ball must come from the file."""
    options: dict[str, Any] = {"halves": halves, "projection": RADIUS, "random_iterate": True}
    whole = Run(**options).whole()
    for steps in (1, STEPS - 1):
        first = Run(**options).go_on(steps)
        first.private.save(tmp_path / "run")
        first.private.detach()
        again = Run(**options, resume=tmp_path / "run")
        with torch.no_grad():
            assert torch.equal(weights(again.model), whole.points[steps])
        again.whole()
        torch.testing.assert_close(weights(again.model), whole.points[-1])
        torch.testing.assert_close(again.kept(), whole.kept())


def test_a_run_goes_on_with_the_same_options_alone(tmp_path: Path) -> None:
    first = Run(projection=RADIUS).go_on(2)
    first.private.save(tmp_path / "run")
    first.private.detach()
    for other in ({}, {"projection": 1.0}, {"projection": RADIUS, "random_iterate": True}):
        with pytest.raises(ValueError, match="the same projection and random_iterate"):
            Run(resume=tmp_path / "run", **other)


def test_nothing_goes_on_from_the_iterate_that_was_kept(tmp_path: Path) -> None:
    run = Run(random_iterate=True)
    with pytest.raises(dpoptim.PrivacyError, match="before the first step"):
        run.private.swap_random_iterate()
    run.go_on(2)
    run.private.swap_random_iterate()
    with pytest.raises(dpoptim.PrivacyError, match="swap_random_iterate.*weights_only=True"):
        run.private.save(tmp_path / "run")
    with pytest.raises(dpoptim.PrivacyError, match="swap_random_iterate"):
        run.go_on()
    run.private.detach()
    plain = Run()
    with pytest.raises(dpoptim.PrivacyError, match="random_iterate=True"):
        plain.private.swap_random_iterate()
    plain.private.detach()


@pytest.mark.parametrize("radius", [0, -1.0, math.inf, math.nan, "1"])
def test_a_radius_is_a_positive_number(radius: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="projection"):
        Run(projection=radius)


def test_a_step_is_projected_once_all_optimizers_have_made_their_part(tmp_path: Path) -> None:
    """So several optimizers visit the points of one; also where one leaves its share unused."""
    whole, halves = (Run(halves=each, projection=0.1).whole() for each in (False, True))
    for one, other in zip(whole.points, halves.points, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    lazy = Run(halves=True, projection=0.1)
    start = weights(lazy.model)
    with lazy.private:
        for x, y in lazy.private.batches():
            assert float((weights(lazy.model) - start).norm()) <= 0.1 * (1 + 1e-12)
            lazy.private.backward(F.cross_entropy(lazy.model(x), y, reduction="none"))
            lazy.optimizers[0].step()


def test_no_optimizer_moves_the_iterate_that_is_looked_at() -> None:
    run = Run(halves=True, random_iterate=True)
    x, y = next(iter(run.private.batches()))
    run.private.backward(F.cross_entropy(run.model(x), y, reduction="none"))
    run.optimizers[0].step()
    run.private.swap_random_iterate()
    with pytest.raises(dpoptim.PrivacyError, match="training does not go on"):
        run.optimizers[1].step()
    run.private.swap_random_iterate()
    run.optimizers[1].step()
