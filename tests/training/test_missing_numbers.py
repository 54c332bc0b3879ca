"""Losses that leave out what is not known are tried on records of which something is missing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.training.trials.loss_check import places

N, FEATURES = 24, 6
X = torch.randn(N, FEATURES)
Loss = Callable[[nn.Module, Any], Tensor]


def attach(loss: Loss, labels: Tensor | list[Any]) -> str:
    """What is said of the loss. No record of the data set has anything missing."""
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 3)
    data: Any = TensorDataset(X, labels) if isinstance(labels, Tensor) else labels
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=6, steps=2, noise_multiplier=1.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan, model, optimizer, data, loss=loss) as private:
        return next(item.text for item in private.basis if "was checked" in item.text)


def findings(model: nn.Module, b: Any) -> tuple[Tensor, Tensor]:
    """Of several diseases, some of which nobody looked for."""
    known = ~b[1].isnan()
    found = F.binary_cross_entropy_with_logits(model(b[0]), b[1].nan_to_num(0), reduction="none")
    return found * known, known


def classes(model: nn.Module, b: Any) -> tuple[Tensor, Tensor]:
    known = b[1] >= 0
    return F.cross_entropy(model(b[0]), b[1].clamp(min=0), reduction="none") * known, known


def filled(model: nn.Module, b: Any) -> tuple[Tensor, Tensor]:
    """What was observed, from what was."""
    known = ~b[0].isnan()
    x = b[0].nan_to_num(0)
    return (model(x) - x[:, :3]).square() * known[:, :3], known[:, :3]


def over_the_batch(of: Any) -> Loss:
    return lambda m, b: (found := of(m, b))[0].sum() / found[1].sum().clamp(min=1)


def own(of: Any) -> Loss:
    return lambda m, b: (
        (found := of(m, b))[0].reshape(len(b[0]), -1).sum(1)
        / found[1].reshape(len(b[0]), -1).sum(1).clamp(min=1)
    )


CASES = [
    (findings, torch.ones(N, 3)),
    (classes, torch.arange(N) % 3),
    (filled, torch.ones(N)),
]


@pytest.mark.parametrize(("of", "labels"), CASES)
def test_means_over_what_is_known_in_a_batch_are_refused(of: Any, labels: Tensor) -> None:
    with pytest.raises(dpoptim.SamplesInteractError, match="with missing numbers"):
        attach(over_the_batch(of), labels)
    assert "made-up records" in attach(own(of), labels)


def mean_of_known(model: nn.Module, x: Tensor, y: Tensor, none: int) -> Tensor:
    known = y != none
    return (F.cross_entropy(model(x), y, reduction="none", ignore_index=none) * known).sum() / (
        known.sum().clamp(min=1)
    )


def normalised(model: nn.Module, x: Tensor, y: Tensor, none: int) -> Tensor:
    each = F.cross_entropy(model(x), y, reduction="none", ignore_index=none)
    return each * len(y) / (y != none).sum()


FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "a pair": (lambda x, y: (x, y), lambda b: b),
    "with weights": (lambda x, y: (x, y, torch.tensor(1.0)), lambda b: b[:2]),
    "by name": (lambda x, y: {"x": x, "speaker": y}, lambda b: (b["x"], b["speaker"])),
    "a list": (lambda x, y: [x, int(y)], lambda b: b),
}


@pytest.mark.parametrize("of", [mean_of_known, normalised])
@pytest.mark.parametrize(
    ("form", "none"),
    [("a pair", -100), ("a pair", 77), ("with weights", -1), ("by name", -1), ("a list", -100)],
)
@pytest.mark.thinned(2)
def test_labels_that_losses_leave_out_are_tried(of: Any, form: str, none: int) -> None:
    """The worst moved the sum by 1.7 clip norms, of data that has such labels; none of this has."""
    make, take = FORMS[form]
    data = [make(x, torch.tensor(i % 3)) for i, x in enumerate(X)]
    number = "one that the loss compares" if none == 77 else none
    with pytest.raises(dpoptim.SamplesInteractError, match=f"missing numbers .{number}"):
        attach(lambda m, b: of(m, *take(b), none), data)


def test_labels_in_floats_are_tried() -> None:
    def loss(model: nn.Module, b: Any) -> Tensor:
        x, y, _ = b
        known = y != -1
        each = F.binary_cross_entropy_with_logits(model(x)[:, 0], y.clamp(min=0), reduction="none")
        return (each * known).sum() / known.sum().clamp(min=1)

    with pytest.raises(dpoptim.SamplesInteractError, match="missing numbers .-1"):
        attach(loss, [(x, float(i % 2), i) for i, x in enumerate(X)])


def test_a_loss_that_takes_no_missing_labels_is_named() -> None:
    def loss(model: nn.Module, b: Any) -> Tensor:
        return -(model(b[0]).log_softmax(1) * F.one_hot(b[1], 3)).sum(1)

    none = "not on ones with missing labels: the loss took none"
    assert none in attach(loss, torch.arange(N) % 3)
    assert none not in attach(lambda m, b: loss(m, (b[0], b[1].clamp(0, 2))), torch.arange(N) % 3)


def test_losses_that_want_all_numbers_are_served() -> None:
    def plain(model: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(model(b[0]), b[1])

    def masked(model: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(model(b[0]), b[1], ignore_index=-1)

    def with_penalty(model: nn.Module, b: Any) -> Tensor:
        squares = model(b[0]).logsumexp(1).square()
        return F.cross_entropy(model(b[0]), b[1], ignore_index=77) + squares.mean()

    for loss in (plain, masked, with_penalty):
        assert "made-up records" in attach(loss, torch.arange(N) % 3)


def test_missing_numbers_are_tried_on_cpus_and_it_is_said_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On accelerators an index that is no number ends all work of the process."""
    loss, labels = own(classes), torch.arange(N) % 3
    assert "not on ones with missing numbers" not in attach(loss, labels)
    monkeypatch.setattr("dpoptim.training.trials.loss_trials.tries_missing", lambda model: False)
    assert "not on ones with missing numbers" in attach(loss, labels)


class InTraining(nn.Linear):
    """Notes in which modes it runs: in evaluation timm's LeViT keeps what it made of weights."""

    modes: set[bool]

    def forward(self, x: Tensor) -> Tensor:
        self.modes.add(self.training)
        return super().forward(x)


def test_losses_that_are_no_numbers_are_not_taken_for_random_ones() -> None:
    """They differ from themselves: models would be compared in evaluation mode from then on."""
    model = InTraining(FEATURES, 3)
    model.modes = set()
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=6, steps=2, noise_multiplier=1.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(X, torch.randn(N, 3))

    def loss(m: nn.Module, b: Any) -> Tensor:
        return (m(b[0]) - b[1]).square().mean(1)

    with dpoptim.attach(plan, model, optimizer, data, loss=loss):
        assert model.modes == {True}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("seen", [0, 1, 3, 4], ids=lambda n: f"{n} of the records that are tried")
def test_training_does_not_depend_on_whose_labels_are_missing(seen: int, smoothing: float) -> None:
    """Most are; attach read the reduction off four records, and trained one data set in two."""
    order = [i for i in range(N) if i not in places(N, in_order=False)]
    tried = places(N, in_order=False)
    labels = torch.full((N,), -100)
    labels[tried[:seen]] = 1
    labels[order[:5]] = 2
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 3)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=6, steps=3, noise_multiplier=1.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(m: nn.Module, b: Any) -> Tensor:
        return F.cross_entropy(m(b[0]), b[1], label_smoothing=smoothing)

    said = []
    with dpoptim.attach(plan, model, optimizer, TensorDataset(X, labels), loss=loss) as private:
        said = [item.text for item in private.basis]
        for batch in private.batches():
            private.backward(loss(model, batch))
            optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
    assert any("made-up records" in text and "where passing is one bit" in text for text in said)


def counted(weights: Tensor, known: Tensor, each: Tensor) -> Tensor:
    return each * weights * known * len(known) / known.sum().clamp(min=1)


def by_classes(model: nn.Module, b: Any) -> Tensor:
    """Compares labels with all classes, before the number that says that there is none."""
    x, y = b
    weights = sum((y == c) * (1.0 + c) for c in range(5))
    each = F.cross_entropy(model(x), y.clamp(0, 2), reduction="none")
    return counted(weights + 1.0, y != 9, each)


def on_the_right(model: nn.Module, b: Any) -> Tensor:
    x, y = b
    each = F.cross_entropy(model(x), y.clamp(0, 2), reduction="none")
    return counted(torch.ones(len(y)), torch.ne(torch.tensor(9), y), each)


def by_numpy(model: nn.Module, b: Any) -> Tensor:
    x, y = b
    each = F.cross_entropy(model(x), y.clamp(0, 2), reduction="none")
    return counted(torch.ones(len(y)), torch.from_numpy(y.numpy() != 255), each)


def within(model: nn.Module, b: Any) -> Tensor:
    """Differentiates inside, as adversarial training does."""
    x, y = b
    x = x.clone().requires_grad_()
    (up,) = torch.autograd.grad(x.square().sum(), x)
    each = F.cross_entropy(model(x.detach() + 0.1 * up), y.clamp(0, 2), reduction="none")
    return counted(torch.ones(len(y)), y != 9, each)


@pytest.mark.parametrize("loss", [by_classes, on_the_right, by_numpy, within])
def test_numbers_are_tried_however_a_loss_looks_for_them(loss: Any) -> None:
    with pytest.raises(dpoptim.SamplesInteractError, match="with missing numbers"):
        attach(loss, torch.arange(N) % 3)


def test_a_refusal_prints_no_number_of_the_programs_own() -> None:
    def loss(model: nn.Module, b: Any) -> Tensor:
        x, y = b
        each = F.cross_entropy(model(x), y.clamp(0, 2), reduction="none")
        return counted(torch.ones(len(y)), y != 9713, each)

    with pytest.raises(dpoptim.SamplesInteractError, match="missing numbers") as refused:
        attach(loss, torch.arange(N) % 3)
    assert "9713" not in str(refused.value)
