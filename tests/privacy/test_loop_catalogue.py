"""Ordinary loops in which records meet: each is refused, or named among what is taken on trust.
None is silent.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset, default_collate

import dpoptim

N, FEATURES, CLASSES = 24, 5, 3
Loss = Callable[[nn.Module, Any], Tensor]


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, CLASSES))


def table() -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(N, FEATURES), torch.arange(N) % CLASSES)


def attach(model: nn.Module, records: Dataset[Any], **options: Any) -> Any:
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=6, steps=2, noise_multiplier=1.0, delta=1e-5
    )
    return dpoptim.attach(
        plan, model, torch.optim.SGD(model.parameters(), lr=0.1), records, **options
    )


def each(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def mixed(model: nn.Module, x: Tensor, y: Tensor, order: Tensor, share: float = 0.7) -> Tensor:
    scores = model(share * x + (1 - share) * x[order])
    pair = [F.cross_entropy(scores, target, reduction="none") for target in (y, y[order])]
    return share * pair[0] + (1 - share) * pair[1]


def cutmix(model: nn.Module, b: Any) -> Tensor:
    x = b[0].clone()
    x[:, :2] = b[0].flip(0)[:, :2]
    return F.cross_entropy(model(x), b[1], reduction="none")


def contrastive(model: nn.Module, b: Any) -> Tensor:
    z = F.normalize(model(b[0]), dim=1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)), reduction="none")


def triplet(model: nn.Module, b: Any) -> Tensor:
    z = model(b[0])
    return F.triplet_margin_loss(z, z.roll(1, 0), z.roll(2, 0), margin=50.0, reduction="none")


def centre(model: nn.Module, b: Any) -> Tensor:
    z = model(b[0])
    centres = torch.stack(
        [z[b[1] == k].mean(0) if bool((b[1] == k).any()) else z[0] * 0 for k in range(CLASSES)]
    )
    return (z - centres[b[1]]).square().sum(1)


def distillation(model: nn.Module, b: Any) -> Tensor:
    z = model(b[0])
    return F.kl_div(
        z.log_softmax(1), z.detach().mean(0, keepdim=True).softmax(1).expand_as(z), reduction="none"
    ).sum(1)


IN_THE_LOSS: dict[str, Loss] = {
    "mixup by a permutation": lambda m, b: mixed(m, *b, torch.randperm(len(b[0]))),
    "mixup by reversal": lambda m, b: mixed(m, *b, torch.arange(len(b[0])).flip(0)),
    "cutmix": cutmix,
    "in-batch contrastive": contrastive,
    "triplets of the batch": triplet,
    "centre loss": centre,
    "distillation from the batch": distillation,
    "standardised inputs": lambda m, b: each(m, ((b[0] - b[0].mean(0)) / (b[0].std(0) + 1), b[1])),
    "centred scores": lambda m, b: F.cross_entropy(
        (s := m(b[0])) - s.mean(0), b[1], reduction="none"
    ),
    "scores normalised over the batch": lambda m, b: (
        -m(b[0]).log_softmax(0).gather(1, b[1][:, None])[:, 0]
    ),
    "class-balanced weights": lambda m, b: (
        each(m, b) / torch.bincount(b[1], minlength=CLASSES)[b[1]]
    ),
    "class weights inside a mean by hand": lambda m, b: (
        ((w := torch.tensor([1.0, 9.0, 0.1])[b[1]]) * each(m, b)).sum() / w.sum()
    ),
    "hard mining": lambda m, b: each(m, b).topk(2).values.mean(),
    "hard mining by a mask": lambda m, b: (w := each(m, b)) * (w >= w.detach().median()),
    "trimmed mean": lambda m, b: each(m, b).sort().values[:-1].mean(),
    "self-paced weights": lambda m, b: (w := each(m, b)) * (-w.detach() / w.detach().mean()).exp(),
    "losses scaled by their mean": lambda m, b: (w := each(m, b)) / w.detach().mean(),
    "square root of the mean": lambda m, b: each(m, b).mean().sqrt(),
    "log-sum-exp of losses": lambda m, b: each(m, b).logsumexp(0),
    "largest loss": lambda m, b: each(m, b).max(),
    "variance penalty": lambda m, b: each(m, b).mean() + 5 * each(m, b).var(),
    "entropy of the mean prediction": lambda m, b: (
        each(m, b).mean() - 3 * torch.special.entr(m(b[0]).softmax(1).mean(0)).sum()
    ),
    "(rows, 1) against (rows,)": lambda m, b: (m(b[0])[:, :1] - b[1].float()).square().mean(1),
    "pairwise ranking": lambda m, b: (m(b[0])[:, 0][:, None] - m(b[0])[:, 0]).relu().mean(1),
    "a mean over chosen records": lambda m, b: each(m, b)[b[1] == 0].mean(),
}


@pytest.mark.parametrize("name", IN_THE_LOSS)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_couplings_in_the_loss_are_found_when_attaching(name: str) -> None:
    with pytest.raises(dpoptim.PrivacyError):
        attach(classifier(), table(), loss=IN_THE_LOSS[name])


class Batchwise(nn.Module):
    """A module that lets records of a batch meet."""

    def __init__(self, meet: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.meet, self.layer = meet, nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.meet(x))


IN_THE_MODEL: dict[str, Callable[[Tensor], Tensor]] = {
    "batch mean": lambda x: x - x.mean(0),
    "batch attention": lambda x: (x @ x.T).softmax(1) @ x,
    "sorting across the batch": lambda x: x.sort(0).values,
    "a shift of records": lambda x: x + x.roll(1, 0),
    "scaling by the largest": lambda x: x / x.abs().max(),
    "cumulative sums of records": lambda x: x.cumsum(0),
    "whitening": lambda x: x / (x.var(0, keepdim=True) + 0.1).sqrt(),
}


@pytest.mark.parametrize("name", IN_THE_MODEL)
def test_couplings_in_the_model_are_found_when_attaching(name: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(dpoptim.PrivacyError, match="are mixed"):
        attach(Batchwise(IN_THE_MODEL[name]), table())


class Sequences(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(2 + index % 5, FEATURES, generator=generator), index % CLASSES


def padded(batch: list[Any]) -> tuple[Tensor, Tensor]:
    return pad_sequence([x for x, _ in batch], batch_first=True), torch.tensor(
        [y for _, y in batch]
    )


def cut_to_the_shortest(batch: list[Any]) -> tuple[Tensor, Tensor]:
    shortest = min(len(x) for x, _ in batch)
    return default_collate([(x[:shortest], y) for x, y in batch])


def standardised(batch: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = padded(batch)
    return x - x.mean((0, 1)), y


def mixup(batch: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = padded(batch)
    return 0.6 * x + 0.4 * x.flip(0), y


COLLATES = {
    "padding": padded,
    "cutting": cut_to_the_shortest,
    "standardising": standardised,
    "mixup": mixup,
}


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mean(1))  # over padding, too


@pytest.mark.parametrize("name", COLLATES)
def test_couplings_in_the_collate_function_are_found_or_named(name: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(dpoptim.SamplesInteractError):
        attach(Pooled(), Sequences(), loss=each, collate_fn=COLLATES[name])
    with attach(Pooled(), Sequences(), collate_fn=COLLATES[name]) as private:
        trusted = [item.text for item in private.basis if item.kind == "trusted"]
    assert trusted[0].startswith("loss not checked")
    assert trusted[1].startswith("collate_fn not checked")


BY_THE_LOOP = [
    "ReduceLROnPlateau on a loss",
    "early stopping",
    "best checkpoint",
    "printed losses",
    "resampling by loss",
]


def test_what_a_loop_does_with_what_it_saw_is_named() -> None:
    """No code can see it: schedulers on private losses, stopping, choosing checkpoints, logs,
    samplers.
    """
    assert len(BY_THE_LOOP) + len(IN_THE_LOSS) + len(IN_THE_MODEL) + len(COLLATES) >= 40
    with attach(classifier(), table(), loss=each) as private:
        trusted = " ".join(item.text for item in private.basis if item.kind == "trusted")
    for word in ("scheduler", "stopping rule", "parameter", "sampler", "log"):
        assert word in trusted
