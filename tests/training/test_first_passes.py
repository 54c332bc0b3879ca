"""Models whose first forward passes tell that they cannot train, before anything is charged."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import TensorDataset

import dpoptim

N, FEATURES, WORDS = 12, 6, 9


def attach(model: nn.Module, data: Any, **options: Any) -> str:
    """What is taken on trust."""
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=4, steps=1, noise_multiplier=1.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan, model, optimizer, data, **options) as private:
        return " ".join(item.text for item in private.basis if item.kind == "trusted")


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


class Counts(nn.Module):
    """Counts its passes, in a buffer or a plain number."""

    def __init__(self, *, in_a_buffer: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 3)
        self.passes: Any = 0
        if in_a_buffer:
            del self.passes
            self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.layer(x)


def test_a_counter_of_passes_is_named_as_what_may_be_a_plain_number() -> None:
    with pytest.raises(dpoptim.SamplesInteractError, match="a plain number, self.steps = 0"):
        attach(Counts(in_a_buffer=True), table())
    attach(Counts(in_a_buffer=False), table())


# ---- what a collate function makes --------------------------------------------------------------

SEQUENCES = [(torch.randn(2 + i % 3, FEATURES), i % 3) for i in range(N)]


class Sets(nn.Module):
    """Adds up the elements of each set of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.head = nn.Linear(FEATURES, 7), nn.Linear(7, 3)

    def forward(self, sets: list[Tensor]) -> Tensor:
        return self.head(torch.stack([self.each(one).relu().sum(0) for one in sets]))


class Last(nn.Module):
    """Reads its last state: of packed sequences, or of (time, records, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(FEATURES, 7), nn.Linear(7, 3)

    def forward(self, x: Any) -> Tensor:
        return self.head(self.rnn(x)[1][-1])


def labelled(batch: list[Any], make: Any) -> tuple[Any, Tensor]:
    return make([x for x, _ in batch]), torch.tensor([y for _, y in batch])


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def test_models_are_tried_on_what_the_collate_function_makes() -> None:
    """Stacked, the list of sets would be another input, on which this model runs, too. So it is
    with sets of as many elements as there are records: their first axis is not the records'.
    """
    for elements in range(2, 6):
        data = [(torch.randn(elements + i % 3, FEATURES), i % 3) for i in range(N)]
        trusted = attach(Sets(), data, collate_fn=lambda batch: labelled(batch, list))
        assert "not tested on random inputs" in trusted
    trusted = attach(Last(), SEQUENCES, collate_fn=lambda batch: labelled(batch, pad_sequence))
    assert "not tested on random inputs" not in trusted


def test_records_that_are_no_axis_are_told_to_pass_alone() -> None:
    data, collate = SEQUENCES, lambda batch: labelled(batch, list)
    model = Sets()
    plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        n=N, batch_size=N, steps=1, noise_multiplier=0.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        dpoptim.attach(plan, model, optimizer, data, collate_fn=collate) as private,
        pytest.raises(dpoptim.PrivacyError, match='isolation="alone"'),
    ):
        private.backward(losses(model, next(private.batches())))


def test_packed_sequences_of_a_collate_function_are_checked() -> None:
    def collate(batch: list[Any]) -> tuple[Any, Tensor]:
        return labelled(batch, lambda rows: pack_sequence(rows, enforce_sorted=False))

    assert "loss not checked" not in attach(Last(), SEQUENCES, collate_fn=collate, loss=losses)
