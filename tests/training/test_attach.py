"""The training loop of the README works as printed, and every way of leaving it is caught."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dpoptim
from dpoptim.training.assumptions import START
from dpoptim.training.private_training import PrivateTraining
from dpoptim.training.trials.isolation import choose_isolation
from dpoptim.training.trials.probe import positions_per_layer

N, FEATURES, CLASSES = 300, 6, 3


def problem(seed: int = 0) -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    x = torch.randn(N, FEATURES)
    return model, TensorDataset(x, (x @ torch.randn(FEATURES, CLASSES)).argmax(1))


def plan(
    steps: int = 5, batch_size: int = 30, noise_multiplier: float = 1.0, **options: Any
) -> dpoptim.Plan:
    clip_norm = options.pop("clip_norm", 1.0)
    return dpoptim.DPSGD(clip_norm=clip_norm).plan(
        n=N,
        batch_size=batch_size,
        steps=steps,
        noise_multiplier=noise_multiplier,
        delta=1e-5,
        **options,
    )


def loop(
    private: PrivateTraining, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any
) -> None:
    for x, y in private.batches(**options):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3
    ),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_noise_and_clipping_it_is_plain_training(name: str) -> None:
    """Every record in every step, C infinite, z = 0: the trajectory of an ordinary loop, whatever
    the optimizer.
    """
    model, data = problem()
    plain, _ = problem()
    optimizer = OPTIMIZERS[name](model.parameters())
    reference = OPTIMIZERS[name](plain.parameters())
    no_privacy = plan(batch_size=N, noise_multiplier=0.0, clip_norm=math.inf)
    with dpoptim.attach(no_privacy, model, optimizer, data) as private:
        loop(private, model, optimizer, physical_batch_size=64)
        assert math.isinf(private.spent().epsilon)
        assert "no privacy" in str(private.spent())
    for _ in range(5):
        F.cross_entropy(plain(data.tensors[0]), data.tensors[1]).backward()
        reference.step()
        reference.zero_grad()
    torch.testing.assert_close(parameters(model), parameters(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_moves_and_leaves_no_gradient(name: str) -> None:
    model, data = problem()
    optimizer = OPTIMIZERS[name](model.parameters())
    before = parameters(model)
    with dpoptim.attach(plan(), model, optimizer, data) as private:
        loop(private, model, optimizer)
        assert private.steps_done == 5
    assert not torch.equal(parameters(model), before)
    assert all(p.grad is None for p in model.parameters())


def test_gradients_stay_none_between_backward_and_step() -> None:
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan(), model, optimizer, data) as private:
        for x, y in private.batches():
            F.cross_entropy(model(x), y).backward()
            assert all(p.grad is None for p in model.parameters())
            optimizer.step()


def test_pieces_move_the_model_once() -> None:
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    finished = []
    with dpoptim.attach(plan(steps=4, batch_size=100), model, optimizer, data) as private:
        for x, y in private.batches(physical_batch_size=16):
            assert len(x) <= 16
            before = parameters(model)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            finished.append(private.finished_step)
            assert private.finished_step != torch.equal(parameters(model), before)
    assert sum(finished) == 4
    assert len(finished) > 4


def test_the_cut_does_not_change_the_update() -> None:
    moved = []
    for size in (None, 7, 64):
        model, data = problem()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with dpoptim.attach(plan(batch_size=100), model, optimizer, data, noise_seed=3) as private:
            loop(private, model, optimizer, physical_batch_size=size)
        moved.append(parameters(model))
    torch.testing.assert_close(moved[0], moved[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(moved[0], moved[2], rtol=0, atol=1e-6)


def test_noise_has_the_planned_size_and_every_entry_gets_it() -> None:
    """A loss without gradient: what moves the model is the noise alone, std z C / b on every
    parameter.
    """
    torch.manual_seed(0)
    model = nn.Linear(200, 500)
    data = TensorDataset(torch.randn(N, 200))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = parameters(model)
    with dpoptim.attach(
        plan(steps=1, noise_multiplier=1.5, clip_norm=2.0), model, optimizer, data
    ) as private:
        for (x,) in private.batches():
            (model(x) * 0).sum().backward()
            optimizer.step()
    noise = (parameters(model) - before).double() * 30
    count = noise.numel()
    assert int((noise == 0).sum()) < 5  # in float32, noise below 1e-8 of a weight is lost
    assert abs(float(noise.square().sum()) / 9.0 - count) < 5 * math.sqrt(2 * count)


def test_empty_batches_take_a_noise_only_step() -> None:
    model, data = problem()
    before = parameters(model)
    tiny = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=10**9, batch_size=1, steps=6, noise_multiplier=1.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = []
    with dpoptim.attach(tiny, model, optimizer, data) as private:
        for x, y in private.batches():
            sizes.append(len(x))
            previous = parameters(model)
            (1e6 * F.cross_entropy(model(x), y)).backward()
            optimizer.step()
            assert not torch.equal(parameters(model), previous)
        assert private.steps_done == 6
    assert sizes == [1] * 6
    # the placeholder's gradient, up to 1e6, counted as zero
    assert float((parameters(model) - before).norm()) < 100


def test_closures_run_before_the_gate_writes() -> None:
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan(), model, optimizer, data) as private:
        for x, y in private.batches():

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            before = parameters(model)
            assert isinstance(optimizer.step(closure), Tensor)
            assert not torch.equal(parameters(model), before)
        assert private.steps_done == 5


def test_schedulers_follow_finished_steps() -> None:
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    with dpoptim.attach(plan(steps=3, batch_size=100), model, optimizer, data) as private:
        for x, y in private.batches(physical_batch_size=20):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if private.finished_step:
                scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)


class Records(Dataset[tuple[Tensor, int]]):
    """A map-style data set that is no TensorDataset."""

    def __init__(self, data: TensorDataset) -> None:
        self.x, self.y = data.tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], int(self.y[index])


# torch, where there is one processor
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_that_run_ahead_deliver_the_same_steps(workers: int) -> None:
    results = []
    for dataset_of in (lambda data: data, Records):
        model, data = problem()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with dpoptim.attach(
            plan(batch_size=100), model, optimizer, dataset_of(data), noise_seed=1
        ) as private:
            loop(private, model, optimizer, physical_batch_size=32, num_workers=workers)
            assert private.steps_done == 5
        results.append(parameters(model))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_loop_left_early_goes_on_where_it_stopped() -> None:
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan(steps=6, batch_size=100), model, optimizer, data) as private:
        for i, (x, y) in enumerate(private.batches(physical_batch_size=30)):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if i == 4:
                break  # in the middle of a step
        loop(private, model, optimizer)
        assert private.steps_done == 6
        assert "0 of 6" in private.remaining()


def test_spent_is_the_whole_reservation() -> None:
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    promise = plan()
    with (
        dpoptim.Ledger() as ledger,
        dpoptim.attach(promise, model, optimizer, data, ledger=ledger) as private,
    ):
        assert private.spent().epsilon == 0
        assert ledger.entries() == []
        for x, y in private.batches():
            F.cross_entropy(model(x), y).backward()
            assert ledger.entries() == []
            optimizer.step()
            break
        assert private.spent() == promise.guarantee
        assert private.spent(delta=1e-7).epsilon > promise.guarantee.epsilon
        (entry,) = ledger.entries()
        assert entry.event == promise.event
        assert entry.id == private.reservation


def test_a_refused_reservation_moves_nothing() -> None:
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = parameters(model)
    with dpoptim.Ledger(epsilon=0.1, delta=1e-5) as ledger:
        with pytest.raises(Exception, match="0.1"):
            dpoptim.attach(plan(), model, optimizer, data, ledger=ledger)
        assert ledger.entries() == []
    assert torch.equal(parameters(model), before)
    assert "forward" not in vars(model[0])


def test_seeded_runs_repeat_and_say_so() -> None:
    results = []
    for _ in range(2):
        model, data = problem()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with dpoptim.attach(plan(), model, optimizer, data, noise_seed=5) as private:
            loop(private, model, optimizer)
            assert "seeded: not for release" in str(private.spent())
            assert any(item.kind == "unproven" for item in private.basis)
        results.append(parameters(model))
    assert torch.equal(*results)


@pytest.mark.parametrize(("reduction", "trusted"), [("mean", True), ("sum", False)])
def test_the_factor_of_a_mean_is_named_among_what_is_trusted(reduction: Any, trusted: bool) -> None:
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan(), model, optimizer, data, loss_reduction=reduction) as private:
        assert any("factor of a mean" in item.text for item in private.basis) == trusted


@pytest.mark.parametrize("isolation", ["rules", "alone"])
def test_somebody_must_vouch_for_the_first_weights(isolation: Any) -> None:
    """Trained on the same records without privacy, they would say all that noise is to hide."""
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan(), model, optimizer, data, isolation=isolation) as private:
        assert any(item.text == START and item.kind == "trusted" for item in private.basis)


class WritesIntoItsWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.layer.weight.add_(x.mean(0))
        return self.layer(x)


def test_a_forward_pass_that_writes_into_parameters_is_refused() -> None:
    """The mean of the batch would leave with the weights, without noise; as for buffers and frozen
    parameters.
    """
    _, data = problem()
    model = WritesIntoItsWeights().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(dpoptim.PrivacyError, match="layer.weight.*changed between the delivery"),
        dpoptim.attach(plan(), model, optimizer, data) as private,
    ):
        for i, (x, y) in enumerate(private.batches()):
            model.train(i > 0)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            assert i == 0
            with torch.no_grad():
                model.layer.weight.clamp_(-1, 1)  # after the step, anything goes


@pytest.mark.parametrize("way", ["a later microbatch", "leaving the loop", "another loop"])
def test_writes_into_parameters_are_found_however_the_batch_ends(way: str) -> None:
    _, data = problem()
    model = WritesIntoItsWeights().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        with dpoptim.attach(plan(batch_size=N), model, optimizer, data) as private:
            for _ in range(2):
                for i, (x, y) in enumerate(private.batches(physical_batch_size=100)):
                    model.train(i == 0)
                    F.cross_entropy(model(x), y).backward()
                    if way != "a later microbatch":
                        break
                    if private.steps_done:
                        optimizer.step()
                if way == "leaving the loop":
                    break

    with pytest.raises(dpoptim.PrivacyError, match="layer.weight.*changed between the delivery"):
        train()


def test_a_forked_process_cannot_go_on_with_the_run() -> None:
    """Parent and child would both release the same sums, on one charge."""
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan(), model, optimizer, data) as private:
        for i, (x, y) in enumerate(private.batches()):
            F.cross_entropy(model(x), y).backward()
            if i == 1:
                child = os.fork()
                if child == 0:
                    try:
                        optimizer.step()
                    except dpoptim.PrivacyError as error:
                        os._exit(7 if "forked" in str(error) else 8)
                    except BaseException:
                        os._exit(9)
                    os._exit(0)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            optimizer.step()


def test_global_seeds_do_not_touch_the_noise() -> None:
    results = []
    for _ in range(2):
        model, data = problem()
        torch.manual_seed(7)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with dpoptim.attach(plan(), model, optimizer, data) as private:
            loop(private, model, optimizer)
        results.append(parameters(model))
    assert not torch.equal(*results)


def test_training_resumes_after_detaching_as_if_nothing_had_been() -> None:
    model, data = problem()
    keys, kind = list(model.state_dict()), type(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan(), model, optimizer, data) as private:
        assert list(model.state_dict()) == keys
        assert type(model) is kind
        loop(private, model, optimizer)
    F.cross_entropy(model(data.tensors[0]), data.tensors[1]).backward()
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step()
    with pytest.raises(dpoptim.PrivacyError, match=r"detached.*with private:"):
        next(private.batches())


# ---- refusals -----------------------------------------------------------------------------------


def attached(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, PrivateTraining]:
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, dpoptim.attach(plan(**options), model, optimizer, data)


def test_a_step_without_a_batch() -> None:
    _, optimizer, _ = attached()
    with pytest.raises(dpoptim.PrivacyError, match="without a batch"):
        optimizer.step()


def test_a_second_step_for_a_batch() -> None:
    model, optimizer, private = attached()
    x, y = next(private.batches())
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(dpoptim.PrivacyError, match="without a batch"):
        optimizer.step()


def test_a_forgotten_step() -> None:
    model, _, private = attached()
    with pytest.raises(dpoptim.PrivacyError, match=r"optimizer.step\(\) was not called"):
        for x, y in private.batches():
            F.cross_entropy(model(x), y).backward()


def test_a_foreign_gradient() -> None:
    model, optimizer, private = attached()
    next(private.batches())
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = parameters(model)
    with pytest.raises(dpoptim.PrivacyError, match="'0.weight' has a .grad"):
        optimizer.step()
    assert torch.equal(parameters(model), before)


def test_a_batch_from_another_loader() -> None:
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan(), model, optimizer, data):
        for x, y in DataLoader(data, batch_size=32):
            with pytest.raises(dpoptim.PrivacyError, match="did not deliver"):
                F.cross_entropy(model(x), y).backward()
            break


def test_parameters_that_are_unfrozen_after_attaching() -> None:
    model, data = problem()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with dpoptim.attach(plan(), model, optimizer, data) as private:
        x, y = next(private.batches())
        model[0].weight.requires_grad_(True)
        with pytest.raises(dpoptim.PrivacyError, match="unfrozen"):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        model[0].weight.grad = None
        model[0].weight.requires_grad_(False)


def test_the_model_may_be_frozen_while_another_learns_through_it(tmp_path: Path) -> None:
    """As a GAN's critic is, in the loops of many; also when the run is saved, and at its end."""
    model, data = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = torch.nn.Linear(2, 6)
    with dpoptim.attach(plan(), model, optimizer, data) as private:
        for x, y in private.batches():
            model.requires_grad_(True)
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
            model.requires_grad_(False)
            F.cross_entropy(model(before(torch.ones(4, 2))), torch.zeros(4).long()).backward()
            private.save(tmp_path / "state")
    assert before.weight.grad is not None
    assert private.steps_done == plan().steps


def test_what_is_unfrozen_or_written_while_the_model_is_frozen_is_refused() -> None:
    model, data = problem()
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with dpoptim.attach(plan(), model, optimizer, data) as private:
        x, y = next(private.batches())
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
        model.requires_grad_(False)
        model[0].bias.requires_grad_(True)
        with pytest.raises(dpoptim.PrivacyError, match="'0.bias' was unfrozen"):
            private.save("unused")
        model.requires_grad_(False)
        kept = model[0].bias.detach().clone()
        model[0].bias.data += 1
        with pytest.raises(dpoptim.PrivacyError, match="'0.bias' was changed"):
            private.save("unused")
        model[0].bias.data.copy_(kept)


def test_parameters_outside_the_optimizer() -> None:
    model, data = problem()
    with pytest.raises(dpoptim.PrivacyError, match="'2.weight' .*not in the optimizer"):
        dpoptim.attach(plan(), model, torch.optim.SGD(model[0].parameters(), lr=0.1), data)
    other = nn.Linear(2, 2)
    with pytest.raises(dpoptim.PrivacyError, match="not the model's"):
        dpoptim.attach(
            plan(), model, torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1), data
        )


def test_what_cannot_be_made_private_is_refused_by_name() -> None:
    model, data = problem()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(dpoptim.PrivacyError, match="SparseAdam takes sparse gradients"):
        dpoptim.attach(plan(), model, torch.optim.SparseAdam(model.parameters()), data)
    with pytest.raises(dpoptim.PrivacyError, match="LBFGS"):
        dpoptim.attach(plan(), model, torch.optim.LBFGS(model.parameters()), data)
    with pytest.raises(dpoptim.PrivacyError, match="DataParallel"):
        dpoptim.attach(plan(), nn.DataParallel(model), sgd, data)
    with pytest.raises(ValueError, match="loss_reduction"):
        dpoptim.attach(plan(), model, sgd, data, loss_reduction="max")
    with pytest.raises(TypeError, match="plan must be"):
        dpoptim.attach(1.0, model, sgd, data)
    with pytest.raises(TypeError, match="got a DataLoader"):
        dpoptim.attach(plan(), model, sgd, DataLoader(data))
    with pytest.raises(TypeError, match=r"got SGD. Fix: attach\(plan, model, optimizer, train_set"):
        dpoptim.attach(plan(), sgd, model, data)
    with pytest.raises(TypeError, match="optimizer must be"):
        dpoptim.attach(plan(), model, {"sgd": sgd}, data)
    with pytest.raises(TypeError, match="ledger must be"):
        dpoptim.attach(plan(), model, sgd, data, ledger="file.sqlite")
    with pytest.raises(TypeError, match="lerning"):
        dpoptim.attach(plan(), model, sgd, data, lerning=1)  # a misspelt keyword
    with pytest.raises(ValueError, match="empty"):
        dpoptim.attach(plan(), model, sgd, TensorDataset(torch.zeros(0, FEATURES)))
    with pytest.raises(ValueError, match="physical_batch_size"):
        next(dpoptim.attach(plan(), model, sgd, data).batches(physical_batch_size=0))


def test_n_is_compared_only_where_it_is_public() -> None:
    model, data = problem()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    half = TensorDataset(*(t[:150] for t in data.tensors))
    dpoptim.attach(plan(), model, sgd, half).detach()  # add-or-remove-one: n is nominal
    for relation in ("zero-out", "replace-one"):
        with pytest.raises(ValueError, match=f"150 records but .*n=300; under {relation}"):
            dpoptim.attach(plan(neighboring=relation), model, sgd, half)


def test_parameters_added_to_the_optimizer_later() -> None:
    model, optimizer, private = attached()
    head = nn.Linear(CLASSES, CLASSES)
    optimizer.add_param_group({"params": head.parameters()})
    x, y = next(private.batches())
    F.cross_entropy(head(model(x)), y).backward(inputs=[*model.parameters()])
    before = parameters(head)
    with pytest.raises(dpoptim.PrivacyError, match="not the model's"):
        optimizer.step()
    assert torch.equal(parameters(head), before)


def test_restarting_the_loop_delivers_the_same_batch() -> None:
    _, _, private = attached()
    x, _ = next(private.batches())
    for _ in range(3):
        again, _ = next(private.batches())
        assert torch.equal(x, again)


def test_two_loops_at_once() -> None:
    _, _, private = attached()
    first = private.batches(physical_batch_size=1)
    next(first)
    next(private.batches(physical_batch_size=1))
    with pytest.raises(dpoptim.PrivacyError, match="one loop over it at a time"):
        next(first)


def test_skipping_a_loss_that_is_not_finite() -> None:
    """The usual guard would let one record remove all others of its batch."""
    _, optimizer, private = attached()
    with pytest.raises(dpoptim.PrivacyError, match="also when they are not finite"):
        for _ in private.batches():
            optimizer.step()


def test_a_subclass_of_tensor_dataset_keeps_its_items() -> None:
    class Shifted(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            x, y = super().__getitem__(index)
            return x + 100, y

    model, data = problem()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan(), model, sgd, Shifted(*data.tensors)) as private:
        x, _ = next(private.batches())
        assert float(x.min()) > 50


def test_partial_backward_is_listed_as_trust() -> None:
    model, data = problem()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan(), model, sgd, data, partial_backward=True) as private:
        assert any("disjoint" in item.text and item.kind == "trusted" for item in private.basis)


def test_remaining_after_the_end() -> None:
    model, data = problem()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan(), model, sgd, data) as private:
        loop(private, model, sgd)
    assert "0 of 5" in private.remaining()


def test_attaching_twice_says_so() -> None:
    model, data = problem()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        dpoptim.attach(plan(), model, sgd, data),
        pytest.raises(dpoptim.PrivacyError, match="attached elsewhere"),
    ):
        dpoptim.attach(plan(), model, sgd, data)


@pytest.mark.parametrize("isolation", ["rules", "vmap"])
def test_a_forward_pass_around_layers_is_served_and_put_back(isolation: Any) -> None:
    """As other libraries give models; around a layer with parameters of its own, no rule would
    know.
    """
    found = []
    for wrapped in (False, True):
        model, data = problem()
        own = type(model).forward.__get__(model)
        if wrapped:
            own = model.forward = lambda x, own=own: own(2 * x)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"noise_seed": 3, "isolation": isolation}
        doubled = data if wrapped else TensorDataset(2 * data.tensors[0], data.tensors[1])
        with dpoptim.attach(plan(), model, sgd, doubled, **options) as private:
            loop(private, model, sgd)
        assert vars(model).get("forward") is (own if wrapped else None)
        found.append(parameters(model))
    torch.testing.assert_close(found[-1], found[0])


def test_positions_are_counted_on_made_up_inputs() -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each, self.last = nn.Linear(6, 4), nn.Linear(4, 2)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.drop(self.each(x)).mean(1))

    data = TensorDataset(torch.full((10, 7, 6), math.nan), torch.zeros(10))
    model = Sequence()
    assert positions_per_layer(model, choose_isolation(model, data).sample) == {
        "each": 7,
        "last": 1,
    }
    other = TensorDataset(torch.zeros(10, 3))  # the model raises on that shape
    assert positions_per_layer(model, choose_isolation(model, other).sample) == {}


def test_several_optimizers_share_out_one_release() -> None:
    """Parts of a model, each with an optimizer of its own, move as under one, whichever steps
    first.
    """
    whole, data = problem()
    one = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    with dpoptim.attach(plan(), whole, one, data, noise_seed=5) as private:
        loop(private, whole, one, physical_batch_size=8)
    for first, second in ((0, 1), (1, 0)):
        model, _ = problem()
        parts = [torch.optim.SGD(model[i].parameters(), lr=0.1, momentum=0.9) for i in (0, 2)]  # type: ignore[index]
        with dpoptim.attach(plan(), model, parts, data, noise_seed=5) as private:
            for x, y in private.batches(physical_batch_size=8):
                F.cross_entropy(model(x), y).backward()
                parts[first].step()
                parts[second].step()
            assert private.steps_done == 5
        torch.testing.assert_close(parameters(model), parameters(whole))
        assert all(p.grad is None for p in model.parameters())


def test_gradients_written_between_two_optimizers_are_found_by_value() -> None:
    """Writes through ``.data`` move no version counter."""
    model, data = problem()
    parts = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]  # type: ignore[index]
    with (
        pytest.raises(dpoptim.PrivacyError, match="did not come through the gate"),
        dpoptim.attach(plan(), model, parts, data) as private,
    ):
        for x, y in private.batches():
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            parts[0].step()
            gradient = model[2].weight.grad  # type: ignore[index]
            gradient.data.copy_(x[:1].mean().expand_as(gradient))  # type: ignore[union-attr,arg-type]
            parts[1].step()


def test_an_optimizer_that_skips_a_step_loses_its_share() -> None:
    model, data = problem()
    parts = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]  # type: ignore[index]
    before = parameters(model[2])  # type: ignore[index]
    with dpoptim.attach(plan(), model, parts, data) as private:
        for x, y in private.batches():
            F.cross_entropy(model(x), y).backward()
            parts[0].step()
        assert torch.equal(parameters(model[2]), before)  # type: ignore[index]
        parts[1].step()  # its share of the last release is still there
        assert not torch.equal(parameters(model[2]), before)  # type: ignore[index]
        with pytest.raises(dpoptim.PrivacyError, match="without a batch"):
            parts[1].step()


def test_optimizers_must_hold_each_parameter_once() -> None:
    model, data = problem()
    first, both = (
        torch.optim.SGD(model[0].parameters(), lr=0.1),
        torch.optim.SGD(model.parameters(), lr=0.1),
    )  # type: ignore[index]
    with pytest.raises(dpoptim.PrivacyError, match="in two optimizers"):
        dpoptim.attach(plan(), model, [first, both], data)
    with pytest.raises(dpoptim.PrivacyError, match="not in the optimizer"):
        dpoptim.attach(plan(), model, [first], data)
    for nothing in ([], "adam", [None]):
        with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer"):
            dpoptim.attach(plan(), model, nothing, data)  # type: ignore[arg-type]


def test_the_second_optimizer_finds_what_the_gate_wrote_or_nothing() -> None:
    model, data = problem()
    parts = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]  # type: ignore[index]
    weight = model[2].weight  # type: ignore[index]
    with dpoptim.attach(plan(), model, parts, data) as private:
        for number, (x, y) in enumerate(private.batches()):
            if number == 3:
                break
            F.cross_entropy(model(x), y).backward()
            parts[0].step()
            before = weight.clone()
            if number == 0:
                weight.grad = torch.full_like(weight, 1000.0)
                message = "did not come through the gate"
            elif number == 1:
                weight.grad.add_(x.mean())
                message = "did not come through the gate"
            else:
                parts[1].add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
                message = "trainable parameters that are not the model's"
            with pytest.raises(dpoptim.PrivacyError, match=message):
                parts[1].step()
            assert torch.equal(weight, before)
            weight.grad = None


def test_several_optimizers_while_the_clip_norm_is_measured() -> None:
    model, data = problem()
    parts = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]  # type: ignore[index]
    quantile = plan(clip_norm=dpoptim.PrivateQuantile(0.5, share=0.5), batch_size=200)
    moved = []
    with dpoptim.attach(quantile, model, parts, data) as private:
        for x, y in private.batches():
            before = parameters(model)
            F.cross_entropy(model(x), y).backward()
            for optimizer in parts:
                optimizer.step()
            moved.append(not torch.equal(parameters(model), before))
            assert moved[-1] == private.finished_step
    assert len(moved) == 5
    assert any(moved)
    assert not moved[0]
