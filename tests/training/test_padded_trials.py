"""Models that look for numbers in data, as for padding, are tried on records that have some."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import TensorDataset

from dpoptim.gradients.isolation import Isolation
from dpoptim.training.trials import isolation_trials
from dpoptim.training.trials.compared_numbers import compared_numbers
from dpoptim.training.trials.isolation import choose_isolation
from dpoptim.training.trials.made_up_records import Sample
from support import mismatch

N, T, V, PADDING = 12, 5, 20, 17
TOKENS = TensorDataset(torch.zeros(N, T, dtype=torch.int64), torch.zeros(N))
FRAMES = TensorDataset(torch.zeros(N, T, 6), torch.zeros(N))


class Sorted(nn.Module):
    """Sorts records by lengths behind its first layer, and puts them back behind its last.

    Args:
        lookup: whether that layer is an embedding.
        by_numpy: whether numpy sorts.
        apart: whether records stay in their order, as they ought to.
    """

    def __init__(self, *, lookup: bool = True, by_numpy: bool = False, apart: bool = False) -> None:
        super().__init__()
        self.first = nn.Embedding(V, 6) if lookup else nn.Linear(6, 6)
        self.memory, self.head = nn.LSTM(6, 4, batch_first=True), nn.Linear(4, 3)
        self.by_numpy, self.apart = by_numpy, apart

    def forward(self, x: Tensor) -> Tensor:
        there = x != PADDING if x.dim() == 2 else x.abs().sum(-1) > 0
        lengths = there.sum(1).clamp(min=1)
        if self.by_numpy:
            order = torch.from_numpy((-lengths.numpy()).argsort(kind="stable"))
        else:
            order = lengths.argsort(descending=True, stable=True)
        x = self.first(x)
        if self.apart:
            return self.head(self.end(x, lengths, in_order=False))
        return self.head(self.end(x[order], lengths[order], in_order=True))[order.argsort()]

    def end(self, x: Tensor, lengths: Tensor, *, in_order: bool) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=in_order)
        return self.memory(packed)[1][0][0]


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (Sorted(), TOKENS),
        (Sorted(by_numpy=True), TOKENS),
        (Sorted(lookup=False), FRAMES),
    ],
    ids=("tokens", "numpy", "frames"),
)
def test_records_sorted_by_lengths_pass_alone(model: nn.Module, data: TensorDataset) -> None:
    """By rules a record got another one's gradient in half of the layers."""
    chosen = choose_isolation(model, data)
    assert chosen.isolation.alone
    assert "enforce_sorted=False" in chosen.message


def test_records_in_their_order_go_by_rules() -> None:
    model = Sorted(apart=True)
    isolation = choose_isolation(model, TOKENS).isolation
    assert isolation.tier == "rules"
    x = torch.tensor([[1, 2, 17, 17, 17], [1, 2, 5, 5, 3], [1, 5, 5, 5, 17]])
    assert mismatch(model, (x, torch.randn(3)), isolation) < 1e-5


def test_a_trial_without_such_numbers_would_miss_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded bug: nobody asks which numbers the model looks for. What rules then do is wrong."""
    monkeypatch.setattr(isolation_trials, "compared_numbers", lambda *_: {})
    model = Sorted()
    assert choose_isolation(model, TOKENS).isolation == Isolation.of("rules")
    x = torch.tensor([[1, 2, 17, 17, 17], [1, 2, 5, 5, 3], [1, 5, 5, 5, 17]])
    assert mismatch(model, (x, torch.randn(3)), Isolation.of("rules")) > 0.01


class Looks(nn.Module):
    """Compares what it is given, or what a layer makes of it, with numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(T, T)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        known = torch.where(x.isnan(), 0.0, x) * (x[:, 1:].contiguous() != -7).sum()
        common = (ids.int() == torch.tensor(9)) | (ids.view(-1, T) > 12) | (ids < 2) | (ids == 1)
        there = x.abs().sum(-1, keepdim=True) > 0
        return self.layer(known) * common * there * (self.layer(known) > 4)


def test_numbers_that_a_model_looks_for() -> None:
    x = torch.randn(7, T)
    ids = torch.arange(7 * T).view(7, T) % 2
    found = compared_numbers(Looks(), Sample((x, ids), {}, 7))
    nan, *rest = found[0]
    assert nan != nan
    assert rest == [-7.0, 0.0]  # 0: what is computed of it is compared, too
    assert found[1] == [13.0, 9.0]  # 1 it has
