"""Loops in which records see each other, or leave by other ways than the optimizer: the library
must refuse each.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from dpoptim.errors import PrivacyError
from dpoptim.methods.dp_sgd import DPSGD
from dpoptim.training.attach import attach

RECORDS, FEATURES = 12, 4


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


class Sequences(Dataset[Tensor]):
    """Records of unequal lengths."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Tensor:
        return torch.linspace(-1, 1, FEATURES * (2 + index % 5)).view(-1, FEATURES)


def isolation() -> str:
    """A code book written through ``.data``, and padding by the longest."""
    accepted = [f.__name__ for f in (writes_through_data, pads_by_the_longest) if not refused(f)]
    return f"refuted: accepted {', '.join(accepted)}" if accepted else ""


def writes_through_data() -> None:
    model = CodeBook().eval()
    train(model, [torch.ones(FEATURES)] * RECORDS, None, before=model.train)


def pads_by_the_longest() -> None:
    def padded(batch: list[Tensor]) -> Tensor:
        return pad_sequence(batch, batch_first=True)

    train(LastPosition(), Sequences(), padded)


def train(
    model: nn.Module, records: Any, collate_fn: Any, before: Callable[[], Any] = lambda: None
) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch)[:, 0].square()

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = DPSGD(clip_norm=1.0).plan(
        n=RECORDS, batch_size=6, steps=2, noise_multiplier=1.0, delta=1e-5
    )
    with attach(plan, model, optimizer, records, loss=loss, collate_fn=collate_fn) as private:
        before()
        for batch in private.batches():
            private.backward(loss(model, batch))
            optimizer.step()


def refused(loop: Callable[[], None]) -> bool:
    try:
        loop()
    except PrivacyError:
        return True
    return False
