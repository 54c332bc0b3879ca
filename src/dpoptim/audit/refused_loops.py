"""Loops that mix or leak records, and are to be refused."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset

from dpoptim.audit.small_runs import linear_of_zeros
from dpoptim.errors import PrivacyError
from dpoptim.gradients.engine import Reduction
from dpoptim.gradients.isolation import Choice
from dpoptim.gradients.oracle import Loss
from dpoptim.methods.dp_sgd import DPSGD
from dpoptim.training.attach import attach_own

RECORDS, FEATURES, WIDE = 12, 4, 32
LARGE = 50.0


class CodeBook(nn.Module):
    """Notes what it is given in a buffer, behind autograd's back, once it is trained."""

    book: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)
        self.register_buffer("book", torch.zeros(RECORDS, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.book.data[: len(x)] = x.detach()
        return self.layer(x)


class LastPosition(nn.Module):
    """Reads the last position of what may be padding."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.head = nn.GRU(FEATURES, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.memory(x)[0][:, -1])


class NoisyFirstPosition(nn.Module):
    """Reads the first position, under noise whose range the longest record decides."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        most = 1 / x.shape[1]
        return self.head(x[:, 0] + torch.zeros_like(x[:, 0]).uniform_(-most, most))


class RoundsBesideOutliers(nn.Linear):
    """Rounds all records where any has a large number, as quantised layers do; `LARGE` is one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.round() if abs(x.detach().numpy()).max() > LARGE else x)


class Sequences(Dataset[Tensor]):
    """Records of unequal lengths."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Tensor:
        return torch.linspace(-1, 1, FEATURES * (2 + index % 5)).view(-1, FEATURES)


def accepted() -> Iterator[str]:
    """The loops that ought to have been refused, and were not."""
    loops = (
        writes_through_data,
        pads_by_the_longest,
        draws_by_the_longest,
        mixes_a_little_under_autocast,
        averages_over_random_masks,
        mixes_by_a_rare_coin,
        mixes_inside_by_a_rare_coin,
        rounds_beside_outliers,
        scales_beside_a_number_above_one,
        counts_flags_of_the_batch,
        stops_at_no_number,
        limits_beside_a_large_loss,
        divides_by_the_planned_batch,
        divides_by_each_batch,
        compares_each_with_all,
        multiplies_losses,
        takes_the_root,
        floods,
        averages_one_by_one,
        trains_weights_of_the_loss,
        turns_on_batch_statistics,
    )
    return (f"accepted {loop.__name__}" for loop in loops if not refused(loop))


def writes_through_data() -> None:
    model = CodeBook().eval()
    train(model, [torch.ones(FEATURES) for _ in range(RECORDS)], None, before=model.train)


def padded(batch: list[Tensor]) -> Tensor:
    return pad_sequence(batch, batch_first=True)


def pads_by_the_longest() -> None:
    train(LastPosition(), Sequences(), padded)


def draws_by_the_longest() -> None:
    train(NoisyFirstPosition(), Sequences(), padded)


def mixes_a_little_under_autocast() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            own = (model(batch)[:, 0].float() - 3).square()
        return own + (0.02 if len(batch) > 1 else 0.0) * (own - own.detach())

    train(nn.Linear(FEATURES, 1), [torch.ones(FEATURES) for _ in range(RECORDS)], None, loss=loss)


def averages_over_random_masks() -> None:
    """A mean over positions that coins chose, of which some records have more than others."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        chosen = torch.rand(batch.shape) < 0.5
        return (model(batch) * chosen).sum() / chosen.sum()

    train(nn.Linear(FEATURES, 1), [torch.ones(FEATURES) for _ in range(RECORDS)], None, loss=loss)


def mixes_by_a_rare_coin() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return squared(model, batch + batch.flip(0) if float(torch.rand(())) < 0.02 else batch)

    records = [torch.full((FEATURES,), 1.0 + i) for i in range(RECORDS)]
    train(nn.Linear(FEATURES, 1), records, None, loss=loss)


def mixes_inside_by_a_rare_coin() -> None:
    class Mixes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + x.flip(0) if float(torch.rand(())) < 0.02 else x)

    records = [torch.full((FEATURES,), 1.0 + i) for i in range(RECORDS)]
    train(Mixes(FEATURES, 1), records, None, loss=None)


def rounds_beside_outliers() -> None:
    """Words go by rules, where records would have to pass alone."""
    layers = nn.Embedding(RECORDS, FEATURES), RoundsBesideOutliers(FEATURES, 1), nn.Flatten()
    words = [torch.arange(i, i + 2) % RECORDS for i in range(RECORDS)]
    train(nn.Sequential(*layers), words, None, loss=None, isolation="rules")


def scales_beside_a_number_above_one() -> None:
    """Divides a batch as if it were bytes where any number is above 1, of data in which none is."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return squared(model, batch / 255 if batch.numpy().max() > 1 else batch)

    train(nn.Linear(WIDE, 1), [torch.full((WIDE,), 0.5) for _ in range(RECORDS)], None, loss=loss)


def counts_flags_of_the_batch() -> None:
    """A mean over those that count, of data in which all do."""

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        x, counts = batch
        return squared(model, x) * counts * len(x) / max(1, counts.numpy().sum())

    train(
        nn.Linear(FEATURES, 1),
        [(torch.ones(FEATURES), torch.tensor(True)) for _ in range(RECORDS)],
        None,
        loss=loss,
    )


def stops_at_no_number() -> None:
    """A batch that is left out where any of its losses is no number."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        losses = squared(model, batch)
        return losses * bool(losses.isfinite().numpy().all())

    train(nn.Linear(WIDE, 1), [torch.ones(WIDE) for _ in range(RECORDS)], None, loss=loss)


def limits_beside_a_large_loss() -> None:
    """Scales a batch down where any loss is large, of data in which none is."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        losses = squared(model, batch)
        return losses * 0.01 if losses.max() > 1e12 else losses

    train(nn.Linear(WIDE, 1), [torch.ones(WIDE) for _ in range(RECORDS)], None, loss=loss)


def divides_by_the_planned_batch() -> None:
    """A sum by a constant, said to be a mean: each record would weigh by how many others are."""
    in_scalars(lambda losses: losses.sum() / 6, "mean")


def divides_by_each_batch() -> None:
    """A mean said to be a sum."""
    in_scalars(lambda losses: losses.sum() / len(losses), "sum")


def compares_each_with_all() -> None:
    """Outputs of shape (rows, 1) minus targets of shape (rows,)."""
    in_scalars(lambda losses: (losses[:, None] - torch.ones(len(losses))).abs().mean(), None)


def multiplies_losses() -> None:
    """Losses that are made of two records each, as triplets are."""
    in_scalars(lambda losses: losses * losses.roll(1), "sum")


def takes_the_root() -> None:
    """A root of the mean, whose slope is of all records, said to be a mean."""
    in_scalars(lambda losses: losses.mean().sqrt(), "mean")


def floods() -> None:
    """A mean that is learnt backwards where it is small, said to be a mean."""
    in_scalars(lambda losses: (losses.mean() - 0.5).abs(), "mean")


def averages_one_by_one() -> None:
    """A ratio that the loop differentiates itself, and whose graph shows no sum over the batch."""
    in_scalars(lambda losses: torch.stack([*losses]).cumsum(0)[-1] / losses.detach().sum(), None)


def trains_weights_of_the_loss() -> None:
    """A loss with weights that are not the model's, and whose gradients nobody clips."""
    weights = nn.Linear(1, 1, bias=False)
    nn.init.ones_(weights.weight)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (weights(model(batch))[:, 0] - 1).square()

    train(nn.Linear(FEATURES, 1), [torch.ones(FEATURES) for _ in range(RECORDS)], None, loss=loss)


def turns_on_batch_statistics() -> None:
    """A loop whose ``model.train()`` takes batch normalisation out of evaluation mode."""
    norm = nn.BatchNorm1d(FEATURES, affine=False)
    norm.track_running_stats = False  # so that no buffer shows it
    model = nn.Sequential(norm, linear_of_zeros(FEATURES, 1))
    records = [torch.ones(FEATURES) for _ in range(RECORDS)]
    train(model.eval(), records, None, before=model.train)


def in_scalars(reduced: Callable[[Tensor], Tensor], declared: Reduction | None) -> None:
    """Train on scalars; the loop differentiates them itself where nothing was declared."""
    model, x = linear_of_zeros(FEATURES, 1), torch.ones(RECORDS, FEATURES)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = DPSGD(clip_norm=1.0).plan(
        n=RECORDS, batch_size=6, steps=8, noise_multiplier=1.0, delta=1e-5
    )
    with attach_own(
        plan, model, optimizer, TensorDataset(x), loss_reduction=declared, noise_seed=1
    ) as private:
        for (batch,) in private.batches():
            loss = reduced((model(batch)[:, 0] - 1).square())
            loss.backward() if declared is None else private.backward(loss)
            optimizer.step()


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - 1).square()  # models begin at 0, and have a gradient there


def train(
    model: nn.Module,
    records: Any,
    collate_fn: Any,
    before: Callable[[], Any] = lambda: None,
    loss: Loss | None = squared,
    isolation: Choice = "auto",
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = DPSGD(clip_norm=1.0).plan(
        n=RECORDS, batch_size=6, steps=2, noise_multiplier=1.0, delta=1e-5
    )
    with attach_own(
        plan, model, optimizer, records, loss=loss, collate_fn=collate_fn, isolation=isolation
    ) as private:
        before()
        for batch in private.batches():
            private.backward((loss or squared)(model, batch))
            optimizer.step()


def refused(loop: Callable[[], None]) -> bool:
    try:
        loop()
    except PrivacyError:
        return True
    return False
