"""What changes after it was tried, by the loop: named among what a guarantee rests on."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

import dpoptim
from dpoptim.training.assumptions import PHASES

STATE = {"epoch": 0}


class Switched(nn.Linear):
    centres = False

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.centres = False

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out - out.detach().mean(0) if self.centres else out


def loss(model: nn.Module, batch: Any) -> Tensor:
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return losses / losses.detach().mean() if STATE["epoch"] >= 2 else losses


def collate(items: list[Any]) -> Any:
    x, y = default_collate(items)
    return (x + x.roll(1, 0), y) if STATE["epoch"] >= 2 else (x, y)


def own(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("changes", "how"),
    [
        ("state", {"loss": loss}),
        ("state", {"loss": own, "collate_fn": collate}),
        ("model", {"loss": own}),
        ("nothing", {"loss": loss, "collate_fn": collate}),
    ],
)
def test_a_later_phase_of_the_program_is_named(changes: str, how: Any) -> None:
    torch.manual_seed(0)
    STATE["epoch"] = 0
    model = Switched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = dpoptim.DPSGD(clip_norm=0.5).plan(
        n=24, batch_size=24, steps=3, noise_multiplier=1.0, delta=1e-5
    )
    data = TensorDataset(torch.randn(24, 6), torch.randint(0, 3, (24,)))
    with dpoptim.attach(plan, model, optimizer, data, noise_seed=1, **how) as private:
        for batch in private.batches():
            private.backward(how["loss"](model, batch))
            optimizer.step()
            optimizer.zero_grad()
            STATE["epoch"] += changes == "state"
            model.centres |= changes == "model"
    STATE["epoch"] = 5  # of another run, which is no matter of this one
    texts = [item.text for item in private.basis if item.kind == "trusted"]
    assert (PHASES in texts) == (changes == "state")
    assert any("a switch) records are treated" in text for text in texts) == (changes == "model")
