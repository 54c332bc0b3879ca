"""What is no ``loss(model, batch)`` is refused in those words, before a record is read."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import dpoptim
from dpoptim.training.batches.user_code import SWITCH

PLAN = dpoptim.DPSGD(clip_norm=1.0).plan(n=40, batch_size=8, steps=2, epsilon=3.0, delta=1e-4)
WORDS = r"loss takes \(model, batch\) and returns one value a record: def loss\(model, batch\)"


class Untouched(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a record was read")


def attached(loss: Any, data: Any = None, model: nn.Module | None = None) -> None:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    data = data or TensorDataset(torch.randn(40, 6), torch.arange(40) % 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dpoptim.attach(PLAN, model, optimizer, data, loss=loss).detach()


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        F.cross_entropy,
        "mean",
        torch.tensor(1.0),
        lambda model, x, y: F.cross_entropy(model(x), y),
        lambda batch: batch,
    ],
)
def test_what_takes_no_model_and_batch_is_refused_before_any_record(loss: Any) -> None:
    with pytest.raises(TypeError, match=WORDS):
        attached(loss, Untouched())
    with pytest.raises(TypeError, match=WORDS):
        dpoptim.check(nn.Linear(6, 3), loss, (torch.randn(8, 6), torch.arange(8) % 3))


@pytest.mark.parametrize(
    ("loss", "taken"),
    [
        (lambda out, y: F.cross_entropy(out, y), "the model for outputs"),
        (lambda out, y: out.log_softmax(1)[:, 0] * y, "the model for outputs"),
        (lambda batch, model: F.cross_entropy(model(batch[0]), batch[1]), "the batch for the mod"),
    ],
)
def test_what_takes_them_for_others_is_told_so(loss: Any, taken: str) -> None:
    with pytest.raises(dpoptim.PrivacyError, match=f"loss took {taken}.*{WORDS}"):
        attached(loss)


class Pooled(nn.Module):
    """Its squeeze() drops the first axis of a batch of one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedded, self.last = nn.Embedding(50, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.embedded(x).transpose(1, 2).mean(-1, keepdim=True).squeeze())
        return found


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def test_a_loss_that_fails_on_one_record_is_told_of_squeeze() -> None:
    texts = TensorDataset(torch.randint(0, 50, (40, 12)), torch.arange(40) % 2)
    said = r"made-up records: the loss of \d+ records .* a batch of one of them: squeeze\(\) with"
    with pytest.raises(dpoptim.PrivacyError, match=said):
        attached(losses, texts, Pooled())


class Typo(nn.Module):
    """Fails on records whose first number is large, as made-up ones' is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x[:, 0] > 1e6).any()):
            raise KeyError(f"secret {float(x.max())}")
        found: Tensor = self.inner(x)
        return found


def test_the_switch_shows_what_a_loss_raised_on_records(monkeypatch: pytest.MonkeyPatch) -> None:
    data = TensorDataset(torch.full((40, 6), 12_345_678.0), torch.arange(40) % 3)
    with pytest.raises(dpoptim.PrivacyError, match=f"KeyError on records.*{SWITCH}=1") as hidden:
        attached(losses, data, Typo())
    assert "12345678" not in str(hidden.value)
    assert hidden.value.__cause__ is None
    assert hidden.value.__suppress_context__
    monkeypatch.setenv(SWITCH, "1")
    with pytest.raises(KeyError, match="secret 12345678"):
        attached(losses, data, Typo())
