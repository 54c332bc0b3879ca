"""Means over all labels of a batch (tokens, pixels) are trained as means of the records' own."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.losses import per_sample_mean
from dpoptim.training.losses.label_means import OwnMeans
from released_sums import sum_of_one_step

N, LENGTH, CLASSES = 8, 5, 4
WEIGHTS = torch.tensor([1.0, 9.0, 0.1, 2.0])
generator = torch.Generator().manual_seed(0)
IDS = torch.randint(CLASSES, (N, LENGTH), generator=generator)
LENGTHS = torch.tensor([1, 5, 3, 5, 2, 4, 5, 1])
LABELS = torch.where(torch.arange(LENGTH) < LENGTHS[:, None], IDS, -100)
LABELS[4] = -100  # of nothing that counts
Loss = Callable[[nn.Module, Any], Tensor]
pytestmark = [
    pytest.mark.filterwarnings("ignore::dpoptim.OwnMeansWarning"),
    pytest.mark.usefixtures("tried_once"),
]


def scores(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0])


def model_of_tokens() -> nn.Module:
    return nn.Sequential(nn.Embedding(CLASSES, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def flat(m: nn.Module, b: Any, **options: Any) -> Tensor:
    return F.cross_entropy(scores(m, b).view(-1, CLASSES), b[1].view(-1), **options)


def next_ones(m: nn.Module, b: Any, **options: Any) -> Tensor:
    following = b[1][:, 1:].reshape(-1)
    return F.cross_entropy(scores(m, b)[:, :-1].reshape(-1, CLASSES), following, **options)


def classes_second(m: nn.Module, b: Any, **options: Any) -> Tensor:
    return F.cross_entropy(scores(m, b).transpose(1, 2), b[1], **options)


def maps(m: nn.Module, b: Any, **options: Any) -> Tensor:
    labels = torch.stack([b[1], b[1].flip(1)], 1)
    return F.cross_entropy(torch.stack([scores(m, b)] * 2, 1).movedim(3, 1), labels, **options)


FORMS = [flat, next_ones, classes_second, maps]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weighted": {"weight": WEIGHTS},
    "smoothed": {"label_smoothing": 0.2},
    "both": {"label_smoothing": 0.2, "weight": WEIGHTS},
}


def released(
    loop: Loss,
    keep: Sequence[int] = range(N),
    *,
    clip_norm: float = 1e4,
    loss: Loss | None = None,
    bare: bool = False,
    n: int = N,
    **batches: Any,
) -> Tensor:
    """The sum of one step, without noise."""
    torch.manual_seed(0)
    data = TensorDataset(IDS[list(keep)], LABELS[list(keep)])
    how = {"n": n, "clip_norm": clip_norm, "bare": bare, "batches": batches}
    return sum_of_one_step(model_of_tokens(), data, loop, loss=loss, **how)


def one_by_one(form: Any, options: dict[str, Any]) -> Tensor:
    """The records' own means, differentiated apart and added up."""
    torch.manual_seed(0)
    model = model_of_tokens()
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for i in range(N):
        own = IDS[i : i + 1], LABELS[i : i + 1]
        each = form(model, own, reduction="none", **options).reshape(1, -1)
        counted = LABELS[i][1:] if form is next_ones else LABELS[i].repeat(each.numel() // LENGTH)
        if form is maps:
            counted = torch.cat([LABELS[i], LABELS[i].flip(0)])
        found = torch.autograd.grad(
            per_sample_mean(each, counted[None] != -100).sum(), [*model.parameters()]
        )
        total += torch.cat([g.double().flatten() for g in found])
    return total


@pytest.mark.thinned(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OPTIONS)
def test_each_record_has_its_own_mean(form: Any, name: str) -> None:
    options = OPTIONS[name]

    def loop(m: nn.Module, b: Any) -> Tensor:
        return form(m, b, **options)

    whole = released(loop, loss=loop)
    torch.testing.assert_close(whole, one_by_one(form, options), rtol=1e-5, atol=1e-6)
    assert torch.equal(whole, released(loop, loss=loop, bare=True))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", [flat, maps])
def test_no_record_moves_the_sum_by_more_than_the_clip_norm(form: Any) -> None:
    """Whoever leaves the batch, with few labels or all: of a mean over all it would."""
    bound = 1e-2
    whole = released(form, loss=form, clip_norm=bound)
    for left_out in range(N):
        less = released(form, [i for i in range(N) if i != left_out], loss=form, clip_norm=bound)
        assert float((whole - less).norm()) <= bound


def test_beside_other_terms() -> None:
    def form(m: nn.Module, b: Any, reduction: str = "mean") -> Tensor:
        squares = scores(m, b).square().mean((1, 2), keepdim=True)
        if reduction == "mean":
            return 2 * flat(m, b) + squares.mean()
        return 2 * flat(m, b, reduction="none").reshape(len(squares), LENGTH)[:, :, None] + squares

    found = released(form, loss=form)
    expected = one_by_one(lambda m, b, **_: 2 * flat(m, b, reduction="none"), {})
    rest = released(lambda m, b: scores(m, b).square().mean((1, 2)))
    torch.testing.assert_close(found, expected + rest, rtol=1e-5, atol=1e-6)


def test_what_changes_is_said() -> None:
    with pytest.warns(dpoptim.OwnMeansWarning, match="each record's own mean is taken instead"):
        released(flat, loss=flat)


def test_a_mean_over_all_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnMeans, "hooks", lambda *_: [])
    with pytest.raises(dpoptim.SamplesInteractError, match="weighted mean over the records"):
        released(flat, loss=flat)


def test_counts_of_other_records_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    before = OwnMeans.__init__

    def of_all(self: OwnMeans, *of: Any) -> None:
        before(self, *of)
        self._counted = self._counted.float().mean().expand(self._counted.shape)  # type: ignore[assignment]

    monkeypatch.setattr(OwnMeans, "__init__", of_all)
    with pytest.raises(dpoptim.SamplesInteractError, match="on made-up records"):
        released(flat, loss=flat)


def one_after_another(m: nn.Module, b: Any) -> list[Tensor]:
    """Each record's own mean by itself, which is nobody else's to divide."""
    return [F.cross_entropy(o, y) for o, y in zip(scores(m, b), b[1].clamp(min=0), strict=True)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("loop", "size"),
    [
        (lambda m, b: torch.stack(one_after_another(m, b)).mean(), 4),
        (lambda m, b: torch.stack(one_after_another(m, b)).mean(), LENGTH),
        (lambda m, b: torch.stack(one_after_another(m, b)).sum(), LENGTH),
        (lambda m, b: sum(one_after_another(m, b)) / len(b[0]), 8),
    ],
)
def test_lists_of_the_records_own_means_are_no_means_over_all(loop: Loss, size: int) -> None:
    """Also where there are as many records as labels in each."""
    expected = released(lambda m, b: torch.stack(one_after_another(m, b)), clip_norm=1e-2)
    found = released(loop, loss=loop, clip_norm=1e-2, physical_batch_size=size)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    for keep in (range(size), range(1, size)):
        with pytest.raises(dpoptim.PrivacyError, match="give attach the loss"):
            released(loop, keep, n=size)


@pytest.mark.parametrize("weight", [None, WEIGHTS])
def test_in_a_checkpoint(weight: Tensor | None) -> None:
    """Where what was saved is computed again, and may be read once."""

    def loop(m: nn.Module, b: Any) -> Tensor:
        def head(o: Tensor) -> Tensor:
            return F.cross_entropy(o.view(-1, CLASSES), b[1].view(-1), weight=weight)

        return checkpoint(head, scores(m, b), use_reentrant=False)

    options = {} if weight is None else {"weight": weight}
    for bare in (False, True):
        found = released(loop, loss=loop, bare=bare)
        torch.testing.assert_close(found, one_by_one(flat, options), rtol=1e-5, atol=1e-6)


def time_first(m: nn.Module, b: Any) -> Tensor:
    """One place of all records after another."""
    return F.cross_entropy(scores(m, b).transpose(0, 1).reshape(-1, CLASSES), b[1].T.reshape(-1))


def chosen(m: nn.Module, b: Any) -> Tensor:
    counted = b[1] != -100
    return F.cross_entropy(scores(m, b)[counted], b[1][counted])


def hidden(m: nn.Module, b: Any) -> Tensor:
    return flat(m, b).exp().log()


@pytest.mark.parametrize("loop", [time_first, chosen, hidden])
def test_labels_that_are_not_one_records_after_anothers_are_refused(loop: Loss) -> None:
    with pytest.raises(dpoptim.SamplesInteractError, match="on made-up records"):
        released(loop, loss=loop)


def test_unless_attach_is_given_the_loss_it_is_refused() -> None:
    with pytest.raises(dpoptim.SamplesInteractError, match=r"attach\(..., loss=...\)"):
        released(flat)


@pytest.mark.parametrize("bare", [False, True])
def test_parts_of_a_batch_are_refused(bare: bool) -> None:
    """How many rows a part has, nobody knows: class weights moved the sum by 2.9 clip norms."""

    def weighted(m: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(scores(m, b)[:, 0], b[1], weight=WEIGHTS)

    model = model_of_tokens()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=N, steps=1, noise_multiplier=0.0, delta=1e-5
    )
    data = TensorDataset(IDS, IDS[:, 0])
    with (
        pytest.raises(dpoptim.SamplesInteractError, match="mean over labels"),
        dpoptim.attach(
            plan, model, optimizer, data, loss=weighted, partial_backward=True
        ) as private,
    ):
        for batch in private.batches():
            value = weighted(model, [each[: N // 2] for each in batch])
            value.backward() if bare else private.backward(value)


@pytest.mark.parametrize("checked", [False, True])
def test_a_mean_that_is_divided_by_a_whole_number_is_warned_of(checked: bool) -> None:
    def divided(m: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(scores(m, b)[:, 0], b[0][:, 0]) / 4

    with pytest.warns(UserWarning, match="divided by a whole number"):
        released(divided, loss=divided if checked else None)
