"""Ordinary loops, run without noise on data sets that differ in one record: what they release moves
by at most C, or they are refused, or what they rest on is named.

The learning rate is 0, so that every step can be compared, not the first one alone.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import TensorDataset

import dpoptim
from loop_networks import (
    CLASSES,
    FEATURES,
    Autoencoder,
    Experts,
    Graph,
    Keeps,
    MasksChannels,
    MixesFeatures,
    Recurrent,
    Remembers,
    Saves,
    Tied,
    Translator,
    perceptron,
)

N, STEPS = 12, 3
generator = torch.Generator().manual_seed(1)
X, Y = torch.randn(N, FEATURES, generator=generator), torch.arange(N) % CLASSES
X[0] *= 5
TOKENS = torch.randint(1, 9, (N, 6), generator=generator)
LENGTHS = torch.arange(N) % 4 + 3
EDGES = (torch.rand(N, 5, 5, generator=generator) > 0.5).float()
TEACHER = perceptron()
Loop = Callable[[nn.Module, Any, dict[str, Any]], Tensor]
Build = Callable[[], nn.Module]
TABLE, TEXT, GRAPHS = (X, Y), (TOKENS, LENGTHS, Y), (EDGES, X[:, :, None] + EDGES, Y)


def each(model: nn.Module, b: Any) -> Tensor:
    return F.cross_entropy(model(*b[:-1]), b[-1], reduction="none")


def plain(model: nn.Module, b: Any, kept: dict[str, Any]) -> Tensor:
    return each(model, b)


def reconstruction(model: nn.Module, b: Any, kept: dict[str, Any]) -> Tensor:
    found = model(b[0])
    if isinstance(found, Tensor):
        return (found - b[0]).square().sum(1)
    return (found[0] - b[0]).square().sum(1) + found[1]


def tokens(model: nn.Module, b: Any, kept: dict[str, Any]) -> Tensor:
    return F.cross_entropy(model(b[0]), b[0][:, 1:4], reduction="none").mean(1)


def ctc(model: nn.Module, b: Any, kept: dict[str, Any]) -> Tensor:
    scores = model(b[0]).permute(2, 0, 1).log_softmax(2)
    ones = torch.ones_like(b[1])
    return F.ctc_loss(scores, b[0][:, :1], 3 * ones, ones, reduction="none", zero_infinity=True)


def distilled(model: nn.Module, b: Any, kept: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        target = TEACHER(b[0]).softmax(1)
    return F.kl_div(model(b[0]).log_softmax(1), target, reduction="none").sum(1)


def attacked(model: nn.Module, b: Any, kept: dict[str, Any]) -> Tensor:
    x = b[0].clone().requires_grad_()
    (g,) = torch.autograd.grad(each(model, (x, b[1])).sum(), x)
    return each(model, ((x + 0.1 * g.sign()).detach(), b[1]))


def penalised(model: nn.Module, b: Any, kept: dict[str, Any]) -> Tensor:
    x = b[0].clone().requires_grad_()
    losses = each(model, (x, b[1]))
    (g,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    return losses + g.square().sum(1)


def averaged(model: nn.Module, b: Any, kept: dict[str, Any]) -> Tensor:
    average = kept.setdefault("average", torch.optim.swa_utils.AveragedModel(perceptron()))
    average.update_parameters(model)
    return each(model, b)


def siamese(model: nn.Module, b: Any, kept: dict[str, Any]) -> Tensor:
    apart = (model(b[0]) - model(b[0].roll(1, 1))).square().sum(1)
    return torch.where(b[1] == 0, apart, (2 - apart).relu())


def own_negatives(model: nn.Module, b: Any, kept: dict[str, Any]) -> Tensor:
    return F.triplet_margin_loss(model(b[0]), model(1.1 * b[0]), model(-b[0]), reduction="none")


def pseudo_labels(model: nn.Module, b: Any, kept: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        labels = model(b[0]).argmax(1)
    return each(model, (b[0], labels))


def policy(model: nn.Module, b: Any, kept: dict[str, Any]) -> Tensor:
    return -Categorical(logits=model(b[0])).log_prob(b[1]) * b[0][:, 0]


SERVED: dict[str, tuple[Build, Sequence[Tensor], Loop]] = {
    "packed sequences": (lambda: Recurrent(packed=True), TEXT, plain),
    "own last positions": (lambda: Recurrent(packed=False), TEXT, plain),
    "teacher forcing": (lambda: Translator(forced=True), TEXT, tokens),
    "own predictions": (lambda: Translator(forced=False), TEXT, tokens),
    "CTC": (lambda: Translator(forced=True), TEXT, ctc),
    "graphs": (lambda: Graph(together=False), GRAPHS, plain),
    "one graph of blocks": (lambda: Graph(together=True), GRAPHS, plain),
    "variational autoencoder": (Autoencoder, TABLE, reconstruction),
    "tied autoencoder": (Tied, TABLE, reconstruction),
    "mixture of experts": (Experts, TABLE, plain),
    "checkpointing": (lambda: Saves(reentrant=False), TABLE, plain),
    "reentrant checkpointing": (lambda: Saves(reentrant=True), TABLE, plain),
    "label smoothing": (
        perceptron,
        TABLE,
        lambda m, b, k: F.cross_entropy(m(b[0]), b[1], reduction="none", label_smoothing=0.1),
    ),
    "focal loss": (
        perceptron,
        TABLE,
        lambda m, b, k: (1 - (-each(m, b)).exp()).square() * each(m, b),
    ),
    "weights by label": (perceptron, TABLE, lambda m, b, k: each(m, b) * (1 + b[1])),
    "several heads": (
        perceptron,
        TABLE,
        lambda m, b, k: each(m, b) + m(b[0])[:, 0].square(),
    ),
    "frozen teacher": (perceptron, TABLE, distilled),
    "adversarial examples": (perceptron, TABLE, attacked),
    "average of weights": (perceptron, TABLE, averaged),
    "siamese": (perceptron, TABLE, siamese),
    "triplets inside a record": (perceptron, TABLE, own_negatives),
    "pseudo-labels": (perceptron, TABLE, pseudo_labels),
    "policy gradient": (perceptron, TABLE, policy),
    "sorted losses": (perceptron, TABLE, lambda m, b, k: each(m, b).sort().values),
}


def prototypes(model: nn.Module, b: Any, kept: dict[str, Any]) -> Tensor:
    scores = model(b[0])
    centre = kept.setdefault("centre", torch.zeros(CLASSES))
    kept["centre"] = scores.detach().mean(0)
    return (scores - centre).square().sum(1)


def advantages(model: nn.Module, b: Any, kept: dict[str, Any]) -> Tensor:
    kept["mean"] = 0.5 * kept.get("mean", 0.0) + 0.5 * float(b[0][:, 0].mean())
    return each(model, b) * (b[0][:, 0] - kept["mean"])


def curriculum(model: nn.Module, b: Any, kept: dict[str, Any]) -> Tensor:
    losses = each(model, b)
    most, kept["most"] = kept.get("most", 9.0), float(losses.detach().median())
    return losses * (losses.detach() <= most)


def replayed(model: nn.Module, b: Any, kept: dict[str, Any]) -> Tensor:
    stored = model.kept["list"]
    old = stored[-1] if stored else torch.zeros(1, FEATURES)
    stored.append(b[0].clone())
    return each(model, b) + (model(b[0]) - model(old).mean(0).detach()).square().sum(1)


class LongestFirst(nn.Module):
    """Sequences are sorted to be packed, and put back."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.rnn, self.head = nn.GRU(4, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        lengths, order = lengths.sort(descending=True)
        packed = pack_padded_sequence(self.table(tokens)[order], lengths, batch_first=True)
        return self.head(self.rnn(packed)[1][0])[order.argsort()]


def two_views(model: nn.Module, b: Any, kept: dict[str, Any]) -> Tensor:
    a, c = model(torch.cat([b[0], 0.5 * b[0]])).split(len(b[0]))
    return each(lambda x: x, (a, b[1])) + (a - c).square().sum(1)  # type: ignore[arg-type]


def with_penalty(model: nn.Module, b: Any, kept: dict[str, Any]) -> Tensor:
    return each(model, b) + 0.01 * sum(p.square().sum() for p in model.parameters())


# records are on their own, and no rule for layers can tell it
SLOWER: dict[str, tuple[Build, Sequence[Tensor], Loop]] = {
    "sorted by length": (LongestFirst, TEXT, plain),
    "two views in one pass": (perceptron, TABLE, two_views),
    "penalty on the weights": (perceptron, TABLE, with_penalty),
    "rare classes in clusters": (
        lambda: nn.AdaptiveLogSoftmaxWithLoss(FEATURES, CLASSES, [1, 2], div_value=1.0),
        TABLE,
        lambda m, b, k: -m(*b).output,
    ),
}


# what is kept from one batch to the next, and where; each moves more than C
KEPT: dict[str, tuple[Build, Loop]] = {
    "prototypes": (perceptron, prototypes),
    "normalised advantages": (perceptron, advantages),
    "curriculum by losses": (perceptron, curriculum),
    "replay from a list": (Keeps, replayed),
}
# in a batch; found where `attach` is given the loss
COUPLED: dict[str, Loop] = {
    "baseline of the batch": lambda m, b, k: each(m, b) * (b[0][:, 0] - b[0][:, 0].mean()),
    "balanced experts": lambda m, b, k: (
        each(m, b) + 3 * m(b[0]).softmax(1).mean(0).square().sum()
    ),
    "in-batch negatives": lambda m, b, k: F.cross_entropy(
        m(b[0]) @ m(b[0].roll(1, 1)).T, torch.arange(len(b[0])), reduction="none"
    ),
    "label propagation": lambda m, b, k: F.cross_entropy(
        m(b[0]), torch.cdist(b[0], b[0]).neg().softmax(1) @ F.one_hot(b[1], CLASSES).float(),
        reduction="none",
    ),
    "share of all weights": lambda m, b, k: each(m, b) * (1 + b[1]) / (1 + b[1]).sum(),
    "a mean spread out again": lambda m, b, k: each(m, b).mean().expand(len(b[0])),
}  # fmt: skip
# what is differentiated shows it in the first batch
BY_THE_GRAPH = {"balanced experts", "in-batch negatives", "a mean spread out again"}
REFUSED: dict[str, tuple[Build, Loop, str]] = {
    "gradient penalty": (perceptron, penalised, 'differentiates.*isolation="vmap"'),
    "sharpness (SAM)": (
        perceptron,
        lambda m, b, k: each(m, b) + torch.autograd.grad(
            each(m, b).sum(), list(m.parameters())
        )[0].sum(),
        "do not exist outside of optimizer.step",
    ),
    "inner steps (MAML)": (
        perceptron,
        lambda m, b, k: torch.func.grad(
            lambda p: torch.func.functional_call(m, p, (b[0],)).sum()
        )(dict(m.named_parameters()))["0.bias"].sum() + each(m, b),
        "torch.func ran the attached model",
    ),
    "views one after the other": (
        perceptron, lambda m, b, k: each(m, (b[0].repeat(2, 1), b[1].repeat(2))), "rows"
    ),
    "penalty on the weights": (
        perceptron,
        lambda m, b, k: each(m, b) + sum(p.square().sum() for p in m.parameters()),
        "outside its module",
    ),
    "mining": (perceptron, lambda m, b, k: each(m, b).topk(3).values, "rows"),
    "channels masked by the batch": (MasksChannels, plain, "are mixed"),
    "CutMix in the model": (MixesFeatures, plain, "are mixed"),
    "memory of the last batch": (Remembers, plain, "are mixed"),
}  # fmt: skip


def released(
    build: Build, columns: Sequence[Tensor], loop: Loop, keep: Sequence[int], **options: Any
) -> tuple[list[Tensor], str]:
    """The sums of every step, without noise, and what they rest on."""
    torch.manual_seed(0)
    model, sums, kept = build(), [], {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=N, steps=STEPS, noise_multiplier=0.0, delta=1e-5
    )
    data = TensorDataset(*(column[list(keep)] for column in columns))
    with dpoptim.attach(plan, model, optimizer, data, **options) as private:

        def look(*step: Any) -> None:
            if all(p.grad is not None for p in model.parameters()):  # not between parts of a batch
                parts = [p.grad.double().flatten() for p in model.parameters()]
                sums.append(N * torch.cat(parts))

        optimizer.register_step_pre_hook(look)
        for batch in private.batches():
            private.backward(loop(model, batch, kept))
            optimizer.step()
        return sums, "\n".join(item.text for item in private.basis if item.kind == "trusted")


def moved(build: Build, columns: Sequence[Tensor], loop: Loop, **options: Any) -> tuple[float, str]:
    whole, trusted = released(build, columns, loop, range(N), **options)
    less, _ = released(build, columns, loop, range(1, N), **options)
    assert len(whole) == len(less) == STEPS
    assert float(whole[0].norm()) > 0.05
    return max(float((a - b).norm()) for a, b in zip(whole, less, strict=True)), trusted


@pytest.mark.filterwarnings("ignore::dpoptim.training.trials.isolation.IsolationWarning")
@pytest.mark.parametrize("name", SERVED)
def test_a_record_moves_these_by_at_most_the_clip_norm(name: str) -> None:
    assert moved(*SERVED[name])[0] <= 1.0


@pytest.mark.set_aside("vmap")
@pytest.mark.parametrize("isolation", ["auto", "vmap"])
@pytest.mark.filterwarnings("ignore::dpoptim.training.trials.isolation.IsolationWarning")
def test_gradient_penalties_go_by_vectorised_models(isolation: str) -> None:
    checked: dict[str, Any] = {"loss": lambda m, b: penalised(m, b, {})}
    distance, trusted = moved(perceptron, TABLE, penalised, isolation=isolation, **checked)
    assert distance <= 1.0
    assert "loss not checked" not in trusted
    with pytest.raises(dpoptim.PrivacyError, match='isolation="vmap"'):
        released(perceptron, TABLE, penalised, range(N), isolation="rules", **checked)


@pytest.mark.filterwarnings("ignore::dpoptim.training.trials.isolation.IsolationWarning")
@pytest.mark.parametrize("name", SLOWER)
def test_losses_that_the_model_s_way_does_not_suit_go_by_a_slower_one(name: str) -> None:
    build, columns, loop = SLOWER[name]
    options: dict[str, Any] = {"loss": lambda m, b: loop(m, b, {})}
    distance, trusted = moved(build, columns, loop, **options)
    assert 0.5 < distance <= 1.0  # the first record's own gradient is clipped, and nobody else's
    assert "loss not checked" not in trusted
    alone, _ = released(build, columns, loop, range(N), isolation="alone")
    whole, _ = released(build, columns, loop, range(N), **options)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(whole, alone, strict=True))
    with pytest.raises(dpoptim.SamplesInteractError, match='isolation=.*"auto"'):
        released(build, columns, loop, range(N), isolation="rules", **options)


@pytest.mark.filterwarnings("ignore::dpoptim.training.trials.isolation.IsolationWarning")
@pytest.mark.parametrize("build", [LongestFirst, lambda: Recurrent(packed=True)])
def test_packed_sequences_are_tried_without_the_loss_too(build: Build) -> None:
    """Made-up records have lengths that can be packed, which sorting brings into another order."""
    distance, trusted = moved(build, TEXT, plain)
    assert 0.5 < distance <= 1.0
    assert "not tested on random inputs" not in trusted


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_from_batch_to_batch_is_named(name: str) -> None:
    build, loop = KEPT[name]
    distance, trusted = moved(build, TABLE, loop)
    assert distance > 1.001  # else it shows nothing
    assert "prototypes, stored records, running numbers" in trusted
    assert ("plain attributes" in trusted) == (build is Keeps)


@pytest.mark.parametrize("name", COUPLED)
def test_couplings_in_the_loss_are_found_or_named(name: str) -> None:
    loop = COUPLED[name]
    with pytest.raises(dpoptim.PrivacyError):
        released(perceptron, TABLE, loop, range(N), loss=lambda m, b: loop(m, b, {}))
    if name in BY_THE_GRAPH:
        with pytest.raises(dpoptim.SamplesInteractError, match="what the model returned for other"):
            released(perceptron, TABLE, loop, range(N))
        return
    _, trusted = released(perceptron, TABLE, loop, range(N))
    assert trusted.startswith("loss not checked")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(name: str) -> None:
    build, loop, said = REFUSED[name]
    with pytest.raises((dpoptim.PrivacyError, RuntimeError)) as raised:
        released(build, TABLE, loop, range(N))
    text = " ".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert re.search(said, text)
