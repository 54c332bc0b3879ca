"""Models whose first forward passes tell that they cannot train, before anything is charged."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import dpoptim

N, FEATURES, WORDS = 12, 6, 9


def attach(model: nn.Module, data: Dataset[Tensor]) -> None:
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=4, steps=1, noise_multiplier=1.0, delta=1e-5
    )
    dpoptim.attach(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), data).detach()


def table() -> TensorDataset:
    return TensorDataset(torch.randn(N, FEATURES), torch.arange(N) % 3)


class Gated(nn.Module):
    """Squeezes more axes than it means to, where there is one record."""

    def __init__(self, *axes: int) -> None:
        super().__init__()
        self.gate, self.head, self.axes = nn.Linear(FEATURES, 1), nn.Linear(FEATURES, 3), axes

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) * self.gate(x).squeeze(*self.axes)[:, None]


def test_squeeze_of_a_single_record_is_told() -> None:
    with pytest.raises(dpoptim.SamplesInteractError, match=r"on one of them alone.*squeeze\(1\)"):
        attach(Gated(), table())
    attach(Gated(1), table())


class Stateful(nn.Module):
    """Goes on from the state of the batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(WORDS, 6), nn.GRU(6, 7, batch_first=True)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        found, state = self.rnn(self.embed(x), self.state)
        self.state = state.detach()
        return found


def test_states_that_do_not_fit_a_single_record_are_told() -> None:
    with pytest.raises(dpoptim.SamplesInteractError, match="kept from the batch before"):
        attach(Stateful(), TensorDataset(torch.randint(0, WORDS, (N, 5))))


class Normalises(nn.Module):
    """Takes its first weights from the first batch, as the layers of normalising flows do."""

    def __init__(self, *, in_a_buffer: bool) -> None:
        super().__init__()
        self.shift, self.layer = nn.Parameter(torch.zeros(FEATURES)), nn.Linear(FEATURES, 3)
        if in_a_buffer:
            self.register_buffer("ready", torch.tensor(False))
        else:
            self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.shift.data.copy_(-x.mean(0))
            self.ready |= True
        return self.layer(x + self.shift)


@pytest.mark.parametrize("in_a_buffer", [False, True])
def test_weights_of_the_first_batch_are_refused(in_a_buffer: bool) -> None:
    model = Normalises(in_a_buffer=in_a_buffer)
    with pytest.raises(
        dpoptim.SamplesInteractError, match="forward pass writes into.*initialise from"
    ):
        attach(model, table())
    assert not bool(model.shift.any())
    initialised = Normalises(in_a_buffer=in_a_buffer)
    initialised(torch.randn(20, FEATURES))
    attach(initialised, table())
