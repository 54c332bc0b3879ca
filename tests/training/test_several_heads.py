"""Sums of means, some of which torch divides by labels that are not ignored, or by class weights:
each counts over the records, whoever's labels are missing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.training.losses.label_means import OwnMeans
from released_sums import sum_of_one_step

pytestmark = pytest.mark.usefixtures("tried_once")

N, FEATURES = 9, 5
WEIGHTS = torch.tensor([1.0, 9.0, 0.1])
generator = torch.Generator().manual_seed(1)
X, V = torch.randn(N, FEATURES, generator=generator), torch.randn(N, generator=generator)
X[1] *= 20
Y = torch.where(torch.arange(N) % 4 == 2, -100, torch.arange(N) % 3)
Z = torch.where(torch.arange(N) > 2, -100, torch.arange(N) % 2)
NOBODYS = torch.full((N,), -100)
Heads = tuple[Tensor, Tensor, Tensor]
Loss = Callable[[nn.Module, Any], Tensor]


def heads(model: nn.Module, x: Tensor) -> Heads:
    outputs = model(x)
    return outputs[:, :3], outputs[:, 3:5], outputs[:, 5]


def two_heads(m: nn.Module, b: Any, how: str) -> Tensor:
    a, c, _ = heads(m, b[0])
    return F.cross_entropy(a, b[1], reduction=how) + F.cross_entropy(c, b[2], reduction=how)


def regression(m: nn.Module, b: Any, how: str) -> Tensor:
    a, _, d = heads(m, b[0])
    return F.cross_entropy(a, b[1], reduction=how) + 0.1 * F.mse_loss(d, b[3], reduction=how)


def penalty(m: nn.Module, b: Any, how: str) -> Tensor:
    a = heads(m, b[0])[0]
    squares = a.logsumexp(-1).square()
    rest = squares.mean() if how == "mean" else squares
    return F.nll_loss(a.log_softmax(-1), b[1], reduction=how) + 1e-3 * rest


def smoothed(m: nn.Module, b: Any, how: str) -> Tensor:
    a, c, d = heads(m, b[0])
    own = F.cross_entropy(c, b[2], label_smoothing=0.2, reduction=how)
    return F.mse_loss(d, b[3], reduction=how) - (own - F.cross_entropy(a, b[1], reduction=how))


def weighted(m: nn.Module, b: Any, how: str) -> Tensor:
    a, c, _ = heads(m, b[0])
    own = F.cross_entropy(a, b[1], weight=WEIGHTS, reduction=how)
    return own + F.cross_entropy(c, b[2], reduction=how) + own


def halved(m: nn.Module, b: Any, how: str) -> Tensor:
    return two_heads(m, b, how) / 2


def stacked(m: nn.Module, b: Any, how: str) -> Tensor:
    a, c, d = heads(m, b[0])
    terms = [
        F.cross_entropy(a, b[1], reduction=how),
        F.cross_entropy(c, b[2], reduction=how),
        F.mse_loss(d, b[3], reduction=how),
    ]
    return (torch.stack(terms, -1) * torch.tensor([1.0, 0.5, 0.1])).sum(-1)


def taught(m: nn.Module, b: Any, how: str) -> Tensor:
    """Distillation: the other term is a sum that is divided by the batch's length."""
    a, c, _ = heads(m, b[0])
    by_teacher = F.kl_div((c / 2).log_softmax(1), (b[0][:, :2]).softmax(1), reduction="none").sum(1)
    rest = by_teacher.sum() / len(b[0]) if how == "mean" else by_teacher
    return F.cross_entropy(a, b[1], reduction=how) + 4 * rest


def smoothed_and_weighted(m: nn.Module, b: Any, how: str) -> Tensor:
    a, _, d = heads(m, b[0])
    own = F.cross_entropy(a, b[1], weight=WEIGHTS, label_smoothing=0.2, reduction=how)
    return own + F.mse_loss(d, b[3], reduction=how)


LOSSES = [
    two_heads,
    halved,
    regression,
    penalty,
    smoothed,
    weighted,
    stacked,
    taught,
    smoothed_and_weighted,
]
Form = Callable[[nn.Module, Any, str], Tensor]


def mean_of(form: Form) -> Loss:
    return lambda m, b: form(m, b, "mean")


def released(
    loop: Loss,
    keep: Sequence[int] = range(N),
    labels: tuple[Tensor, Tensor] = (Y, Z),
    *,
    clip_norm: float = 1.0,
    fixed_shape: bool = False,
    loss: Loss | None = None,
    **how: Any,
) -> Tensor:
    """The sum of one step, without noise."""
    torch.manual_seed(0)
    data = TensorDataset(*(each[list(keep)] for each in (X, *labels, V)))
    how |= {"n": N, "clip_norm": clip_norm, "batches": {"fixed_shape": fixed_shape}}
    return sum_of_one_step(nn.Linear(FEATURES, 6), data, loop, loss=loss or loop, **how)


def one_by_one(form: Form, labels: tuple[Tensor, Tensor] = (Y, Z)) -> Tensor:
    """The records' own gradients, added up; of a missing label the loss is 0."""
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 6)
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for i in range(N):
        record = tuple(each[i : i + 1] for each in (X, *labels, V))
        own = torch.autograd.grad(form(model, record, "none").sum(), [*model.parameters()])
        total += torch.cat([g.double().flatten() for g in own])
    return total


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", LOSSES)
@pytest.mark.filterwarnings("ignore:.*divided by a whole number")
def test_the_sum_is_that_of_the_records_own_gradients(form: Form) -> None:
    """Of all of them; and no record moves it by more than the clip norm."""
    loop = mean_of(form)
    torch.testing.assert_close(released(loop, clip_norm=1e4), one_by_one(form), rtol=1e-5, atol=0)
    whole = released(loop)
    torch.testing.assert_close(
        whole, released(lambda m, b: form(m, b, "none")), rtol=0, atol=1e-3
    )  # two margins on the clip norm
    for left_out in (1, 2):  # with all labels, and with one
        less = released(loop, [i for i in range(N) if i != left_out])
        assert 0 < float((whole - less).norm()) <= 1.0
    assert torch.equal(released(loop, bare=True), whole)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("form", [two_heads, smoothed])
def test_of_a_head_without_any_label_nothing_is_left(form: Form, bare: bool) -> None:
    labels = Y, NOBODYS
    found = released(mean_of(form), labels=labels, clip_norm=1e4, bare=bare)
    torch.testing.assert_close(found, one_by_one(form, labels), rtol=1e-5, atol=0)
    assert not found[15:25].any()
    assert found.any()


def test_with_a_fixed_shape() -> None:
    found = released(mean_of(two_heads), clip_norm=1e4, fixed_shape=True)
    torch.testing.assert_close(found, one_by_one(two_heads), rtol=1e-5, atol=0)


def test_terms_that_are_not_counted_over_records_are_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OwnMeans, "hooks", lambda *_: [])
    with pytest.raises(dpoptim.SamplesInteractError, match="on made-up records"):
        released(mean_of(two_heads))


def test_other_losses_stay_as_they_are() -> None:
    """Of another model, differentiated meanwhile; and nothing stays in the graph."""
    other, before = nn.Linear(FEATURES, 3), list[Tensor]()

    def loss() -> Tensor:
        return F.cross_entropy(other(X), Y) + F.mse_loss(other(X)[:, 0], V)

    expected = torch.autograd.grad(loss(), other.weight)[0]

    def between() -> None:
        loss().backward(inputs=[*other.parameters()])
        before.append(other.weight.grad)  # type: ignore[arg-type]

    released(mean_of(two_heads), bare=True, between=between)
    assert torch.equal(before[0], expected)


def test_another_models_means_are_not_counted_for_this_one() -> None:
    """Which has two, where the other has one, in a loop whose losses were not checked."""
    torch.manual_seed(0)
    model, other = nn.Linear(FEATURES, 6), nn.Linear(FEATURES, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=N, steps=2, noise_multiplier=0.0, delta=1e-5
    )
    with dpoptim.attach(plan, model, optimizer, TensorDataset(X, Y, Z, V)) as private:
        for batch in private.batches():
            F.cross_entropy(other(X), Y).backward(inputs=[*other.parameters()])
            two_heads(model, batch, "mean").backward()
            optimizer.step()
    assert private.steps_done == 2


def test_where_the_graph_does_not_show_them_it_is_refused() -> None:
    loop = mean_of(two_heads)
    for bare in (False, True):
        with pytest.raises(dpoptim.PrivacyError, match="labels that are not ignored"):
            released(lambda m, b: loop(m, b).exp().log(), bare=bare, loss=loop)


def unseen(m: nn.Module, b: Any) -> Tensor:
    return regression(m, b, "mean") + F.cross_entropy(m(b[0])[:, 3:5], b[2]).exp().log()


def of_others(m: nn.Module, b: Any) -> Tensor:
    scores = m(b[0])
    return F.cross_entropy(scores[:, :3] - scores.mean(0)[:3], b[1]) + scores.square().mean()


def with_a_sum(m: nn.Module, b: Any) -> Tensor:
    return two_heads(m, b, "mean") + m(b[0]).square().sum()


@pytest.mark.parametrize("loop", [unseen, of_others, with_a_sum])
def test_other_sums_are_refused(loop: Loss) -> None:
    with pytest.raises(dpoptim.SamplesInteractError):
        released(loop)
