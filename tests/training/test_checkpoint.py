"""A run that is saved, thrown away and taken up again is the run that was planned: same steps,
same secrets, one charge.
"""

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim import DPFTRL, DPSGD, DiceSGD, PrivateQuantile, ScaledClipNorm
from dpoptim.accounting.ledger import Ledger
from dpoptim.errors import LedgerError
from dpoptim.noise.correlated import BestStrategy, RedrawnToeplitz
from dpoptim.noise.stream import KeyStream
from dpoptim.plan import Plan
from dpoptim.sampling import FixedBatches, PoissonSampling, Sampler
from dpoptim.training.batches.microbatches import BatchQueue
from dpoptim.training.checkpoints.checkpoint import read_checkpoint
from dpoptim.training.private_training import PrivateTraining
from dpoptim.training.released_gradients import ReleasedGradients
from support import pairs

N, FEATURES, CLASSES = 60, 4, 3
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def problem() -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()
    x = torch.randn(N, FEATURES).double()
    return model, TensorDataset(x, (x @ torch.randn(FEATURES, CLASSES).double()).argmax(1))


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.03)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(
    private: PrivateTraining,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int | None = None,
) -> None:
    """Until the plan is done, or this many steps are."""
    for x, y in private.batches():
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if private.steps_done == steps:
            return


def begin(
    plan: Plan, make: Make = sgd, **options: Any
) -> tuple[PrivateTraining, nn.Module, torch.optim.Optimizer]:
    model, data = problem()
    optimizer = make(list(model.parameters()))
    return dpoptim.attach(plan, model, optimizer, data, **options), model, optimizer


def in_one_go(plan: Plan, make: Make, **options: Any) -> Tensor:
    private, model, optimizer = begin(plan, make, **options)
    with private:
        train(private, model, optimizer)
    return weights(model)


def in_two_parts(plan: Plan, make: Make, path: Path, steps: int, **options: Any) -> Tensor:
    private, model, optimizer = begin(plan, make, **options)
    with private:
        train(private, model, optimizer, steps)
        private.save(path)
    private, model, optimizer = begin(plan, make, resume=path, **options)
    with private:
        train(private, model, optimizer)
        assert private.steps_done == plan.steps
    return weights(model)


PLANS = {
    "every record in every step": DPSGD(0.1).plan(
        n=N, batch_size=N, steps=6, noise_multiplier=0.0, delta=1e-5
    ),
    "error feedback in one pass": DiceSGD(0.1).plan(
        n=N, batch_size=10, epochs=1, noise_multiplier=0.0, delta=1e-5, neighboring="zero-out"
    ),
    "error feedback, never reset": DiceSGD(0.1, reset_each_epoch=False).plan(
        n=N, batch_size=N, epochs=6, noise_multiplier=0.0, delta=1e-5, neighboring="zero-out"
    ),
    "fixed batches in four passes": DPFTRL(0.1).plan(
        n=N, batch_size=20, epochs=4, noise_multiplier=0.0, delta=1e-5, neighboring="zero-out"
    ),
    "scaled by released gradients": DPSGD(ScaledClipNorm(0.1, every=2)).plan(
        n=N, batch_size=N, steps=6, noise_multiplier=0.0, delta=1e-5
    ),
    "clip norm followed": DPSGD(PrivateQuantile(0.5, when="all along")).plan(
        n=N, batch_size=N, steps=6, noise_multiplier=0.0, delta=1e-5
    ),
    "clip norm measured first": DPSGD(PrivateQuantile(0.5, share=0.5)).plan(
        n=N, batch_size=N, steps=6, noise_multiplier=0.0, delta=1e-5
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "steps", "make"), pairs(list(PLANS), [1, 2, 5], [sgd, adam]))
def test_the_parts_make_the_whole(name: str, make: Make, steps: int, tmp_path: Path) -> None:
    """Without noise: model, optimizer, error state, order of the batches and clip norm all go
    on.
    """
    whole = in_one_go(PLANS[name], make, noise_seed=0)
    parts = in_two_parts(PLANS[name], make, tmp_path / "run.secret", steps, noise_seed=0)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)


NOISY = {
    "Poisson batches": DPSGD(0.1).plan(
        n=N, batch_size=20, steps=7, noise_multiplier=1.0, delta=1e-5
    ),
    "fixed batches, Toeplitz noise": DPFTRL(0.1, noise="toeplitz").plan(
        n=N, batch_size=20, epochs=3, noise_multiplier=1.0, delta=1e-5, neighboring="zero-out"
    ),
    "a tree's noise": DPFTRL(0.1, noise="tree").plan(
        n=N, batch_size=20, epochs=2, noise_multiplier=1.0, delta=1e-5, neighboring="zero-out"
    ),
    "scaled by released gradients": DPSGD(ScaledClipNorm(0.1, every=3)).plan(
        n=N, batch_size=20, steps=7, noise_multiplier=1.0, delta=1e-5
    ),
    "noise fitted to a decay": DPFTRL(0.1, momentum=0.5, decay="cosine").plan(
        n=N, batch_size=20, epochs=3, noise_multiplier=1.0, delta=1e-5, neighboring="zero-out"
    ),
    "clip norm followed": DPSGD(PrivateQuantile(0.5, when="all along")).plan(
        n=N, batch_size=20, steps=7, noise_multiplier=1.0, delta=1e-5
    ),
}


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", NOISY)
@pytest.mark.thinned(2)
def test_a_seeded_run_goes_on_as_if_it_had_not_been_interrupted(
    name: str, steps: int, tmp_path: Path
) -> None:
    """To the last bit: batches, groups, clip norm and noise are those of the streams' next
    words.
    """
    path = tmp_path / "run.secret"
    whole = in_one_go(
        NOISY[name],
        sgd,
        noise_seed=0,
        ledger=Ledger(tmp_path / "whole", neighboring=NOISY[name].neighboring),
    )
    ledger = Ledger(tmp_path / "parts", neighboring=NOISY[name].neighboring)
    parts = in_two_parts(NOISY[name], sgd, path, steps, noise_seed=0, ledger=ledger)
    assert torch.equal(parts, whole)


def test_of_streams_without_a_seed_nothing_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.secret"
    private, model, optimizer = begin(NOISY["Poisson batches"], ledger=Ledger(tmp_path / "ledger"))
    with private:
        train(private, model, optimizer, 2)
        private.save(path)
    assert read_checkpoint(path)[0]["streams"] == []


def gradients_of_nothing(plan: Plan, path: Path, pause: int | None) -> Tensor:
    """What a run adds to weights whose gradients are all zero: minus the sum of its noise."""
    data = TensorDataset(torch.zeros(N, 1).double())

    def begin(**options: Any) -> tuple[PrivateTraining, nn.Linear, torch.optim.Optimizer]:
        model = nn.Linear(1, 4000, bias=False).double()
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return (
            dpoptim.attach(plan, model, optimizer, data, noise_seed=3, **options),
            model,
            optimizer,
        )

    private, model, optimizer = begin()
    with private:
        for (x,) in private.batches():
            model(x).sum(1).mean().backward()
            optimizer.step()
            if private.steps_done == pause:
                private.save(path)
                break
    if pause is not None:
        private, model, optimizer = begin(resume=path)
        with private:
            for (x,) in private.batches():
                model(x).sum(1).mean().backward()
                optimizer.step()
    return model.weight.detach().flatten()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("noise", ["tree", "tree-honaker", "toeplitz", "buffered-toeplitz"])
def test_correlated_noise_is_taken_back_across_a_pause(noise: Any, tmp_path: Path) -> None:
    """With a fresh noise state after the pause, nothing would take the noise before it back."""
    plan = DPFTRL(1.0, noise=noise).plan(
        n=N, batch_size=1, epochs=1, noise_multiplier=1.0, delta=1e-5, neighboring="zero-out"
    )
    spread = gradients_of_nothing(plan, tmp_path / "run.secret", None).std()
    paused = gradients_of_nothing(plan, tmp_path / "run.secret", 47).std()
    assert abs(float(paused / spread) - 1) < 0.08  # 4,000 entries: 5 standard deviations
    query = plan.query
    fresh = query.strategy.prefix_std(47)[-1] / query.strategy.prefix_std(60)[-1]
    assert math.hypot(1, float(fresh)) > 1.2  # what it would be


def test_seeded_noise_does_not_repeat_after_a_pause(tmp_path: Path) -> None:
    plan = DPSGD(1.0).plan(n=N, batch_size=N, steps=2, noise_multiplier=1.0, delta=1e-5)
    both = gradients_of_nothing(plan, tmp_path / "run.secret", 1)
    one = gradients_of_nothing(
        DPSGD(1.0).plan(n=N, batch_size=N, steps=1, noise_multiplier=1.0, delta=1e-5),
        tmp_path / "other.secret",
        None,
    )
    assert abs(float(torch.corrcoef(torch.stack([both - one, one]))[0, 1])) < 0.08


@pytest.mark.parametrize(
    "sampler", [PoissonSampling(0.2), FixedBatches(N, 7), FixedBatches(N, 7, "shuffled")]
)
def test_batches_that_were_drawn_are_kept(sampler: Sampler) -> None:
    """Who could have them drawn anew by restarting would choose who takes part."""
    queue = BatchQueue(sampler, KeyStream(), N, 100)
    ahead = queue.ahead()
    drawn = [next(ahead).tolist() for _ in range(13)]
    for _ in range(4):
        queue.released()
    restored = BatchQueue(sampler, KeyStream(), N, 100)
    restored.restore(queue.secret_state())
    again = [batch.tolist() for batch in restored.ahead()]
    assert len(again) == 96
    assert again[:9] == drawn[4:]
    if isinstance(sampler, FixedBatches):
        whole = drawn[:4] + again
        for start in range(0, 90, 9):  # 9 batches in a pass
            assert sorted(i for batch in whole[start : start + 9] for i in batch) == list(range(N))
            if sampler.order == "shuffled":
                assert whole[start : start + 9] == whole[:9]


def paid_plan(**options: Any) -> Plan:
    settings: dict[str, Any] = {
        "n": N,
        "batch_size": 10,
        "steps": 6,
        "noise_multiplier": 2.0,
        "delta": 1e-5,
    }
    return DPSGD(1.0).plan(**{**settings, **options})


def test_a_resumed_run_continues_its_own_charge(tmp_path: Path) -> None:
    path = tmp_path / "run.secret"
    ledger = Ledger(tmp_path / "ledger.sqlite")
    private, model, optimizer = begin(paid_plan(), ledger=ledger)
    with private:
        train(private, model, optimizer, 4)
        private.save(path)
    assert [(entry.state, entry.resumed) for entry in ledger.entries()] == [("open", 0)]
    private, model, optimizer = begin(
        paid_plan(), ledger=Ledger(tmp_path / "ledger.sqlite"), resume=path
    )
    with private:
        # of the whole run, as before
        assert private.spent().epsilon == paid_plan().guarantee.epsilon
        train(private, model, optimizer)
        assert private.steps_done == 6
        assert any("taken up again" in item.text for item in private.basis)
        with pytest.raises(dpoptim.PrivacyError, match="without a batch"):
            optimizer.step()
    assert [(entry.state, entry.resumed) for entry in ledger.entries()] == [("committed", 1)]
    with pytest.raises(LedgerError, match="completed"):
        begin(paid_plan(), ledger=ledger, resume=path)


def test_a_run_killed_after_its_last_save_ends_when_it_is_started_again(tmp_path: Path) -> None:
    """However often a supervisor starts it: it once raised, and was started again for ever."""
    path, ledger = tmp_path / "run.secret", Ledger(tmp_path / "ledger.sqlite")
    private, model, optimizer = begin(paid_plan(), ledger=ledger)
    train(private, model, optimizer)
    private.save(path)
    private.detach()  # as where it is killed, the `with` is not left
    trained = weights(model)
    for _ in range(2):
        private, model, optimizer = begin(paid_plan(), ledger=ledger, resume=path)
        with private:
            batches = private.batches()
            assert len(batches) == len(list(batches)) == 0
            with pytest.raises(dpoptim.PrivacyError, match="without a batch from"):
                private.backward(torch.ones(3, requires_grad=True))
            with pytest.raises(dpoptim.PrivacyError, match="planned steps are done"):
                next(private.batches())  # an outer loop over epochs, as ever
        assert torch.equal(weights(model), trained)
        assert [entry.state for entry in ledger.entries()] == ["committed"]


def test_what_cannot_be_resumed_says_why(tmp_path: Path) -> None:
    path = tmp_path / "run.secret"
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        begin(paid_plan(), resume=path)
    private, model, optimizer = begin(paid_plan(), ledger=Ledger(tmp_path / "ledger.sqlite"))
    with private:
        next(private.batches())
        with pytest.raises(dpoptim.PrivacyError, match="middle of a step"):
            private.save(path)
        assert not path.exists()
        train(private, model, optimizer, 2)
        private.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ValueError, match="charged to a ledger on disk"):
        begin(paid_plan(), resume=path)
    other = Ledger(tmp_path / "other.sqlite")
    with pytest.raises(ValueError, match="another ledger than the given one.*the run began on"):
        begin(paid_plan(), resume=path, ledger=other)
    assert other.entries() == []
    for other_plan in ({"noise_multiplier": 1.0}, {"delta": 1e-6}, {"batch_size": 13}):
        ((name, value),) = other_plan.items()
        with pytest.raises(ValueError, match=f"another plan: .*{name}=.* and {value} here"):
            begin(paid_plan(**other_plan), resume=path, ledger=Ledger(tmp_path / "ledger.sqlite"))
    torch.save({"weights": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="no checkpoint"):
        begin(paid_plan(), resume=path)


def test_saving_again_closes_a_file_that_was_open_to_others(tmp_path: Path) -> None:
    path = tmp_path / "run.secret"
    private, model, optimizer = begin(paid_plan())
    with private:
        private.save(path)
        path.chmod(0o644)
        train(private, model, optimizer, 1)
        private.save(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_keys_are_not_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coins' and the noise's keys come from os.urandom; no part of one may be written."""
    keys: list[bytes] = []

    def urandom(size: int) -> bytes:
        keys.append(bytes([len(keys) + 1]) * size if size == 32 else bytes(size))
        return keys[-1]

    monkeypatch.setattr("dpoptim.noise.stream.os.urandom", urandom)
    plan = DPFTRL(1.0).plan(
        n=N, batch_size=10, epochs=1, noise_multiplier=2.0, delta=1e-5, neighboring="zero-out"
    )
    private, model, optimizer = begin(plan)
    with private:
        train(private, model, optimizer, 2)
        private.save(tmp_path / "run.secret")
    content = (tmp_path / "run.secret").read_bytes()
    assert keys
    assert all(key[:8] not in content for key in keys if len(key) == 32)


def test_every_damaged_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "run.secret"
    private, model, optimizer = begin(PLANS["fixed batches in four passes"])
    with private:
        train(private, model, optimizer, 2)
        private.save(path)
    good = path.read_bytes()
    for place in range(0, len(good), max(1, len(good) // 50)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        with pytest.raises(ValueError, match="damaged|no checkpoint"):
            begin(PLANS["fixed batches in four passes"], resume=path)
    path.write_bytes(good[:-1])
    with pytest.raises(ValueError, match="damaged"):
        begin(PLANS["fixed batches in four passes"], resume=path)


def test_a_run_that_went_on_after_saving_is_completed(tmp_path: Path) -> None:
    """Its later steps were seen; the checkpoint would do them again on the same charge."""
    path, ledger = tmp_path / "run.secret", Ledger(tmp_path / "ledger.sqlite")
    private, model, optimizer = begin(paid_plan(), ledger=ledger)
    with private:
        train(private, model, optimizer, 2)
        private.save(path)
        train(private, model, optimizer, 5)
    with pytest.raises(LedgerError, match="completed"):
        begin(paid_plan(), ledger=ledger, resume=path)
    assert [entry.state for entry in ledger.entries()] == ["committed"]


def test_a_resumed_run_that_did_nothing_can_be_resumed_again(tmp_path: Path) -> None:
    path, ledger = tmp_path / "run.secret", Ledger(tmp_path / "ledger.sqlite")
    private, model, optimizer = begin(paid_plan(), ledger=ledger)
    with private:
        train(private, model, optimizer, 2)
        private.save(path)
    private, model, optimizer = begin(paid_plan(), ledger=ledger, resume=path)
    with private:
        private.save(tmp_path / "again.secret")
    assert [(entry.state, entry.resumed) for entry in ledger.entries()] == [("open", 0)]
    private, model, optimizer = begin(paid_plan(), ledger=ledger, resume=tmp_path / "again.secret")
    with private:
        train(private, model, optimizer)
    assert [(entry.state, entry.resumed) for entry in ledger.entries()] == [("committed", 1)]


def test_a_budget_for_one_run_is_enough(tmp_path: Path) -> None:
    path, budget = tmp_path / "run.secret", 1.2 * paid_plan().guarantee.epsilon
    ledger = Ledger(tmp_path / "ledger.sqlite", epsilon=budget, delta=1e-5)
    private, model, optimizer = begin(paid_plan(), ledger=ledger)
    with private:
        train(private, model, optimizer, 2)
        private.save(path)
    private, model, optimizer = begin(paid_plan(), ledger=ledger, resume=path)
    with private:
        train(private, model, optimizer)
    assert len(ledger.entries()) == 1


def test_what_the_first_part_was_stays_said(tmp_path: Path) -> None:
    path = tmp_path / "run.secret"
    parts: dict[str, Any] = {"partial_backward": True, "loss_reduction": "mean"}
    private, model, optimizer = begin(paid_plan(), noise_seed=1, **parts)
    with private:
        train(private, model, optimizer, 2)
        private.save(path)
    private, model, optimizer = begin(paid_plan(), resume=path)
    with private:
        train(private, model, optimizer)
        assert "seeded: not for release" in private.spent().notes
        said = [item.text for item in private.basis]
    assert any("seeded" in text for text in said)
    assert any("several backward passes" in text for text in said)


class Reordered(nn.Module):
    """The same parameters as two linear layers, registered in the other order."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(FEATURES, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.a(x) + self.b(x)
        return result


def test_another_training_is_refused_before_anything_changes(tmp_path: Path) -> None:
    path = tmp_path / "run.secret"
    _, data = problem()
    data = TensorDataset(data.tensors[0].float(), data.tensors[1])

    def start(
        model: nn.Module, optimizers: Any = None, rows: TensorDataset = data, **options: Any
    ) -> tuple[PrivateTraining, nn.Module]:
        made = [sgd(list(model.parameters()))] if optimizers is None else optimizers
        return dpoptim.attach(paid_plan(), model, made, rows, **options), model

    private, model = start(Reordered("ab"))
    with private:
        private.save(path)
    split = Reordered("ab")
    parts = [sgd(list(split.a.parameters())), sgd(list(split.b.parameters()))]  # type: ignore[union-attr]
    adams, whole = Reordered("ab"), Reordered("ab")
    cases: list[tuple[str, nn.Module, dict[str, Any]]] = [
        ("parameters", Reordered("ba"), {}),
        ("parameters", nn.Linear(FEATURES, CLASSES), {}),
        ("optimizers", split, {"optimizers": parts}),
        ("optimizers", adams, {"optimizers": [adam(list(adams.parameters()))]}),
        ("records", Reordered("ab"), {"rows": TensorDataset(*(t[:-1] for t in data.tensors))}),
        ("loss_reduction", whole, {"loss_reduction": "sum"}),
    ]
    for named, model, options in cases:
        before = weights(model).clone()
        with pytest.raises(ValueError, match=f"resume: the checkpoint was made with other {named}"):
            start(model, resume=path, **options)
        assert torch.equal(weights(model), before)


def test_a_checkpoint_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "run.secret"
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=np.linspace(0.1, 0.2, 3)[1])
    private = dpoptim.attach(paid_plan(), model, optimizer, data)
    with private:
        with pytest.raises(ValueError, match="plain Python numbers"):
            private.save(path)
        assert not path.exists()
        path.write_text("something else")
        with pytest.raises(OSError, match="no checkpoint; it stays as it is"):
            private.save(path)
        assert path.read_text() == "something else"


def test_a_changed_buffer_cannot_be_saved(tmp_path: Path) -> None:
    """Saved and loaded, it would look as if it had always been so, and leave with the state
    dict.
    """
    model = nn.Sequential(nn.Linear(FEATURES, CLASSES)).double()
    model.register_buffer("mean", torch.zeros(FEATURES))
    _, data = problem()
    with dpoptim.attach(paid_plan(), model, sgd(list(model.parameters())), data) as private:
        model.mean += 1  # type: ignore[operator]
        with pytest.raises(dpoptim.PrivacyError, match="buffer 'mean' was changed"):
            private.save(tmp_path / "run.secret")
        model.mean -= 1  # type: ignore[operator]


class Interrupted:
    """In place of the gate's noise: none, and at one call an interrupt half-way through."""

    def __init__(self, call: int) -> None:
        self.calls, self.call = 0, call

    def __call__(self, stream: Any, total: list[Tensor], deviation: float) -> None:
        self.calls += 1
        if self.calls == self.call:
            total[0][: len(total[0]) // 2] += 1000
            raise KeyboardInterrupt


@pytest.mark.one_in(2)
@pytest.mark.parametrize("call", [0, 1, 3, 6])
def test_an_interrupted_draw_is_done_again(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Error feedback must not take one residual twice, nor count a step that did not happen."""
    plan = DiceSGD(0.1).plan(
        n=N, batch_size=10, epochs=2, noise_multiplier=1.0, delta=1e-5, neighboring="zero-out"
    )
    monkeypatch.setattr("dpoptim.gate.planned.add_normal", Interrupted(0))
    whole = in_one_go(plan, sgd, noise_seed=0)
    monkeypatch.setattr("dpoptim.gate.planned.add_normal", Interrupted(call))
    private, model, optimizer = begin(plan, noise_seed=0)
    with private:
        for _ in range(2 if call else 1):
            with contextlib.suppress(KeyboardInterrupt):
                train(private, model, optimizer)
        assert private.steps_done == plan.steps
    torch.testing.assert_close(weights(model), whole, rtol=0, atol=1e-12)


def test_interrupted_correlated_noise_is_not_gone_on_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = DPFTRL(1.0).plan(
        n=N, batch_size=10, epochs=1, noise_multiplier=2.0, delta=1e-5, neighboring="zero-out"
    )
    private, model, optimizer = begin(plan)
    with private:
        train(private, model, optimizer, 2)
        private.save(tmp_path / "run.secret")
        with monkeypatch.context() as patch:

            def interrupted(*_: Any) -> None:
                raise KeyboardInterrupt

            patch.setattr("dpoptim.noise.correlated.strategy.fill_standard_normal", interrupted)
            with pytest.raises(KeyboardInterrupt):
                train(private, model, optimizer)
        with pytest.raises(dpoptim.PrivacyError, match="go on from a checkpoint"):
            train(private, model, optimizer)
    private, model, optimizer = begin(plan, resume=tmp_path / "run.secret")
    with private:
        train(private, model, optimizer)
        assert private.steps_done == plan.steps


def test_a_step_interrupted_after_its_release_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    private, model, optimizer = begin(paid_plan())

    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    with private:
        monkeypatch.setattr(BatchQueue, "released", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(private, model, optimizer)
        with pytest.raises(dpoptim.PrivacyError, match="just after its noisy sum was released"):
            next(private.batches())
        with pytest.raises(dpoptim.PrivacyError, match="just after its noisy sum was released"):
            optimizer.step()


@pytest.mark.parametrize("saved_again", [False, True])
def test_a_run_left_in_order_goes_on_from_its_last_step_alone(
    saved_again: bool, tmp_path: Path
) -> None:
    """What came after a save may be in use: going on from there would release it again."""
    path, ledger = tmp_path / "run.secret", Ledger(tmp_path / "ledger.sqlite")
    private, model, optimizer = begin(paid_plan(), ledger=ledger)
    train(private, model, optimizer, 2)
    private.save(path)
    with private:
        train(private, model, optimizer, 3)
    if saved_again:
        private.save(path)
        begun, _, _ = begin(paid_plan(), ledger=ledger, resume=path)
        assert begun.steps_done == 3
        return
    with pytest.raises(dpoptim.LedgerError, match=r"left in order after 3 releases; .* of 2, may"):
        begin(paid_plan(), ledger=ledger, resume=path)


@pytest.mark.parametrize("key", [None, bytes(32)])
def test_the_model_in_a_checkpoint_outlives_its_run(key: bytes | None, tmp_path: Path) -> None:
    """Killed after its last step, a run is completed, and nothing else may have kept its model."""
    path, ledger = tmp_path / "run.secret", Ledger(tmp_path / "ledger.sqlite")
    private, model, optimizer = begin(paid_plan(), ledger=ledger, checkpoint_key=key)
    train(private, model, optimizer, 4)
    private.save(path)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    train(private, model, optimizer)
    private.detach()
    with pytest.raises(dpoptim.LedgerError, match=r"was completed.*released_weights\(path\)"):
        begin(paid_plan(), ledger=ledger, checkpoint_key=key, resume=path)
    found = dpoptim.released_weights(path, checkpoint_key=key)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], value) for name, value in saved.items())
    with pytest.raises(ValueError, match="sealed|checkpoint_key"):
        dpoptim.released_weights(path, checkpoint_key=bytes([1] * 32))


def test_a_signal_between_a_release_and_its_update_saves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a handler saved there counted the step, and had lost its update."""
    private, model, optimizer = begin(paid_plan())
    honest, refused = ReleasedGradients.begin, []

    def signalled(*args: Any, **options: Any) -> None:
        with pytest.raises(dpoptim.PrivacyError, match="interrupted just after"):
            private.save(tmp_path / "run.secret")
        refused.append(private.steps_done)
        honest(*args, **options)

    monkeypatch.setattr(ReleasedGradients, "begin", signalled)
    with private:
        train(private, model, optimizer)
    assert refused == [*range(1, private.plan.steps + 1)]
    assert not (tmp_path / "run.secret").exists()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("buffers", [0, 2, 128])
def test_noise_is_taken_back_by_the_strategy_that_took_it(
    buffers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fitted otherwise when the run is resumed, it is refused before the charge is taken up."""
    plan = DPFTRL(0.1, buffers=buffers).plan(
        n=N, batch_size=20, epochs=4, noise_multiplier=1.0, delta=1e-5, neighboring="zero-out"
    )
    path, ledger = tmp_path / "run.secret", Ledger(tmp_path / "l.db", neighboring="zero-out")
    private, model, optimizer = begin(plan, ledger=ledger)
    with private:
        train(private, model, optimizer, 2)
        private.save(path)
    with monkeypatch.context() as patch:
        patch.setattr(BestStrategy, "made_for", lambda *given: RedrawnToeplitz(2))
        again = Plan.from_json(plan.to_json())  # as in another process
        with pytest.raises(ValueError, match="fitted to other numbers than where the run began"):
            begin(again, ledger=ledger, resume=path)
    assert [(entry.state, entry.resumed) for entry in ledger.entries()] == [("open", 0)]
    private, model, optimizer = begin(Plan.from_json(plan.to_json()), ledger=ledger, resume=path)
    with private:
        train(private, model, optimizer)
    assert private.steps_done == plan.steps
    ledger.close()


@pytest.mark.parametrize(
    "method",
    [
        DPSGD(0.1, noise_schedule=(4.0, 1.0)),
        DPSGD(ScaledClipNorm(0.1, every=1)),
        DPSGD(PrivateQuantile(0.5, when="all along")),
    ],
)
def test_a_resumed_run_tells_the_noise_of_its_last_release(method: DPSGD, tmp_path: Path) -> None:
    plan = method.plan(n=N, batch_size=N, steps=6, noise_multiplier=1.0, delta=1e-5)
    private, model, optimizer = begin(plan, noise_seed=0)
    first = private.noise_std, private._steps.noise_shares
    with private:
        train(private, model, optimizer, 5)
        private.save(tmp_path / "run.secret")
    told = private.noise_std, private._steps.noise_shares
    assert told != first
    private, *_ = begin(plan, noise_seed=0, resume=tmp_path / "run.secret")
    with private:
        assert (private.noise_std, private._steps.noise_shares) == told
