"""Recurrent layers: outputs as torch gives them, sums as micro-batches of one give them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import dpoptim
from dpoptim.clipping import Clipping
from dpoptim.errors import PrivacyError
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.layers import lstm
from support import loss_of_outputs, mismatch

pytestmark = pytest.mark.filterwarnings(
    "ignore:LSTM with projections is not supported with oneDNN"
)  # plain torch's own

ROWS, T, D, H = 8, 6, 5, 4

LAYERS = {
    "lstm": lambda: nn.LSTM(D, H, batch_first=True),
    "lstm-time-major": lambda: nn.LSTM(D, H),
    "lstm-deep-both-ways": lambda: nn.LSTM(
        D, H, num_layers=2, bidirectional=True, batch_first=True
    ),
    "lstm-projected": lambda: nn.LSTM(D, H, num_layers=2, proj_size=3, bidirectional=True),
    "lstm-no-bias": lambda: nn.LSTM(D, H, bias=False),
    "gru": lambda: nn.GRU(D, H, batch_first=True),
    "gru-deep-both-ways": lambda: nn.GRU(D, H, num_layers=2, bidirectional=True),
    "gru-no-bias": lambda: nn.GRU(D, H, bias=False, batch_first=True),
    "rnn": lambda: nn.RNN(D, H, batch_first=True),
    "rnn-relu-both-ways": lambda: nn.RNN(D, H, nonlinearity="relu", bidirectional=True),
}


class Model(nn.Module):
    """A recurrent layer behind a linear one, with a head on outputs and last states."""

    def __init__(self, layer: nn.RNNBase, *, packs: bool = False, state: bool = False) -> None:
        super().__init__()
        self.first, self.layer, self.packs = nn.Linear(D, D), layer, packs
        ways = 1 + layer.bidirectional
        self.head = nn.Linear(ways * (layer.proj_size or H), 3)
        self.start = (
            nn.Linear(D, layer.num_layers * ways * (layer.proj_size or H)) if state else None
        )

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.first(x))
        hx: Any = None
        if self.start is not None:
            hx = (
                self.start(x[:, 0])
                .unflatten(1, (-1, self.layer.proj_size or H))
                .transpose(0, 1)
                .contiguous()
            )
            hx = (hx, hx) if isinstance(self.layer, nn.LSTM) else hx
        if self.packs:
            given = pack_padded_sequence(
                h, lengths, batch_first=self.layer.batch_first, enforce_sorted=False
            )
            out, last = self.layer(given, hx)
            out = pad_packed_sequence(out, batch_first=True, total_length=T)[0]
        else:
            out, last = self.layer(h if self.layer.batch_first else h.transpose(0, 1), hx)
            out = out if self.layer.batch_first else out.transpose(0, 1)
        last = torch.cat(
            [s.transpose(0, 1).flatten(1) for s in (last if isinstance(last, tuple) else (last,))],
            1,
        )
        return torch.cat([self.head(out).flatten(1), last], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("state", [False, True], ids=["zero-state", "given-state"])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.thinned(2)
def test_sums_are_those_of_micro_batches(kind: str, state: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = LAYERS[kind]()
    if state and layer.proj_size:
        pytest.skip("hidden and cell states differ in size")
    model = Model(layer, state=state).to(dtype)
    x, target = torch.randn(ROWS, T, D, dtype=dtype), torch.randn(ROWS, dtype=dtype)
    assert mismatch(model, (x, target)) < (3e-5 if dtype == torch.float32 else 1e-7)


@pytest.mark.parametrize("several", [1, 4, T], ids="{} steps at once".format)
def test_derivatives_for_a_few_steps_at_once_are_those_of_the_steps(
    several: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lstm, "AT_ONCE", several * ROWS * 4 * H)
    torch.manual_seed(0)
    layer = nn.LSTM(D, H, num_layers=2, bidirectional=True, batch_first=True)
    model = Model(layer, state=True).double()
    x, target = torch.randn(ROWS, T, D, dtype=torch.float64), torch.randn(ROWS, dtype=torch.float64)
    assert mismatch(model, (x, target)) < 1e-7


def run_hooked(model: nn.Module, *inputs: Tensor) -> Tensor:
    engine = Engine(model, Clipping(1.0), capacity=len(inputs[0]))
    engine.attach()
    try:
        return model(*inputs)
    finally:
        engine.detach()


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_outputs_are_those_of_torch(kind: str, packs: bool) -> None:
    torch.manual_seed(0)
    layer = LAYERS[kind]()
    layer.batch_first |= packs
    model = Model(layer, packs=packs)
    inputs = (torch.randn(ROWS, T, D), torch.tensor([3, 6, 1, 4, 4, 2, 5, 1]))
    torch.testing.assert_close(run_hooked(model, *inputs), model(*inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["lstm-deep-both-ways", "gru-no-bias", "rnn", "lstm-projected"])
def test_packed_sequences_keep_records_apart(kind: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[kind]()
    layer.batch_first = True
    model = Model(layer, packs=True).double()
    x, target = torch.randn(ROWS, T, D, dtype=torch.float64), torch.randn(ROWS, dtype=torch.float64)
    lengths = torch.tensor([3, 6, 1, 4, 4, 2, 5, 1])
    assert mismatch(model, (x, lengths, target)) < 1e-7


class Steps(nn.Module):
    """A cell over a few steps, from nothing, or from a state made of the record."""

    def __init__(self, cell: nn.RNNCellBase, *, state: bool) -> None:
        super().__init__()
        self.cell, self.start = cell, nn.Linear(D, H) if state else None

    def forward(self, x: Tensor) -> Tensor:
        hx: Any = None if self.start is None else self.start(x[:, 0])
        if hx is not None and isinstance(self.cell, nn.LSTMCell):
            hx = (hx, hx.cos())
        for t in range(3):
            hx = self.cell(x[:, t], hx)
        return torch.cat(hx, 1) if isinstance(hx, tuple) else hx


@pytest.mark.parametrize("state", [False, True], ids=["zero-state", "given-state"])
@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.LSTMCell(D, H),
        lambda: nn.GRUCell(D, H),
        lambda: nn.RNNCell(D, H, bias=False),
        lambda: nn.RNNCell(D, H, nonlinearity="relu"),
    ],
    ids=["lstm", "gru", "no-bias", "relu"],
)
def test_cells_go_by_rules(build: Any, state: bool) -> None:
    torch.manual_seed(0)
    model = Steps(build(), state=state).double()
    x, target = torch.randn(ROWS, T, D, dtype=torch.float64), torch.randn(ROWS, dtype=torch.float64)
    assert mismatch(model, (x, target)) < 1e-7
    torch.testing.assert_close(run_hooked(model, x), model(x))


def test_dropout_between_layers_runs_and_check_passes() -> None:
    torch.manual_seed(0)
    model = Model(nn.LSTM(D, H, num_layers=2, dropout=0.5, batch_first=True))
    assert run_hooked(model, torch.randn(ROWS, T, D)).shape == (ROWS, 3 * T + 4 * H)
    batch = (torch.randn(ROWS, T, D), torch.randn(ROWS))
    assert dpoptim.check(model, loss_of_outputs, batch).loss_reduction == "mean"


def test_sequences_without_a_record_axis_are_refused() -> None:
    with pytest.raises(PrivacyError, match="keep the batch axis"):
        run_hooked(nn.LSTM(D, H), torch.randn(T, D))


def test_a_state_shared_by_the_records_is_refused() -> None:
    with pytest.raises(PrivacyError, match="initial state that is not"):
        run_hooked(nn.GRU(D, H, batch_first=True), torch.randn(ROWS, T, D), torch.zeros(1, 1, H))
