"""Passes that are captured and replayed, with a stand-in for CUDA's graphs on any machine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.clipping import Clipping
from dpoptim.errors import PrivacyError
from dpoptim.gradients import graphed_pass
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.graphed_pass import Capture, GraphedPass, Replay, Terms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Recorded:
    """Captures on a CPU: to replay is to work again, into the memory that results lie in.

    As on a GPU, nothing is computed by the capture, and what Python does is done once.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.replays = engine, 0

    def __call__(self, work: Callable[[], Terms]) -> tuple[Terms, Replay]:
        engine = self.engine
        rows, drawn = engine.rows_open, torch.get_rng_state()
        found = work()
        torch.set_rng_state(drawn)
        for each in found:
            if each is not None:
                each.fill_(torch.nan)

        def replay() -> None:
            self.replays += 1
            before = engine.rows_open, engine.present
            engine.rows_open = rows
            with torch.enable_grad():
                again = work()
            for old, new in zip(found, again, strict=True):
                assert (old is None) == (new is None)
                if old is not None and new is not None:
                    old.copy_(new)
            engine.rows_open, engine.present = before

        return found, replay


def graphed(
    engine: Engine, losses: Callable[..., Tensor], capture: Capture | None = None
) -> GraphedPass:
    both = engine, losses, engine.backward, engine.backward
    if DEVICE == "cuda":
        return GraphedPass(*both)
    return GraphedPass(*both, capture=capture or Recorded(engine), devices=["cpu"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 16), nn.LayerNorm(16)
        self.last, self.dropout = nn.Linear(16, 3), nn.Dropout(0.5)
        self.scale = torch.ones(1, device=DEVICE)  # which a graph would read where it was

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(self.norm(self.first(x)).relu()) + x.mean(2, keepdim=True)
        logits: Tensor = self.last(hidden).mean(1) * self.scale
        return logits


def made(**options: float) -> tuple[Net, Engine]:
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    engine = Engine(model, Clipping(1.0), capacity=8, reduction="sum")
    engine.attach()
    return model, engine


def batch(seed: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, 5, generator=generator) * (1 + 9 * (seed % 2))
    return x.to(DEVICE), torch.randint(3, (rows,), generator=generator).to(DEVICE)


def losses_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: nn.functional.cross_entropy(model(x), y, reduction="none")


def deliver(engine: Engine, rows: int = 8, present: Tensor | None = None) -> None:
    engine.begin_microbatch(rows, present=present)


def usual(engine: Engine, given: tuple[Tensor, Tensor], present: Tensor | None = None) -> Tensor:
    """The sum by the engine alone."""
    deliver(engine, len(given[0]), present)
    engine.backward(losses_of(engine.model)(*given))
    return engine.take()[0].clone()


def by(
    both: GraphedPass, engine: Engine, given: tuple[Tensor, Tensor], present: Tensor | None = None
) -> Tensor:
    deliver(engine, len(given[0]), present)
    both(*given)
    return engine.take()[0].clone()


def passes(engine: Engine) -> GraphedPass:
    return graphed(engine, losses_of(engine.model))


def close(found: Tensor, expected: Tensor) -> bool:
    return bool(torch.allclose(found, expected, rtol=1e-4, atol=1e-6))


def test_replays_add_what_the_engine_adds() -> None:
    model, engine = made()
    model.eval()
    both = passes(engine)
    for seed in range(8):
        given = batch(seed)
        assert close(by(both, engine, given), usual(engine, given)), seed
        assert both.captured == (seed >= graphed_pass.WARM)


def test_a_step_adds_up_its_parts() -> None:
    model, engine = made()
    model.eval()
    both = passes(engine)
    for seed in range(5):
        by(both, engine, batch(seed))
    for seed in (6, 7):
        deliver(engine)
        both(*batch(seed))
    found = engine.take()[0].clone()
    assert close(found, usual(engine, batch(6)) + usual(engine, batch(7)))


def test_sums_stay_when_the_next_batch_is_replayed() -> None:
    """What was handed out is written to later: noise is added to it, and it becomes a gradient."""
    model, engine = made()
    model.eval()
    both = passes(engine)
    for seed in range(5):
        by(both, engine, batch(seed))
    deliver(engine)
    both(*batch(5))
    first = engine.take_by_parameter()
    kept = [each.clone() for each in first if isinstance(each, Tensor)]
    deliver(engine)
    both(*batch(6))
    second = engine.take_by_parameter()
    for before, each, after in zip(kept, first, second, strict=True):
        assert isinstance(each, Tensor)
        assert isinstance(after, Tensor)
        assert torch.equal(before, each)
        assert each.untyped_storage().data_ptr() != after.untyped_storage().data_ptr()


def test_each_batch_has_its_own_empty_slots() -> None:
    model, engine = made()
    model.eval()
    both = passes(engine)
    for seed in range(8):
        present = torch.arange(8)[:, None] < 3 + seed % 4
        given = batch(seed)
        assert close(by(both, engine, given, present), usual(engine, given, present)), seed
    assert both.captured


def test_masks_are_drawn_anew_in_each_replay() -> None:
    _, engine = made()
    both = passes(engine)
    sums = [by(both, engine, batch(0)) for _ in range(8)]
    assert both.captured
    for i in range(8):
        assert not any(torch.allclose(sums[i], sums[j], rtol=1e-2) for j in range(i))


def test_what_is_read_beside_the_arguments_is_found_out() -> None:
    """A graph would clip and add the records of another batch."""
    model, engine = made()
    model.eval()
    given: list[tuple[Tensor, Tensor]] = []

    def losses(x: Tensor) -> Tensor:
        return losses_of(engine.model)(x, given[-1][1])

    def capture(work: Callable[[], Terms]) -> tuple[Terms, Replay]:
        read = given[-1]
        found, replay = Recorded(engine)(work)

        def again() -> None:  # as a graph reads the memory that was read before
            given.append(read)
            replay()
            given.pop()

        return found, again

    both = graphed(engine, losses, capture)
    with pytest.raises(PrivacyError, match="beside its arguments"):
        for seed in range(8):
            given.append(batch(seed))
            deliver(engine)
            both(given[-1][0])
            engine.take()
    assert not both.captured


@pytest.mark.skipif(DEVICE == "cuda", reason="GPUs have no part in it")
def test_a_capture_that_adds_something_else_is_refused() -> None:
    model, engine = made()
    model.eval()

    def capture(work: Callable[[], Terms]) -> tuple[Terms, Replay]:
        found, replay = Recorded(engine)(work)

        def wrong() -> None:
            replay()
            for each in found:
                if each is not None:
                    each.mul_(1.1)

        return found, wrong

    both = graphed(engine, losses_of(model), capture)
    with pytest.raises(PrivacyError, match="something else"):
        for seed in range(8):
            by(both, engine, batch(seed))


@pytest.mark.parametrize(
    "change",
    [
        lambda model, engine: setattr(engine, "clipping", Clipping(0.25)),
        lambda model, engine: model.train(),
        lambda model, engine: setattr(model.first.weight, "data", model.first.weight.data.clone()),
        lambda model, engine: setattr(model, "scale", torch.full((1,), 3.0, device=DEVICE)),
        lambda model, engine: (engine.detach(), engine.attach()),
    ],
    ids=["clip norm", "phase", "weights elsewhere", "a plain tensor", "attached again"],
)
def test_a_pass_that_has_become_another_is_not_replayed(
    change: Callable[[Net, Engine], None],
) -> None:
    model, engine = made()
    model.dropout.p = 0.0
    model.eval()
    both = passes(engine)
    for seed in range(5):
        by(both, engine, batch(seed))
    key = both._captured and both._captured.key
    change(model, engine)
    by(both, engine, batch(4))
    assert both._last != key  # it ran as usual
    with torch.no_grad():
        model.first.weight.mul_(1.5)
    for seed in range(5, 9):
        given = batch(seed)
        assert close(by(both, engine, given), usual(engine, given)), seed


def test_batches_of_other_shapes_run_as_usual() -> None:
    model, engine = made()
    model.eval()
    both = passes(engine)
    for seed, rows in enumerate([8, 8, 8, 8, 5, 8, 7, 7, 7, 7, 8]):
        given = batch(seed, rows)
        assert close(by(both, engine, given), usual(engine, given)), seed


def test_records_stay_within_the_bound() -> None:
    model, engine = made()
    model.eval()
    both = passes(engine)
    for seed in range(5):
        by(both, engine, batch(seed))
    x, y = batch(5)
    present = torch.ones(8, 1, dtype=torch.bool)
    for factor in (1.0, 1e3, 1e30):
        hostile = x.clone()
        hostile[2] *= factor
        with_all = by(both, engine, (hostile, y), present)
        lacks = present.clone()
        lacks[2] = False
        for _ in range(2):
            without = by(both, engine, (hostile, y), lacks)
        assert float((with_all - without).norm()) <= 1.0


def test_arguments_that_nobody_could_replace() -> None:
    _, engine = made()
    both = passes(engine)
    deliver(engine)
    with pytest.raises(TypeError, match="has a list|has a object"):
        both(object(), batch(0)[1])
    if DEVICE == "cuda":
        with pytest.raises(ValueError, match="to\\('cuda"):
            both(batch(0)[0].cpu(), batch(0)[1])


@pytest.mark.skipif(DEVICE == "cpu", reason="for a GPU")
def test_work_that_waits_for_the_device_is_refused() -> None:
    model, engine = made()

    def losses(x: Tensor, y: Tensor) -> Tensor:
        assert float(x.sum()) != 0.5
        return losses_of(model)(x, y)

    both = graphed(engine, losses)
    with pytest.raises(RuntimeError, match="could not be captured"):
        for seed in range(4):
            deliver(engine)
            both(*batch(seed))
            engine.take()


@pytest.mark.parametrize("fixed", [True, False])
def test_training_is_the_same(fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With noise, by both loops, from one seed: as a user writes them."""

    def pretended(
        engine: Engine, *functions: Callable[..., Any], devices: list[str]
    ) -> GraphedPass:
        if DEVICE == "cuda":
            return GraphedPass(engine, *functions)
        return GraphedPass(engine, *functions, capture=Recorded(engine), devices=["cpu"])

    monkeypatch.setattr("dpoptim.training.batch_loop.GraphedPass", pretended)
    x, y = batch(3, 40)
    trained = []
    for by_graph in (False, True):
        torch.manual_seed(1)
        model = Net().to(DEVICE)
        model.dropout.p = 0.0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        plan = dpoptim.DPSGD(clip_norm=1.0).plan(
            n=40, batch_size=10, steps=12, epsilon=5.0, delta=1e-3
        )
        data = TensorDataset(x.cpu(), y.cpu())
        with dpoptim.attach(plan, model, optimizer, data, noise_seed=3) as private:
            losses = losses_of(model)
            both = private.graphed(losses)
            for a, b in private.batches(fixed_shape=fixed):
                a, b = a.to(DEVICE), b.to(DEVICE)
                if by_graph:
                    both(a, b)
                else:
                    private.backward(losses(a, b))
                optimizer.step()
        assert private.steps_done == 12
        assert both.captured == (by_graph and fixed)
        trained.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(*trained, rtol=1e-3, atol=1e-5)


def test_one_loss_for_each_record() -> None:
    model, data = nn.Linear(2, 1), TensorDataset(torch.randn(8, 2))
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(n=8, batch_size=8, steps=1, epsilon=5.0, delta=1e-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan, model, optimizer, data) as private:
        both = private.graphed(lambda x: model(x).sum())
        for (x,) in private.batches():
            with pytest.raises(ValueError, match='reduction="none"'):
                both(x)
            private.backward(model(x).sum(1))
            optimizer.step()
