"""Losses made of several records' outputs are refused when they are handed over, before anything
is released; others are not, however they are made.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.gradients.hooks.seen_outputs import MICROBATCHES
from dpoptim.training.losses.meeting_places import refuse_broadcast

N, FEATURES, CLASSES = 8, 5, 3
generator = torch.Generator().manual_seed(1)
X, Y = torch.randn(N, FEATURES, generator=generator), torch.arange(N) % CLASSES
TABLE = TensorDataset(X, Y)
Loss = Callable[[nn.Module, Any], Tensor]
SEEN = "what the model returned for others"


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES)


def each(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def trained(
    build: Callable[[], nn.Module],
    data: TensorDataset,
    loop: Callable[..., Tensor],
    *,
    steps: int = 2,
    numbered: bool = False,
    **options: Any,
) -> int:
    """How many steps were released."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=N, steps=steps, noise_multiplier=0.0, delta=1e-5
    )
    with dpoptim.attach(plan, model, optimizer, data, **options) as private:
        try:
            for number, batch in enumerate(private.batches()):
                private.backward(loop(model, batch, *([number] if numbered else [])))
                optimizer.step()
        except dpoptim.SamplesInteractError as error:
            error.add_note(f"after {private.steps_done} steps")
            raise
    return private.steps_done


def normalised(model: nn.Module, batch: Any) -> Tensor:
    return F.normalize(model(batch[0]), dim=1)


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    z = normalised(model, batch)
    return F.cross_entropy(10 * z @ z.T, torch.arange(len(z)), reduction="none")


def supervised_contrastive(model: nn.Module, batch: Any) -> Tensor:
    z, y = normalised(model, batch), batch[1]
    same = (y[:, None] == y) & ~torch.eye(len(z), dtype=torch.bool)
    return -((10 * z @ z.T).log_softmax(1) * same).sum(1) / same.sum(1).clamp(min=1)


def triplets(model: nn.Module, batch: Any) -> Tensor:
    z = model(batch[0])
    return F.triplet_margin_loss(z, z.roll(1, 0), z.roll(2, 0), margin=50.0, reduction="none")


COUPLED: dict[str, Loss] = {
    "in-batch negatives": contrastive,
    "their mean": lambda m, b: contrastive(m, b).mean(),
    "their mean by torch": lambda m, b: F.cross_entropy(
        (z := normalised(m, b)) @ z.T, torch.arange(len(z))
    ),
    "half of their sum": lambda m, b: contrastive(m, b).sum() * 0.5,
    "classes as positives": supervised_contrastive,
    "triplets": triplets,
    "mean of triplets": lambda m, b: triplets(m, b).mean(),
    "Cox's partial likelihood": lambda m, b: m(b[0])[:, 0].logcumsumexp(0) - m(b[0])[:, 0],
    "centred": lambda m, b: ((s := m(b[0])) - s.mean(0)).square().sum(1),
    "a variance beside": lambda m, b: each(m, b) + m(b[0]).var(0).sum(),
    "ranking": lambda m, b: (m(b[0])[:, :1] - m(b[0])[:, 0]).relu().mean(1),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize("options", [{}, {"isolation": "vmap"}, {"loss_reduction": "mean"}])
def test_losses_of_several_records_are_refused_before_a_release(
    name: str, options: dict[str, Any]
) -> None:
    if "sum" in name and options:
        options = {"loss_reduction": "sum"}
    with pytest.raises(dpoptim.SamplesInteractError, match=SEEN) as raised:
        trained(linear, TABLE, COUPLED[name], **options)
    assert raised.value.__notes__ == ["after 0 steps"]
    assert not any(character.isdigit() for character in str(raised.value))


class Stages(nn.Module):
    """Returns what its first stage made, too, which is behind what the second one made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 7), nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.first(x).tanh()
        return {"scores": self.second(hidden), "hidden": (hidden,)}


def of_stages(model: nn.Module, batch: Any) -> Tensor:
    found = model(batch[0])
    regular = found["hidden"][0].square().sum(1)
    return F.cross_entropy(found["scores"], batch[1], reduction="none") + regular


def attacked(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0].clone().requires_grad_()
    (g,) = torch.autograd.grad(each(model, (x, batch[1])).sum(), x)
    return each(model, ((x + 0.1 * g.sign()).detach(), batch[1]))


def fed_again(model: nn.Module, batch: Any) -> Tensor:
    return each(model, (F.pad(model(batch[0]), (0, 2)), batch[1]))


def stabilised(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy by hand, whose largest score cancels but for rounding."""
    z = 3 * model(batch[0])
    z = z - z.max()
    return z.exp().sum(1).log() - z.gather(1, batch[1][:, None])[:, 0]


APART: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "one each": (linear, each),
    "their mean": (linear, lambda m, b: each(m, b).mean()),
    "by torch": (linear, lambda m, b: F.cross_entropy(m(b[0]), b[1])),
    "sorted": (linear, lambda m, b: each(m, b).sort().values),
    "element by element": (linear, lambda m, b: F.mse_loss(m(b[0]), b[0][:, :CLASSES])),
    "smoothed": (linear, lambda m, b: F.cross_entropy(m(b[0]), b[1], label_smoothing=0.1)),
    "infinite": (linear, lambda m, b: m(b[0]).abs().sum(1).log() * (b[1] - 1) / 0),
    "the batch's largest score": (linear, stabilised),
    "several stages": (Stages, of_stages),
    "adversarial examples": (linear, attacked),
    "outputs that are inputs": (linear, fed_again),
    "statistics without gradients": (
        linear,
        lambda m, b: each(m, b) * (m(b[0]).detach().std(0).sum() > 0),
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("isolation", ["auto", "vmap"])
def test_losses_of_their_own_records_are_served(name: str, isolation: Any) -> None:
    assert trained(*(APART[name][0], TABLE, APART[name][1]), isolation=isolation) == 2


def test_rows_of_one_record_may_meet() -> None:
    views = TensorDataset(torch.stack([X, X.roll(1, 1)], 1), Y)

    def pairs(model: nn.Module, batch: Any) -> Tensor:
        a, b = model(batch[0]).unflatten(0, (-1, 2)).unbind(1)
        return (a - b).square().sum(1)

    def others(model: nn.Module, batch: Any) -> Tensor:
        a, b = model(batch[0]).unflatten(0, (-1, 2)).unbind(1)
        return (a - b.roll(1, 0)).square().sum(1)

    assert trained(linear, views, pairs, rows_per_record=2) == 2
    with pytest.raises(dpoptim.SamplesInteractError, match=SEEN):
        trained(linear, views, others, rows_per_record=2)


def test_an_axis_that_may_be_another_one_proves_nothing() -> None:
    x = torch.randn(N, N, FEATURES, generator=generator)

    class Sequences(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).transpose(0, 1)  # positions first: as many as records

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).square().mean((0, 2))

    def build() -> nn.Module:
        return Sequences(FEATURES, CLASSES)

    assert trained(build, TensorDataset(x, Y), loss) == 2


SQUARE = TensorDataset(torch.randn(N, N, generator=generator), Y)


def square_errors(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[0]).square()


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, b: square_errors(m, b).T.mean(),
        lambda m, b: F.mse_loss(m(b[0]).T, b[0].T),
        lambda m, b: square_errors(m, b).mean(0).mean(),
        lambda m, b: square_errors(m, b).sum(0).sum(),
    ],
)
def test_as_many_features_as_records_are_not_taken_for_them(loss: Loss) -> None:
    assert trained(lambda: nn.Linear(N, N), SQUARE, loss) == 2


@pytest.mark.parametrize("mean", [lambda z: z.mean(), lambda z: z.T.mean()])
def test_a_square_of_records_is_seen_from_both_sides(mean: Callable[[Tensor], Tensor]) -> None:
    def similarities(model: nn.Module, batch: Any) -> Tensor:
        z = normalised(model, batch)
        return mean((z @ z.T - torch.eye(N)).square())

    with pytest.raises(dpoptim.SamplesInteractError, match=SEEN):
        trained(linear, TABLE, similarities)


class Towers(nn.Module):
    """Two towers that a loop calls by themselves, or by a method."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(FEATURES, 4), nn.Embedding(CLASSES, 4)

    def encode(self, x: Tensor) -> Tensor:
        return F.normalize(self.left(x).tanh(), dim=1)


def of_towers(model: nn.Module, batch: Any) -> Tensor:
    assert isinstance(model, Towers)
    return model.encode(batch[0]) @ model.right(batch[1]).T


def test_parts_that_a_loop_calls_by_themselves_are_looked_at() -> None:
    def own(model: nn.Module, batch: Any) -> Tensor:
        return -F.logsigmoid(of_towers(model, batch).diagonal())

    def beside_others(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(of_towers(model, batch), torch.arange(N), reduction="none")

    assert trained(Towers, TABLE, own) == 2
    with pytest.raises(dpoptim.SamplesInteractError, match=SEEN) as raised:
        trained(Towers, TABLE, beside_others)
    assert raised.value.__notes__ == ["after 0 steps"]


def overlap(p: Tensor, y: Tensor, axes: int | tuple[int, ...]) -> Tensor:
    return 1 - (2 * (p * y).sum(axes) + 1) / (p.sum(axes) + y.sum(axes) + 1)


def dice(model: nn.Module, batch: Any, axes: int | tuple[int, ...]) -> Tensor:
    return overlap(model(batch[0]).sigmoid(), F.one_hot(batch[1], CLASSES), axes)


def spread(model: nn.Module, batch: Any) -> Tensor:
    """Terms of VICReg: a mean over records, and sums and means over features of the batch's own."""
    z = model(batch[0])
    centred = z - z.mean(0)
    off = (centred.T @ centred / (N - 1)).tril(-1)
    return each(model, batch).mean() + (1 - z.std(0)).relu().mean() + off.square().sum()


# scalars whose graphs show no mean and no sum
OVER_THE_BATCH: dict[str, Loss] = {
    "root of a mean": lambda m, b: F.mse_loss(m(b[0]), b[0][:, :CLASSES]).sqrt(),
    "overlap": lambda m, b: dice(m, b, (0, 1)),
    "correlation": lambda m, b: -torch.corrcoef(torch.stack([m(b[0])[:, 0], b[0][:, 0]]))[0, 1],
    "one of two terms": lambda m, b: each(m, b).mean() + dice(m, b, (0, 1)),
    "statistics beside": spread,
    "largest, smoothly": lambda m, b: each(m, b).logsumexp(0),
    "product": lambda m, b: each(m, b).mean() * m(b[0]).square().mean(),
    "ratio": lambda m, b: each(m, b).mean() / (1 + m(b[0]).square().mean()),
    "means of two passes": lambda m, b: (m(b[0]).mean(0) - m(b[0] + 1).mean(0)).square().sum(),
    "flooding": lambda m, b: (each(m, b).mean() - 0.01).abs() + 0.01,
    "cut off": lambda m, b: 1 - (3 - 2 * each(m, b).mean()).clamp(min=-9),
}
OF_RECORDS: dict[str, Loss] = {
    "roots": lambda m, b: (m(b[0]) - b[0][:, :CLASSES]).norm(dim=1) @ torch.full((N,), 1 / N),
    "overlaps": lambda m, b: dice(m, b, 1) @ torch.full((N,), 1 / N),
    "one of two terms": lambda m, b: each(m, b).mean() + dice(m, b, 1) @ torch.ones(N) / N,
    "straight": lambda m, b: m(b[0]).sum(1) @ torch.full((N,), 1 / N),
    "flooded one by one": lambda m, b: sum((loss - 0.5).abs() for loss in each(m, b)) / N,
    "square root of a square": lambda m, b: m(b[0]).norm() ** 2 / N,
}


@pytest.mark.parametrize("name", OVER_THE_BATCH)
def test_scalars_that_bend_with_other_records_are_refused(name: str) -> None:
    with pytest.raises(dpoptim.SamplesInteractError, match=SEEN) as raised:
        trained(linear, TABLE, OVER_THE_BATCH[name], loss_reduction="mean")
    assert raised.value.__notes__ == ["after 0 steps"]


@pytest.mark.parametrize("name", OF_RECORDS)
def test_scalars_that_do_not_are_served(name: str) -> None:
    assert trained(linear, TABLE, OF_RECORDS[name], loss_reduction="mean") == 2


class Balanced(nn.Module):
    """Returns what its scores are made of, too: shares of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(FEATURES, 2), nn.Linear(FEATURES, 2 * CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.gate(x).softmax(1)
        return (shares[:, :, None] * self.experts(x).unflatten(1, (2, -1))).sum(1), shares


def test_a_balance_of_what_outputs_are_made_of_is_seen() -> None:
    def balanced(model: nn.Module, batch: Any) -> Tensor:
        scores, shares = model(batch[0])
        losses = F.cross_entropy(scores, batch[1], reduction="none")
        return losses + shares.mean(0).square().sum()

    def own(model: nn.Module, batch: Any) -> Tensor:
        scores, shares = model(batch[0])
        return F.cross_entropy(scores, batch[1], reduction="none") + shares.square().sum(1)

    assert trained(Balanced, TABLE, own) == 2
    with pytest.raises(dpoptim.SamplesInteractError, match=SEEN):
        trained(Balanced, TABLE, balanced)


@pytest.mark.parametrize("rows", range(2, N + 1))
def test_batches_of_any_size_are_looked_at(rows: int) -> None:
    """Also of as many records as there are features or classes: trials told the axes apart."""
    data = TensorDataset(X[:rows], Y[:rows])
    with pytest.raises(dpoptim.SamplesInteractError, match=SEEN):
        trained(linear, data, contrastive)


def test_a_loop_that_begins_to_compare_records_is_seen_for_some_batches() -> None:
    def later(model: nn.Module, batch: Any, number: int) -> Tensor:
        return (each if number < MICROBATCHES - 1 else contrastive)(model, batch)

    with pytest.raises(dpoptim.SamplesInteractError, match=SEEN):
        trained(linear, TABLE, later, steps=MICROBATCHES + 1, numbered=True)


def test_records_that_pass_alone_are_not_asked() -> None:
    assert trained(linear, TABLE, contrastive, isolation="alone") == 2


REGRESSION = TensorDataset(X, X.sum(1))
MEETING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "square": lambda p, y: (p - y).square().mean(),
    "turned": lambda p, y: (p[:, 0] - y[:, None]).square().mean(),
    "absolute": lambda p, y: F.l1_loss(p, y),
    "logcosh": lambda p, y: torch.log(torch.cosh(p - y)).mean(),
    "pinball": lambda p, y: torch.maximum(0.9 * (y - p), -0.1 * (y - p)).mean(),
    "larger": lambda p, y: torch.maximum(p, y).mean(),
    "a vector": lambda p, y: (p - y).square().mean(1),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", MEETING)
def test_outputs_that_meet_every_target_are_refused(name: str) -> None:
    def loop(model: nn.Module, batch: Any) -> Tensor:
        return MEETING[name](model(batch[0]), batch[1])

    with pytest.raises(dpoptim.SamplesInteractError, match="different shapes") as refused:
        trained(lambda: nn.Linear(FEATURES, 1), REGRESSION, loop)
    assert refused.value.__notes__ == ["after 0 steps"]


PAIRS = TensorDataset(X, torch.randn(N, N))  # as many numbers of a record as there are records
BESIDE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "numbers of its own": lambda p, y: (p - y[:, :3]).square().mean(),
    "places": lambda p, y: (p[:, :, None] - y[:, None, :3]).square().mean(),
    "one number": lambda p, y: (p - y[:, :1]).square().mean(),
}


@pytest.mark.parametrize("name", BESIDE)
def test_outputs_that_meet_their_own_targets_are_served(name: str) -> None:
    def loop(model: nn.Module, batch: Any) -> Tensor:
        return BESIDE[name](model(batch[0]), batch[1])

    options = {"loss_reduction": "mean"}
    assert trained(lambda: nn.Linear(FEATURES, 1), PAIRS, loop, **options) == 2


BY_ITS_OWN_NORM: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": lambda z, y: 1 - F.cosine_similarity(z, y),
    "normalised": lambda z, y: 1 - (F.normalize(z, dim=1) * y).sum(1),
    "log-softmax": lambda z, y: (z.logsumexp(1, keepdim=True) - z)[:, 0],
    "standardised": lambda z, y: ((z - z.mean(1, keepdim=True)) / z.std(1, keepdim=True) * y).sum(
        1
    ),
    "their mean": lambda z, y: F.cosine_similarity(z, y).mean(),
}


@pytest.mark.parametrize("name", BY_ITS_OWN_NORM)
@pytest.mark.parametrize("given", [True, False])
def test_as_many_features_as_records_meet_one_number_of_their_own(name: str, given: bool) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return BY_ITS_OWN_NORM[name](model(batch[0]), batch[1])

    loop = {"loss": loss} if given else {}
    assert trained(lambda: nn.Linear(FEATURES, N), PAIRS, loss, **loop) == 2


@pytest.mark.parametrize("reduce", [lambda t: t.mean(), lambda t: t.mean(1)])
def test_an_axis_as_long_as_the_batch_is_served_where_the_loss_was_given(
    reduce: Callable[[Tensor], Tensor],
) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return reduce((model(batch[0]) - torch.arange(N)).square())

    assert trained(lambda: nn.Linear(FEATURES, 1), TABLE, loss, loss=loss) == 2


def test_an_axis_that_earlier_batches_had_in_another_number_is_no_axis_of_records() -> None:
    losses = [torch.zeros(rows, 1, requires_grad=True).tanh() for rows in (3, 4, 5)]
    other, same, third = ((z - torch.ones(4)).square().sum(1) for z in losses)
    widths = set[int]()
    for rows, each in ((3, other), (4, same), (5, third)):
        refuse_broadcast(each, rows, (), widths)
    with pytest.raises(dpoptim.SamplesInteractError, match="different shapes"):
        refuse_broadcast(same, 4, (), set())
    with pytest.raises(dpoptim.SamplesInteractError, match="different shapes"):
        refuse_broadcast((losses[1] - losses[1][:, 0]).square().sum(1), 4, (), widths)
