"""With records alone a loss that compares or weighs records is another one: that is told, or
refused; and refusals name what a loss does, whichever way it is written.
"""

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim

N, FEATURES, CLASSES = 12, 6, 3
generator = torch.Generator().manual_seed(1)
X, Y = torch.randn(N, FEATURES, generator=generator), torch.arange(N) % CLASSES
NUMBERS = X[:, 0].clone()
COUNTED = torch.arange(N) % 3 != 0
Loss = Callable[[nn.Module, Any], Tensor]


def linear(outputs: int = CLASSES) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(FEATURES, outputs)


def attached(
    model: nn.Module, data: TensorDataset, loss: Loss | None = None, **options: Any
) -> Any:
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=N, steps=2, noise_multiplier=0.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return dpoptim.attach(plan, model, optimizer, data, loss=loss, **options)


def refused(model: nn.Module, data: TensorDataset, loss: Loss, **options: Any) -> str:
    with pytest.raises(dpoptim.SamplesInteractError) as error:
        attached(model, data, loss, **options)
    return str(error.value)


# ---- what becomes of a loss ---------------------------------------------------------------------


def views(model: nn.Module, batch: Any) -> Tensor:
    """SimCLR's: both views of all records in one pass."""
    rows = len(batch[0])
    z = F.normalize(model(torch.cat([batch[0], batch[0] + 0.1 * torch.randn_like(batch[0])])))
    scores = (z @ z.T).masked_fill(torch.eye(2 * rows, dtype=torch.bool), -1e9)
    return F.cross_entropy(scores, torch.arange(2 * rows).roll(rows))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.images, self.texts = linear(), linear()
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        return self.images(images), self.texts(texts)


def contrasted(model: nn.Module, batch: Any) -> Tensor:
    images, texts = model(*batch)
    scores = images @ texts.T * model.logit_scale.exp()
    labels = torch.arange(len(scores))
    return F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)


def hazards(model: nn.Module, batch: Any) -> Tensor:
    """Cox's partial likelihood."""
    z = model(batch[0])[:, 0][batch[1].argsort(descending=True)]
    return (z.logcumsumexp(0) - z).mean()


COMPARING: list[tuple[Callable[[], nn.Module], TensorDataset, Loss]] = [
    (linear, TensorDataset(X), views),
    (Towers, TensorDataset(X, X), contrasted),
    (linear, TensorDataset(X, NUMBERS), hazards),
]


@pytest.mark.parametrize(("build", "data", "loss"), COMPARING)
def test_what_has_no_gradient_alone_is_not_trained_on_noise(
    build: Callable[[], nn.Module], data: TensorDataset, loss: Loss
) -> None:
    for options in ({"isolation": "alone"}, {}):
        said = refused(build(), data, loss, **options)
        assert "no record alone has a gradient" in said
        assert 'isolation="alone"' not in said


def hardest(model: nn.Module, batch: Any) -> Tensor:
    """Triplets of the hardest others in the batch."""
    found, labels = model(batch[0]), batch[1]
    apart, same = torch.cdist(found, found), labels[:, None] == labels[None]
    return F.relu((apart * same).amax(1) - (apart + 1e9 * same).amin(1) + 0.3).mean()


def risks(model: nn.Module, batch: Any) -> Tensor:
    """Cox's, by hand, over those with an event: alone, rounding is left, or 0 / 0."""
    x, times, events = batch
    order = times.argsort(descending=True)
    z, events = model(x)[:, 0][order], events[order].float()
    return ((z.exp().cumsum(0).log() - z) * events).sum() / events.sum()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("build", "data", "loss"),
    [
        *COMPARING[1:],
        (linear, TensorDataset(X, Y), hardest),
        (linear, TensorDataset(X, NUMBERS, COUNTED), risks),
    ],
)
def test_no_way_trains_noise_alone(
    build: Callable[[], nn.Module], data: TensorDataset, loss: Loss
) -> None:
    """Of each record by itself nothing is left, by whatever way."""
    for options in ({}, {"isolation": "alone"}, {"isolation": "vmap"}):
        said = refused(build(), data, dpoptim.per_sample(loss), **options)
        assert "no record that was tried, made up or of the data set, has a gradient" in said
    assert "no record alone has a gradient" in refused(build(), data, loss)


def test_records_by_themselves_in_a_loop_of_ones_own_are_told_the_same() -> None:
    def each(model: nn.Module, batch: Any) -> Tensor:
        rows = zip(*(part.split(1) for part in batch), strict=True)
        return torch.stack([hazards(model, row) for row in rows])

    said = refused(linear(), TensorDataset(X, NUMBERS), each, isolation="alone")
    assert "has a gradient by this loss" in said


def test_views_that_are_alike_in_a_trial_are_not_refused() -> None:
    """Random numbers that are the same in each draw leave nothing of the distance of two views."""
    model = linear()
    teacher = copy.deepcopy(model).requires_grad_(False)

    def follows(model: nn.Module, batch: Any) -> Tensor:
        one, other = (batch[0] + torch.randn_like(batch[0]) for _ in range(2))
        return (model(one) - teacher(other)).square().mean(1)

    attached(model, TensorDataset(X), follows)


def squares(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0])[:, 0] - batch[1]).square()


def by_a_sum(model: nn.Module, batch: Any) -> Tensor:
    return (squares(model, batch) * batch[2]).sum() / batch[2].sum()


def by_a_count(model: nn.Module, batch: Any) -> Tensor:
    return (squares(model, batch) * batch[2]).sum() / batch[2].sum().clamp(min=1)


def by_index(model: nn.Module, batch: Any) -> Tensor:
    return squares(model, batch)[batch[2]].mean()


@pytest.mark.parametrize("loss", [by_a_sum, by_a_count, by_index])
@pytest.mark.filterwarnings("error::dpoptim.IsolationWarning")
def test_a_mean_by_a_count_is_refused_however_it_is_written(loss: Loss) -> None:
    """Of a record that does not count, alone, 0 / 0 is left, or nothing."""
    said = refused(linear(), TensorDataset(X, NUMBERS, COUNTED), loss)
    assert "as if it were the batch" not in said


class Experts(nn.Module):
    """A mixture whose balance is a number of the whole batch."""

    def __init__(self, *, picked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.picked = nn.Linear(FEATURES, 2), picked
        self.experts = nn.ModuleList([linear(), linear()])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.gate(x).softmax(1)
        if not self.picked:
            each = torch.stack([expert(x) for expert in self.experts], 1)
            return (shares[:, :, None] * each).sum(1), shares
        total, best = torch.zeros(len(x), CLASSES), shares.argmax(1)
        for i, expert in enumerate(self.experts):
            rows = (best == i).nonzero()[:, 0]
            if len(rows):
                total = total.index_add(0, rows, shares[rows, i : i + 1] * expert(x[rows]))
        return total, shares


def balanced(model: nn.Module, batch: Any) -> Tensor:
    scores, shares = model(batch[0])
    return F.cross_entropy(scores, batch[1]) + shares.mean(0).square().sum()


def balanced_alone(model: nn.Module, batch: Any) -> Tensor:
    scores, shares = model(batch[0])
    return F.cross_entropy(scores, batch[1]) + shares.square().sum(1).mean()


@pytest.mark.parametrize("picked", [False, True])
def test_a_balance_over_the_batch_is_refused_however_experts_are_run(picked: bool) -> None:
    data = TensorDataset(X, Y)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", dpoptim.IsolationWarning)
        assert "records are mixed" in refused(Experts(picked=picked), data, balanced)
        assert not told
        attached(Experts(picked=picked), data, balanced_alone).detach()
    assert bool(told) == picked  # which passes alone
    assert "another loss" not in "".join(str(each.message) for each in told)


@pytest.mark.parametrize("weight", [0.1, 0.01, 0.002])
def test_a_term_of_little_weight_is_of_the_batch_all_the_same(weight: float) -> None:
    """Records alone would train another balance, each of its own prediction; none says so."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        scores = model(batch[0])
        mean = scores.softmax(1).mean(0)
        return F.cross_entropy(scores, batch[1]) + weight * (mean * mean.log()).sum()

    said = refused(nn.Sequential(linear(), nn.Tanh()), TensorDataset(X, Y), loss)
    assert "records are mixed" in said
    assert "the entropy of the mean prediction" in said


@pytest.mark.parametrize(
    ("loss", "another"), [(by_a_sum, True), (squares, False), (Tensor.mean, False)]
)
def test_records_alone_by_name_are_told_what_becomes_of_the_loss(loss: Any, another: bool) -> None:
    def averaged(model: nn.Module, batch: Any) -> Tensor:
        return squares(model, batch).mean()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", dpoptim.IsolationWarning)
        loss = averaged if loss is Tensor.mean else loss
        data = TensorDataset(X, NUMBERS, COUNTED.float())
        attached(linear(), data, loss, isolation="alone").detach()
    assert [True for each in told if "makes another loss" in str(each.message)] == [True] * another


# ---- words --------------------------------------------------------------------------------------

WORDS: dict[str, tuple[Loss, str]] = {
    "another form": (lambda model, b: F.mse_loss(model(b[0])[:, :1], b[1]), "different shapes"),
    "by hand": (lambda model, b: (model(b[0])[:, :1] - b[1]).square().mean(), "different shapes"),
    "each of all": (lambda model, b: (model(b[0])[:, :1] - b[1]).abs().mean(1), "different shapes"),
    "RMSE": (lambda model, b: squares(model, b).mean().sqrt(), "RMSE"),
    "a mean in one term": (
        lambda model, b: squares(model, b) + model(b[0]).square().mean(),
        "one term of the loss is already averaged",
    ),
}


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_refusals_name_what_the_loss_does(name: str) -> None:
    loss, said = WORDS[name]
    assert said in refused(linear(), TensorDataset(X, NUMBERS), loss)


@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize(("build", "data", "loss"), COMPARING)
def test_comparing_is_named_before_parameters_and_rows(
    build: Callable[[], nn.Module], data: TensorDataset, loss: Loss, bare: bool
) -> None:
    """Where `attach` has no loss: not a parameter that it reads, nor how many labels there are."""
    model = build()
    with (
        attached(model, data) as private,
        pytest.raises(dpoptim.SamplesInteractError, match="negatives within the batch"),
    ):
        value = loss(model, next(private.batches()))
        value.backward() if bare else private.backward(value)


def penalised(model: nn.Module, batch: Any) -> Tensor:
    """By a slope that one layer's weights are, which nothing else depends on."""
    x = batch[0].requires_grad_()
    scores = model(x)
    (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    return F.cross_entropy(scores, batch[1]) + slope.square().sum(1).mean()


def stepped(model: nn.Module, batch: Any) -> Tensor:
    """MAML's inner step."""
    named = dict(model.named_parameters())
    inner = F.cross_entropy(model(batch[0]), batch[1])
    slopes = torch.autograd.grad(inner, [*named.values()], create_graph=True)
    moved = {name: p - 0.1 * g for (name, p), g in zip(named.items(), slopes, strict=True)}
    return F.cross_entropy(torch.func.functional_call(model, moved, (batch[0],)), batch[1])


def attacked(model: nn.Module, batch: Any) -> Tensor:
    """FGSM, by the whole backward pass."""
    x = batch[0].requires_grad_()
    F.cross_entropy(model(x), batch[1]).backward()
    moved = x.detach() + 0.1 * x.grad.sign()
    return F.cross_entropy(model(moved), batch[1])


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (penalised, r'isolation="vmap"\), which attach chooses.*loss=\.'),
        (stepped, "inner steps, as in MAML"),
        (attacked, r"FGSM, PGD\), torch\.autograd\.grad\(loss, x\)"),
    ],
)
def test_inner_derivatives_are_told_what_to_do(loss: Loss, said: str) -> None:
    model = linear()
    with pytest.raises(RuntimeError) as error, attached(model, TensorDataset(X, Y)) as private:
        loss(model, next(private.batches())).backward()
    told = [str(error.value), *getattr(error.value, "__notes__", [])]
    assert re.search(said, " ".join(told))


# ---- without the loss ---------------------------------------------------------------------------


def test_a_loss_that_nobody_checked_is_told_of_once(recwarn: pytest.WarningsRecorder) -> None:
    """Of runs with a guarantee; not of records alone, which meet nobody, nor of seeded runs."""
    warnings.simplefilter("always")
    settings: dict[str, Any] = {"n": N, "batch_size": N, "steps": 2, "delta": 1e-5}
    for noise, options, told in (
        (1.0, {}, True),
        (1.0, {"loss": squares}, False),
        (1.0, {"isolation": "alone"}, False),
        (1.0, {"noise_seed": 1}, False),
        (0.0, {}, False),
    ):
        recwarn.clear()
        model, plan = linear(), dpoptim.DPSGD(1.0).plan(noise_multiplier=noise, **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data: Any = [(x, y) for x, y in zip(X, NUMBERS, strict=True)]
        dpoptim.attach(plan, model, optimizer, data, **options).detach()
        found = [each for each in recwarn if each.category is dpoptim.LossNotCheckedWarning]
        assert len(found) == told
        assert all(each.filename == __file__ and "loss=" in str(each.message) for each in found)
