"""Losses on which made-up records, or those at regular places, would show nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import dpoptim
from dpoptim.training.trials.loss_check import places

RECORDS = 64


class Records(Dataset[Any]):
    def __init__(self, records: list[Any]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Any:
        return self.records[index]


def attach(
    model: nn.Module, records: list[Any], loss: Any, collate: Any
) -> dpoptim.PrivateTraining:
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=RECORDS, batch_size=16, steps=2, noise_multiplier=1.0, delta=1e-4
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return dpoptim.attach(plan, model, optimizer, Records(records), loss=loss, collate_fn=collate)


def images(every: int) -> list[tuple[Tensor, Tensor]]:
    """Images with 0 to 3 boxes; the first has none, nor has one in so many."""
    return [(torch.randn(3, 4, 4), torch.rand(i % every, 4)) for i in range(RECORDS)]


def lists(batch: list[Any]) -> tuple[Any, ...]:
    return tuple(zip(*batch, strict=True))


def of_boxes(model: nn.Module, batch: Any, *, own: bool) -> Tensor:
    """A mean over the boxes of each image, or of all of them."""
    found = model(torch.stack(batch[0])).flatten(2)
    pairs = list(zip(found, batch[1], strict=True))
    sums = [F.l1_loss(out[:, : len(b)].t(), b, reduction="sum") for out, b in pairs]
    counts = torch.tensor([len(b) for b in batch[1]]).clamp(min=1)
    return torch.stack(sums) / (counts if own else counts.sum())


def test_a_count_of_boxes_is_found_though_the_first_images_have_none() -> None:
    with pytest.raises(dpoptim.SamplesInteractError, match="on records of the data set"):
        attach(nn.Conv2d(3, 4, 1), images(4), lambda m, batch: of_boxes(m, batch, own=False), lists)


def test_made_up_images_without_boxes_are_no_evidence() -> None:
    own: Callable[..., Tensor] = lambda m, batch: of_boxes(m, batch, own=True)  # noqa: E731
    private = attach(nn.Conv2d(3, 4, 1), images(4), own, lists)
    assert "not on made-up ones: no record has a gradient of these" in private.describe()


@pytest.mark.parametrize("count", [1, 3, 4, 5, 12, 60_000])
def test_places_are_apart_and_irregular(count: int) -> None:
    taken = places(count, in_order=False)
    assert all(0 <= place < count for place in taken)
    assert len(set(taken)) == min(4, count)
    assert count < 5 or len({place % 4 for place in taken}) > 1
    assert places(count, in_order=True) == [min(i, count - 1) for i in range(4)]


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory, self.head = nn.GRU(5, 8, batch_first=True), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.memory(x)[0]).log_softmax(-1)


def padded(batch: list[Any]) -> tuple[Tensor, ...]:
    rows = [(features.t(), labels) for features, labels in batch]
    lengths = [torch.tensor([len(row[i]) for row in rows]) for i in (0, 1)]
    x, y = (pad_sequence([row[i] for row in rows], batch_first=True) for i in (0, 1))
    return x, y, *lengths


def test_ctc_losses_are_tried_with_labels_that_are_classes() -> None:
    """PyTorch's reads and writes beyond its memory where a label is -100."""
    records = [(torch.randn(5, 10 + i % 5), torch.randint(1, 6, (2 + i % 3,))) for i in range(64)]
    seen = list[Tensor]()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y, frames, labels = batch
        own = F.ctc_loss(model(x).transpose(0, 1), y, frames, labels, reduction="none")
        seen.append(y)
        return own / labels

    honest = torch.ctc_loss
    private = attach(Speech(), records, loss, padded)
    assert torch.ctc_loss is honest
    assert "loss not checked" not in private.describe()
    assert all(bool(((y >= 0) & (y < 6)).all()) for y in seen)


class Warped(nn.Module):
    """Samples an image at places of its own choice."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.head = nn.Linear(16, 6), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        grid = F.affine_grid(self.place(x.flatten(1)).view(-1, 2, 3), x.shape, align_corners=False)
        sampled = F.grid_sample(x, grid, padding_mode="border", align_corners=False)
        return self.head(sampled.flatten(1))


def test_no_image_is_sampled_where_places_are_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch takes NaN for an index there, and ends the process."""
    honest, tried = torch.grid_sampler, list[bool]()

    def noted(image: Tensor, places: Tensor, *rest: Any) -> Tensor:
        tried.append(bool(places.isfinite().all()))
        return honest(image, places.nan_to_num(), *rest)

    monkeypatch.setattr(torch, "grid_sampler", noted)
    records = [(torch.randn(1, 4, 4), torch.tensor(i % 3)) for i in range(64)]
    seen = list[bool]()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        own = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        seen.append(bool(own.isfinite().all()))
        return own

    private = attach(Warped(), records, loss, None)
    assert all(tried)
    assert not all(seen)  # which were tried nevertheless
    assert torch.grid_sampler is noted
    assert "loss not checked" not in private.describe()
