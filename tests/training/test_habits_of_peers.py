"""Tutorials of other libraries, followed in haste: what is said names the shortest way on."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim

N = 40


def plan() -> dpoptim.Plan:
    return dpoptim.DPSGD(clip_norm=1.0).plan(n=N, batch_size=8, steps=2, epsilon=3.0, delta=1e-3)


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Names(nn.Module):
    """Opacus' example of names: the last state, of padding too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedded, self.rnn = nn.Embedding(30, 8), nn.LSTM(8, 8, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.rnn(self.embedded(x))
        found: Tensor = self.last(states[:, -1])
        return found


def padded(records: Any, length: int | None = None) -> Any:
    x = nn.utils.rnn.pad_sequence([x for x, _ in records], batch_first=True)
    x = x if length is None else F.pad(x, (0, length - x.shape[1]))
    return x, torch.tensor([y for _, y in records])


@pytest.mark.parametrize("length", [None, 12])
def test_padding_to_the_longest_is_told_of_one_length(length: int | None) -> None:
    data: Any = [(torch.randint(1, 30, (4 + i % 5,)), i % 3) for i in range(N)]
    model = Names()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def attached() -> None:
        dpoptim.attach(
            plan(), model, optimizer, data, loss=losses, collate_fn=lambda r: padded(r, length)
        ).detach()

    if length is None:
        with pytest.raises(dpoptim.PrivacyError, match="pad each record to one public length, F.p"):
            attached()
    else:
        attached()


def test_a_cell_that_runs_twice_is_told_of_detach() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = TensorDataset(torch.randn(N, 4), torch.arange(N) % 3)

    def cell() -> dpoptim.PrivateTraining:
        return dpoptim.attach(plan(), model, optimizer, data, loss=losses)

    private = cell()
    with pytest.raises(dpoptim.PrivacyError, match=r"call private.detach\(\)"):
        cell()
    private.detach()
    cell().detach()


@pytest.mark.parametrize("kind", ["two steps", "two passes", "two calls", "joined"])
@pytest.mark.filterwarnings("ignore:the loss is a mean")
def test_two_passes_of_a_discriminator_are_told_of_one(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(N, 4))
    bce = F.binary_cross_entropy_with_logits
    with (
        pytest.raises(dpoptim.PrivacyError, match="add both losses and make one pass"),
        dpoptim.attach(plan(), model, optimizer, data) as private,
    ):
        for (real,) in private.batches():
            fake, n = torch.randn_like(real), len(real)
            if kind == "joined":
                both, goal = torch.cat((real, fake)), torch.arange(2 * n).lt(n).float()
                bce(model(both), goal).backward()
            elif kind == "two calls":
                private.backward(bce(model(fake), torch.zeros(n), reduction="none"))
                private.backward(bce(model(real), torch.ones(n), reduction="none"))
            else:
                bce(model(fake), torch.zeros(n)).backward()
                if kind == "two steps":
                    optimizer.step()
                bce(model(real), torch.ones(n)).backward()
            optimizer.step()
