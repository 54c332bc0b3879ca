"""Loops that mix or leak records: to be refused, or to give each no more than its share."""

import warnings
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

from dpoptim.audit.finding import refuted_by
from dpoptim.audit.refused_loops import FEATURES, accepted
from dpoptim.audit.small_runs import CLIP_NORM, linear_of_zeros, parameters_of, sum_of_a_step
from dpoptim.errors import PrivacyError
from dpoptim.methods.dp_sgd import DPSGD
from dpoptim.training.attach import attach_own
from dpoptim.training.losses.per_sample import per_sample
from dpoptim.training.trials.isolation import IsolationWarning
from dpoptim.training.trials.loss_check import OwnMeansWarning

POSITIONS, FLAG = 4, 7.0


class Folded(nn.Module):
    """Folds records and positions together, in a method that a loop may call by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear_of_zeros(FEATURES, 1)

    def encode(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])[..., 0]

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


class Branches(nn.Module):
    """Two layers that a loss may call by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = linear_of_zeros(FEATURES, 1), linear_of_zeros(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)


def isolation() -> str:
    """Loops to be refused, and loops whose sums are looked at, up to the first that is wrong."""
    sums = (
        rows_of_an_earlier_pass,
        empty_slots,
        sorted_into_empty_slots,
        dropout_by_a_public_seed,
        sorted_for_one_layer,
        formed_a_few_at_once,
        norms_that_count_microbatches,
        flags_of_one_record,
        counts_of_others_labels,
        labels_of_others_in_own_losses,
    )
    found = chain(accepted(), filter(None, (measure() for measure in sums)))
    return refuted_by([*islice(found, 1)])


def rows_of_an_earlier_pass() -> str:
    """A pass over more records before a method is called: whose positions are whose?"""

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.no_grad():
            model(torch.ones(8, POSITIONS, FEATURES))
        assert isinstance(model, Folded)
        return (model.encode(batch) - 1).square().sum(1)

    x = torch.zeros(6, POSITIONS, FEATURES)
    without = sum_of_a_step(Folded(), TensorDataset(x), step)
    # its positions would be those of two records, each with a bound of its own
    x[-1] = 1e3
    return moved_beyond_bound(
        "rows of an earlier pass", sum_of_a_step(Folded(), TensorDataset(x), step), without
    )


def empty_slots() -> str:
    """A record in the place of a made-up one that pulls the other way."""

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) - 1).square().sum(1)

    x = torch.zeros(6, POSITIONS, FEATURES)
    x[-1] = -1e3
    sums = [
        sum_of_a_step(Folded(), TensorDataset(some), step, n=6, fixed_shape=True)
        for some in (x, x[:-1])
    ]
    return moved_beyond_bound("a record in an empty slot", *sums)


def sorted_into_empty_slots() -> str:
    """A record that is the first where records are sorted, after it was said which slots are empty.

    There are twice as many slots as records, and each record pulls another way than the next.
    """

    def collate(records: list[Tensor]) -> Tensor:
        return torch.stack(sorted(records, key=lambda record: float(record[0])))

    x = torch.full((12, FEATURES), 4.0)
    x[::2] = -4.0
    x[:, 0] = -torch.arange(12)
    sums = []
    for some in (x, x[:-1]):
        model = linear_of_zeros(FEATURES, 1)
        plan = DPSGD(clip_norm=CLIP_NORM).plan(
            n=24, batch_size=24, steps=1, noise_multiplier=0, delta=1e-5
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        records: Any = [*some]
        try:
            with attach_own(
                plan, model, optimizer, records, collate_fn=collate, noise_seed=0
            ) as private:
                for batch in private.batches(fixed_shape=True):
                    private.backward(model(batch)[:, 0].sigmoid())
                    optimizer.step()
        except PrivacyError:
            return ""
        sums.append(-24 * parameters_of(model))
    return moved_beyond_bound("a record that others are sorted behind", *sums)


class Scales(Folded):
    """Scales entries by a generator of its own, as it was seeded."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.empty_like(x).uniform_(generator=self.generator))


def dropout_by_a_public_seed() -> str:
    """Two runs after the same ``manual_seed``: nobody may know whose masks are whose."""
    drop = nn.Dropout(0.5)
    steps = {
        Folded: lambda model, batch: (model(drop(batch)) - 1).square().sum(1),
        Scales: lambda model, batch: (model(batch) - 1).square().sum(1),
    }
    x = torch.arange(6 * POSITIONS * FEATURES).sin().view(6, POSITIONS, FEATURES)
    with torch.random.fork_rng():
        for build, step in steps.items():
            sums = []
            for _ in range(2):
                torch.manual_seed(0)
                sums.append(sum_of_a_step(build(), TensorDataset(x), step))
            if torch.equal(*sums):
                return "dropout follows a public seed"
    return ""


def sorted_for_one_layer() -> str:
    """A loss that one layer sees in another order: by rules a slot has parts of two records."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        assert isinstance(model, Branches)
        (x,) = batch
        order = x[:, 0].argsort()
        out = model.left(x[order])[order.argsort()] + model.right(x)
        return out[:, 0] * x[:, 1].exp()

    x = torch.ones(6, FEATURES)
    x[:, 0], x[:, 1] = torch.arange(6), 4 * (torch.arange(6) % 2) - 4  # every other one is steep
    x[-1, 0] = -1  # the first in order: without it all others have other slots
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IsolationWarning)
        sums = [
            sum_of_a_step(
                Branches(), TensorDataset(some), lambda m, b: loss(m, (b,)), n=6, checked=loss
            )
            for some in (x, x[:-1])
        ]
    return moved_beyond_bound("a record that others are sorted beside", *sums)


def formed_a_few_at_once() -> str:
    """The first or the last of many small records, every other one steep.

    The others have then their neighbours' places, or a neighbour is the last. They are as many, and
    as large, as by public sizes are formed and measured together: with fewer positions norms are
    claimed.
    """
    n = 80
    x = torch.ones(n, 60, 256) * torch.tensor([1e-6, 1.0]).repeat(n // 2)[:, None, None]
    whole, *others = (
        sum_of_a_step(
            linear_of_zeros(256, 64), TensorDataset(some), lambda m, b: m(b).sum((1, 2)), n=n
        )
        for some in (x, x[1:], x[:-1])
    )
    found = (
        moved_beyond_bound("a record beside those formed with it", whole, other) for other in others
    )
    return next(filter(None, found), "")


def norms_that_count_microbatches() -> str:
    """One record more, in a microbatch of its own: do spectral norms go on for it?"""
    states = []
    for n in (6, 7):
        layer = linear_of_zeros(FEATURES, 3)
        layer.weight.data[range(3), range(3)] = torch.tensor([1.0, 0.95, 0.9])  # slow to follow
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = parametrizations.spectral_norm(layer)
        sum_of_a_step(
            model, TensorDataset(torch.ones(n, FEATURES)), lambda m, b: m(b).sum(1), n=6, physical=1
        )
        states.append(torch.cat([buffer.flatten() for buffer in model.buffers()]))
    return "" if torch.equal(*states) else "spectral norms counted the microbatches of a step"


class Unserved(torch.autograd.Function):
    """The product of records and a scale, as no vectorised call takes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return g * scale, (g * x).sum(0)


class Flagged(nn.Module):
    """Turns a record round that has a certain number, which it says in a plain value."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: Tensor) -> tuple[Tensor, bool]:
        # in numpy, since a trial has the numbers that torch's operators compare records with
        return Unserved.apply(x, self.scale), bool((x.detach().cpu().numpy() == FLAG).any())


class Turned(nn.Module):
    """Reads what `Flagged` says."""

    def __init__(self) -> None:
        super().__init__()
        self.flagged, self.layer = Flagged(), linear_of_zeros(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        out, turned = self.flagged(x)
        return self.layer(-out if turned else out)[..., 0]


def flags_of_one_record() -> str:
    """A record with a number that no made-up one has, in a module that runs record by record."""
    x = torch.ones(6, FEATURES)
    x[-1] = FLAG
    sums = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IsolationWarning)
        for some in (x, x[:-1]):
            try:
                sums.append(sum_of_a_step(Turned(), TensorDataset(some), lambda m, b: m(b), n=6))
            except PrivacyError:  # what it says is not the same for all
                return ""
    return moved_beyond_bound("a record that others take for themselves", *sums)


def counts_of_others_labels() -> str:
    """A record with many labels, beside others with one, under a mean over all of them."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x = batch if isinstance(batch, Tensor) else batch[0]
        mean = F.cross_entropy(model(x).flatten(0, 1), x[..., 0].long().flatten())
        return CLIP_NORM / 2 * mean  # so that no gradient is clipped

    x = torch.full((6, POSITIONS, FEATURES), -100.0)  # a label that does not count
    x[:, 0], x[-1] = 1.0, 0.0
    sums = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OwnMeansWarning)
        for some in (x, x[:-1]):
            data = TensorDataset(some)
            sums.append(sum_of_a_step(linear_of_zeros(FEATURES, 2), data, loss, n=6, checked=loss))
    return moved_beyond_bound("labels of one record", *sums)


def labels_of_others_in_own_losses() -> str:
    """A record that pulls the other way, where a loss is taken of each record by itself."""

    @per_sample
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        x = batch if isinstance(batch, Tensor) else batch[0]
        return 1e3 * (model(x)[..., 0] - x[..., 0]).square().sum().add(1).sqrt()

    x = torch.ones(6, POSITIONS, FEATURES)
    x[-1, :, 0] = -1.0
    sums = [
        sum_of_a_step(linear_of_zeros(FEATURES, 1), TensorDataset(some), loss, n=6)
        for some in (x, x[:-1])
    ]
    return moved_beyond_bound("a record that others are compared with", *sums)


def moved_beyond_bound(what: str, one: Tensor, other: Tensor) -> str:
    """A finding, where two sums of neighbouring data are farther apart than C."""
    distance = float((one - other).norm()) / CLIP_NORM
    return "" if distance <= 1 + 1e-6 else f"{what} moved the sum by {distance:.4g} C"
