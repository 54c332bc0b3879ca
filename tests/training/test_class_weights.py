"""Means that torch divides by class weights, or by labels that are not ignored, as loops have them:
``private.backward`` undoes the divisor, in which records meet.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim

pytestmark = pytest.mark.usefixtures("tried_once")

N, FEATURES, CLASSES, STEPS = 9, 5, 3, 2
WEIGHTS = torch.tensor([1.0, 9.0, 0.1])
generator = torch.Generator().manual_seed(1)
X, Y = torch.randn(N, FEATURES, generator=generator), torch.arange(N) % CLASSES
X[1] *= 20  # of the heaviest class
SOME = torch.where(torch.arange(N) % 4 == 2, -100, Y)
Loss = Callable[[nn.Module, Any], Tensor]


class Noisy(nn.Linear):
    """Draws, whatever for."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0 * torch.randn_like(x))


BY_LABELS: dict[str, tuple[Tensor, Loss, float]] = {
    "weighted": (Y, lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=WEIGHTS), 1.0),
    "a module": (Y, lambda m, b: nn.CrossEntropyLoss(WEIGHTS)(m(b[0]), b[1]), 1.0),
    "times a number": (
        Y,
        lambda m, b: 0.25 * F.cross_entropy(m(b[0]), b[1], weight=WEIGHTS),
        0.25,
    ),
    "of logarithms": (
        Y,
        lambda m, b: F.nll_loss(m(b[0]).log_softmax(1), b[1], weight=WEIGHTS),
        1.0,
    ),
    "ignored labels": (SOME, lambda m, b: F.cross_entropy(m(b[0]), b[1]), 1.0),
}


def released(
    labels: Tensor,
    loop: Loss,
    keep: Sequence[int] = range(N),
    build: Callable[[], nn.Module] = lambda: nn.Linear(FEATURES, CLASSES),
    *,
    bare: bool = False,
    **options: Any,
) -> list[Tensor]:
    """The sums of all steps, without noise."""
    torch.manual_seed(0)
    model, sums = build(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=N, steps=STEPS, noise_multiplier=0.0, delta=1e-5
    )
    data = TensorDataset(X[list(keep)], labels[list(keep)])
    with dpoptim.attach(plan, model, optimizer, data, **options) as private:
        optimizer.register_step_pre_hook(
            lambda *_: sums.append(
                N * torch.cat([p.grad.double().flatten() for p in model.parameters()])
            )
        )
        for batch in private.batches():
            loss = loop(model, batch)
            loss.backward() if bare else private.backward(loss)
            optimizer.step()
    return sums


@pytest.mark.parametrize("name", BY_LABELS)
@pytest.mark.parametrize("build", [lambda: nn.Linear(FEATURES, CLASSES), lambda: Noisy(5, 3)])
@pytest.mark.parametrize("isolation", ["auto", "vmap"])
@pytest.mark.filterwarnings("error::dpoptim.training.trials.isolation.IsolationWarning")
@pytest.mark.thinned(3)
def test_they_are_served_with_the_loss_checked(
    name: str, build: Callable[[], nn.Module], isolation: Any
) -> None:
    labels, loop, factor = BY_LABELS[name]
    weights = torch.ones(CLASSES) if name == "ignored labels" else WEIGHTS

    def each(model: nn.Module, batch: Any) -> Tensor:
        losses = F.cross_entropy(model(batch[0]), batch[1], weight=weights, reduction="none")
        return factor * losses

    options: dict[str, Any] = {"build": build, "isolation": isolation}
    whole = released(labels, loop, loss=loop, **options)
    by_hand = released(labels, each, **options)
    less = released(labels, loop, [i for i in range(N) if i != 1], loss=loop, **options)
    for ours, theirs, other in zip(whole, by_hand, less, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-2)  # two margins on the clip norm
        assert 0.5 < float((ours - other).norm()) <= 1.0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", BY_LABELS)
def test_a_loop_may_differentiate_them_itself(name: str) -> None:
    labels, loop, _ = BY_LABELS[name]
    theirs = released(labels, loop, loss=loop, bare=True)
    assert all(map(torch.equal, theirs, released(labels, loop, loss=loop)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", BY_LABELS)
def test_where_the_graph_does_not_show_them_it_is_refused(name: str) -> None:
    labels, loop, _ = BY_LABELS[name]

    def hidden(model: nn.Module, batch: Any) -> Tensor:
        return loop(model, batch).exp().log()

    with pytest.raises(dpoptim.PrivacyError, match="does not show where that is"):
        released(labels, hidden, loss=loop, bare=True)


def some_below_zero(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], weight=torch.tensor([1.0, -0.4, 0.1]))


def of_others(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch[0])
    return F.cross_entropy(scores - scores.mean(0), batch[1], weight=WEIGHTS)


@pytest.mark.parametrize("loop", [some_below_zero, of_others])
def test_other_means_are_not(loop: Loss) -> None:
    with pytest.raises(dpoptim.SamplesInteractError) as raised:
        released(Y, loop, loss=loop)
    assert "class weights inside a mean" not in str(raised.value)  # those alone are served


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])
def test_records_that_are_tried_need_not_show_their_weights(weights: Tensor | None) -> None:
    def loop(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], weight=weights)

    one_class = torch.zeros_like(Y)
    one_class[-1] = 1
    theirs = released(one_class, loop, loss=loop, bare=True)
    assert all(map(torch.equal, theirs, released(one_class, loop, loss=loop)))
