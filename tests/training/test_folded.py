"""Records and positions on one axis: frames of a video before a convolution, tokens of a language
model in what it returns. Rules serve them, and whoever's position is mistaken is found out.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import dpoptim
from dpoptim.gradients.hooks.hook_manager import HookManager
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.layers import folded
from dpoptim.gradients.per_sample.per_sample_grads import Dense
from dpoptim.training.trials.isolation import IsolationWarning, choose_isolation
from support import mismatch

N, T, V = 12, 4, 11


class Frames(nn.Module):
    """A convolution and a norm on each frame, a recurrent layer over them."""

    def __init__(self) -> None:
        super().__init__()
        self.look, self.norm = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)
        self.memory, self.head = nn.GRU(36, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        frames = self.norm(self.look(x.flatten(0, 1))).tanh().flatten(1)
        states, _ = self.memory(frames.unflatten(0, (len(x), -1)))
        return self.head(states[:, -1])


class Words(nn.Module):
    """Returns the scores of all tokens, whosever they are, one after the other."""

    def __init__(self, *, records_first: bool = True) -> None:
        super().__init__()
        self.table, self.head, self.records_first = (
            nn.Embedding(V, 6),
            nn.Linear(6, V),
            records_first,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x if self.records_first else x.t()).flatten(0, 1))


class Selected(nn.Module):
    """Scores the tokens that a mask leaves, those of all records in a row."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(V, 6), head

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        there = mask != 0
        left = self.table(x)[there]
        scores = self.head(left[..., None] if self.on_channels else left)
        placed = torch.zeros(*x.shape, 3).masked_scatter(there[..., None], scores.flatten(1))
        return placed.sum(1)

    @property
    def on_channels(self) -> bool:
        return isinstance(self.head, nn.Conv1d)


def videos() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, T, 1, 5, 5, generator=generator)
    return TensorDataset(x, torch.randint(3, (N,), generator=generator))


def texts() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(V, (N, T + 1), generator=generator))


def of_videos(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def of_texts(model: Any, batch: Any) -> Tensor:
    ids = batch[0]
    scores = model(ids[:, :-1])
    tokens = F.cross_entropy(
        scores, (ids[:, 1:] if model.records_first else ids[:, 1:].t()).flatten(), reduction="none"
    )
    return tokens.view(len(ids), -1).mean(1) if model.records_first else tokens.view(T, -1).mean(0)


def trained(
    build: Callable[[], nn.Module], data: Dataset[Any], per_record: Any, **way: Any
) -> Tensor:
    torch.manual_seed(0)
    model = build()
    plan = dpoptim.DPSGD(clip_norm=0.3).plan(
        n=N, batch_size=6, steps=3, noise_multiplier=0.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with dpoptim.attach(plan, model, optimizer, data, noise_seed=1, **way) as private:
        for batch in private.batches():
            private.backward(per_record(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.thinned(2)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    ("build", "data", "loss"),
    [(Frames, videos(), of_videos), (Words, texts(), of_texts)],
    ids=["frames", "words"],
)
def test_rules_train_as_records_alone_do(
    build: Callable[[], nn.Module], data: Dataset[Any], loss: Any, given: bool
) -> None:
    alone = trained(build, data, loss, isolation="alone")
    found = trained(build, data, loss, **({"loss": loss} if given else {}))  # warnings are errors
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-6)


def test_positions_that_come_first_are_no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    def words() -> nn.Module:
        return Words(records_first=False)

    alone = trained(words, texts(), of_texts, isolation="alone")
    found = trained(words, texts(), of_texts, loss=of_texts)  # warnings are errors
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-6)
    # where what is turned round for the layer is not, no rules are taken
    monkeypatch.setattr(HookManager, "_run_interleaved", lambda hooks, run, x: run(x))
    with pytest.warns(IsolationWarning, match="pass alone"):
        found = trained(words, texts(), of_texts, loss=of_texts)
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
@pytest.mark.parametrize("build", [lambda: nn.Linear(6, 3), lambda: nn.Conv1d(6, 3, 1)])
def test_tokens_that_a_mask_selects_are_not_folded(
    build: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    """As many as there are records, times something, they would pass for other records'."""
    tokens = torch.randint(V, (N, T))
    mask = (torch.arange(T) <= torch.arange(N)[:, None] % T).to(dtype)
    assert choose_isolation(Selected(build()), TensorDataset(tokens, mask)).isolation.alone


def test_vectorising_by_name_needs_no_trial_of_what_is_folded() -> None:
    chosen = choose_isolation(Words(), texts(), "vmap")
    assert chosen.isolation == Isolation.of("vmap")


def test_a_position_given_to_a_neighbour_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded bug: the last position of each record counts as the next record's."""
    honest = folded.sum_rows

    def shifted(rows: Any, count: int, positions: int) -> Any:
        moved = torch.arange(count).roll(1)
        return honest(Dense(rows.materialise(slice(0, count))[moved]), count, positions)

    assert not choose_isolation(Frames(), videos()).isolation.alone
    monkeypatch.setattr(folded, "sum_rows", shifted)
    assert choose_isolation(Frames(), videos()).isolation.alone


class Ragged(nn.Module):
    """Scores the tokens that are no padding, as one of the ways of `PICKS` puts them in a row."""

    def __init__(self, pick: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(V, 6), nn.Linear(6, 4), nn.Linear(4, 3)
        self.pick = pick

    def forward(self, x: Tensor) -> Tensor:
        there = x != PADDING
        of = torch.arange(len(x))[:, None].expand_as(x)
        left = self.layer(self.pick(self.table(x), there)).tanh()
        owners = self.pick(of[..., None].float(), there)[:, 0].long()
        return self.head(left.new_zeros(len(x), 4).index_add(0, owners, left))


PADDING = 5  # unlike whatever made-up records have
TOKENS = TensorDataset(torch.zeros(N, T, dtype=torch.int64), torch.zeros(N))


def packed(x: Tensor, there: Tensor) -> Tensor:
    lengths = there.sum(1)
    return nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False).data


def joined(x: Tensor, there: Tensor) -> Tensor:
    return torch.cat([row[:n] for row, n in zip(x, there.sum(1).tolist(), strict=True)])


def taken(x: Tensor, there: Tensor) -> Tensor:
    places = torch.from_numpy(there.flatten().numpy().nonzero()[0])
    return x.flatten(0, 1).index_select(0, places)


def found(x: Tensor, there: Tensor) -> Tensor:
    return x.flatten(0, 1)[there.flatten().nonzero().flatten()]


def selected(x: Tensor, there: Tensor) -> Tensor:
    return x.masked_select(there[..., None]).unflatten(0, (-1, x.shape[-1]))


def of_time_first(x: Tensor, there: Tensor) -> Tensor:
    return x.transpose(0, 1)[there.t()]


PICKS = packed, joined, taken, found, selected, of_time_first


@pytest.mark.parametrize("pick", PICKS)
def test_tokens_that_are_no_padding_are_not_folded(
    pick: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Made-up texts have none, so that all their tokens are there; of others, 6 tokens of 3 records
    may be 1, 2 and 3 of them, and would be taken for 2 of each: one text's gradient held others'.
    """
    assert choose_isolation(Ragged(pick), TOKENS).isolation.alone


def test_a_head_behind_packed_sequences_goes_by_rules() -> None:
    """What was padded again has all records' positions, whatever was picked before."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.memory = nn.Embedding(V, 6), nn.LSTM(6, 4, batch_first=True)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            there = (x != PADDING).sum(1)
            given = nn.utils.rnn.pack_padded_sequence(self.table(x), there, True, False)
            states, _ = nn.utils.rnn.pad_packed_sequence(self.memory(given)[0], True, 0.0, T)
            return self.head(states.flatten(0, 1)).unflatten(0, (len(x), T)).sum(1)

    isolation = choose_isolation(Tagger(), TOKENS).isolation
    assert isolation.tier == "rules"
    assert isolation.folded == {"head"}
    x = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 5], [1, 5, 5, 5]])
    assert mismatch(Tagger(), (x, torch.randn(3)), isolation) < 1e-5
