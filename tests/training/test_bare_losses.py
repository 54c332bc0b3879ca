"""Losses that a loop differentiates by itself are read as those that it hands over."""

import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim

N, FEATURES, STEPS = 60, 4, 3
HONEST = torch.autograd.backward
Reduce = Callable[[Tensor], Tensor]


def plan() -> dpoptim.Plan:
    return dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=20, steps=STEPS, noise_multiplier=0.0, delta=1e-5
    )


def problem() -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 3)
    data = TensorDataset(torch.randn(N, FEATURES), torch.randint(0, 3, (N,)))
    return model, torch.optim.SGD(model.parameters(), lr=0.5), data


def trained(reduce: Reduce, *, bare: bool, **options: Any) -> Tensor:
    model, optimizer, data = problem()
    with dpoptim.attach(plan(), model, optimizer, data, noise_seed=1, **options) as private:
        for x, y in private.batches():
            loss = reduce(F.cross_entropy(model(x), y, reduction="none"))
            loss.backward() if bare else private.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("reduce", [Tensor.mean, Tensor.sum, lambda losses: 0.5 * losses.mean()])
def test_means_and_sums_are_what_they_are(reduce: Reduce) -> None:
    assert torch.equal(trained(reduce, bare=True), trained(reduce, bare=False))


@pytest.mark.parametrize("bare", [True, False])
def test_means_that_were_divided_as_for_accumulation_are_named(
    bare: bool, recwarn: pytest.WarningsRecorder
) -> None:
    """Gradients a quarter as large would be clipped as they are, and the noise would stay."""
    warnings.simplefilter("always")
    for reduce in (Tensor.mean, lambda losses: losses.mean() * 0.5, Tensor.sum):
        trained(reduce, bare=bare)
    assert not [each for each in recwarn if "divided" in str(each.message)]
    trained(lambda losses: losses.mean() / 4, bare=bare)
    (told,) = [str(each.message) for each in recwarn if "divided" in str(each.message)]
    assert "private.batches(physical_batch_size=...)" in told
    assert bare or recwarn[-1].filename == __file__


def test_a_sum_is_no_mean() -> None:
    each = trained(lambda losses: losses, bare=False)
    torch.testing.assert_close(trained(Tensor.sum, bare=True), each)


@pytest.mark.parametrize(
    "reduce",
    [
        lambda losses: losses.sum() / 20,
        lambda losses: losses.sum() / len(losses),
        lambda losses: losses[1:].mean(),
        lambda losses: (losses * (losses > 0.5)).sum() / (losses > 0.5).sum(),
    ],
    ids=["a constant", "the batch's length", "a mean of others", "a count"],
)
def test_what_a_handed_over_loss_may_not_be_is_refused(reduce: Reduce) -> None:
    for bare in (True, False):
        with pytest.raises(dpoptim.PrivacyError, match="Fix: "):
            trained(reduce, bare=bare)


@pytest.mark.parametrize(
    "reduce",
    [
        lambda losses: losses.mean().exp().log(),
        lambda losses: losses.mean() + (losses * (losses > 1)).sum() / (losses > 1).sum(),
        lambda losses: torch.stack([losses[:5].mean(), losses[5:].mean()]).max(),
        lambda losses: sum(losses.unbind()) / losses.detach().sum(),
        lambda losses: losses.logsumexp(0, keepdim=True),
    ],
    ids=["no sum", "a count in one term", "worst group", "one by one, by a count", "one entry"],
)
@pytest.mark.parametrize("bare", [True, False])
def test_what_the_graph_does_not_show_is_no_mean(reduce: Reduce, bare: bool) -> None:
    with pytest.raises(dpoptim.PrivacyError, match=r"Fix: (?=.*(loss=|one loss|own dice))"):
        trained(reduce, bare=bare)


def test_what_the_graph_does_not_show_may_be_said() -> None:
    def reduce(losses: Tensor) -> Tensor:
        return losses.mean().exp().log()

    torch.testing.assert_close(
        trained(reduce, bare=True, loss_reduction="mean"), trained(Tensor.mean, bare=True)
    )


def test_what_is_refused_has_moved_nothing_and_is_not_charged() -> None:
    model, optimizer, data = problem()
    before = model.weight.detach().clone()
    ledger = dpoptim.Ledger()
    noisy = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=20, steps=STEPS, noise_multiplier=1.0, delta=1e-5
    )
    with dpoptim.attach(noisy, model, optimizer, data, ledger=ledger) as private:
        x, y = next(private.batches())
        loss = F.cross_entropy(model(x), y, reduction="none").sum() / 20
        with pytest.raises(dpoptim.PrivacyError, match="a sum over the batch"):
            loss.backward()
        assert private.steps_done == 0
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
    assert not torch.equal(model.weight, before)


def test_a_number_stays_the_same() -> None:
    numbers = iter([0.1, 0.1, 0.2])
    with pytest.raises(dpoptim.PrivacyError, match="another number in this batch"):
        trained(lambda losses: losses.mean() * next(numbers), bare=True)


def test_a_sum_by_a_number_that_was_declared_is_served() -> None:
    def reduce(losses: Tensor) -> Tensor:
        return losses.sum() / 20

    options = {"loss_reduction": "sum"}
    ours = trained(reduce, bare=True, **options)
    assert torch.equal(ours, trained(reduce, bare=False, **options))


@pytest.mark.parametrize("bare", [True, False])
def test_losses_with_weights_of_their_own_are_refused(bare: bool) -> None:
    model, optimizer, data = problem()
    temperature = nn.Parameter(torch.ones(()))
    with (
        dpoptim.attach(plan(), model, optimizer, data) as private,
        pytest.raises(dpoptim.PrivacyError, match="outside of the model"),
    ):
        x, y = next(private.batches())
        loss = F.cross_entropy(model(x) * temperature, y)
        loss.backward() if bare else private.backward(loss)


def test_weights_that_are_not_named_get_no_gradient() -> None:
    model, optimizer, data = problem()
    temperature = nn.Parameter(torch.ones(()))
    with dpoptim.attach(plan(), model, optimizer, data) as private:
        for x, y in private.batches():
            loss = F.cross_entropy(model(x) * temperature, y)
            loss.backward(inputs=[*model.parameters()])
            optimizer.step()
    assert temperature.grad is None


@pytest.mark.parametrize("bare", [True, False])
def test_losses_of_several_records_are_refused(bare: bool) -> None:
    """Also where another model's loss comes first."""
    model, optimizer, data = problem()
    other = nn.Linear(2, 2)
    with (
        dpoptim.attach(plan(), model, optimizer, data) as private,
        pytest.raises(dpoptim.SamplesInteractError, match="what the model returned for others"),
    ):
        x, y = next(private.batches())
        other(torch.ones(5, 2)).sum().backward()
        scores = model(x)
        losses = F.cross_entropy(scores - scores.mean(0), y, reduction="none")
        losses.mean().backward() if bare else private.backward(losses.mean())


def test_losses_of_other_models_are_not_looked_at() -> None:
    """Not even where rows are open, nor those that are given what to multiply by."""
    model, optimizer, data = problem()
    other, later = nn.Linear(2, 2), nn.Linear(2, 2)
    with dpoptim.attach(plan(), model, optimizer, data) as private:
        for x, y in private.batches():
            (other(torch.ones(5, 2)).sum() / 7 * (1 + private.steps_done)).backward()
            later(torch.ones(5, 2)).backward(torch.ones(5, 2))
            sums = [each(torch.ones(5, 2)).sum() for each in (other, later)]
            torch.autograd.backward(iter(sums))
            edge = torch.autograd.graph.get_gradient_edge(other(torch.ones(5, 2)).sum())
            torch.autograd.backward([edge])
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert other.weight.grad is not None
    assert later.weight.grad is not None


def test_what_other_threads_differentiate_changes_nothing() -> None:
    """While a backward pass of the run is under way in this one."""
    other = nn.Linear(2, 2)

    def elsewhere() -> None:
        (other(torch.ones(5, 2)).sum() / 7).backward()

    def reduce(losses: Tensor) -> Tensor:
        def meanwhile(g: Tensor) -> None:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()

        losses.register_hook(meanwhile)
        return losses.sum()

    assert torch.equal(trained(reduce, bare=True), trained(Tensor.sum, bare=True))
    assert other.weight.grad is not None


def test_nothing_is_left_behind() -> None:
    one, optimizer, data = problem()
    private = dpoptim.attach(plan(), one, optimizer, data)
    another, others, _ = problem()
    with dpoptim.attach(plan(), another, others, data):
        private.detach()
        assert torch.autograd.backward is not HONEST
    assert torch.autograd.backward is HONEST
    dropped = dpoptim.attach(plan(), one, optimizer, data)
    assert torch.autograd.backward is not HONEST
    del dropped
    gc.collect()
    assert torch.autograd.backward is HONEST
