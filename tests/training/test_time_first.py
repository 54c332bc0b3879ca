"""PyTorch's own recurrent style: batches with records first, turned round inside, and states that
have them on their second axis. Rules serve them.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.training.trials.isolation import choose_isolation

N, T, V, WIDTH = 12, 4, 11, 6


class Characters(nn.Module):
    """The word model of PyTorch's examples, with its states, which the loop makes.

    Args:
        turns: whether it takes records first, and turns them round.
        flattens: where it flattens positions and records: "before" the decoder, or "after" it.
    """

    def __init__(self, *, turns: bool = True, flattens: str = "") -> None:
        super().__init__()
        self.turns, self.flattens = turns, flattens
        self.table, self.memory = nn.Embedding(V, WIDTH), nn.LSTM(WIDTH, WIDTH, num_layers=2)
        self.decoder = nn.Linear(WIDTH, V)

    def forward(self, x: Tensor, states: Any) -> tuple[Tensor, Any]:
        out, states = self.memory(self.table(x.t() if self.turns else x), states)
        out = out.reshape(-1, WIDTH) if self.flattens == "before" else out
        scores = self.decoder(out)
        return (scores.view(-1, V) if self.flattens == "after" else scores), states


def of_tokens(model: Any, batch: Any) -> Tensor:
    ids = batch[0]
    states = (torch.zeros(2, len(ids), WIDTH),) * 2
    x = ids[:, :-1]
    scores, _ = model(x if model.turns else x.t(), states)
    tokens = F.cross_entropy(scores.view(-1, V), ids[:, 1:].t().flatten(), reduction="none")
    return tokens.view(T, -1).mean(0)


def texts() -> TensorDataset:
    return TensorDataset(torch.randint(V, (N, T + 1), generator=torch.Generator().manual_seed(1)))


def trained(build: Callable[[], nn.Module], **way: Any) -> Tensor:
    torch.manual_seed(0)
    model = build()
    plan = dpoptim.DPSGD(clip_norm=0.3).plan(
        n=N, batch_size=6, steps=2, noise_multiplier=0.0, delta=1e-5
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with dpoptim.attach(plan, model, optimizer, texts(), noise_seed=1, **way) as private:
        for batch in private.batches():
            private.backward(of_tokens(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.thinned(2)
@pytest.mark.parametrize("flattens", ["", "before", "after"])
@pytest.mark.parametrize("turns", [True, False])
def test_rules_train_as_records_alone_do(turns: bool, flattens: str) -> None:
    def build() -> nn.Module:
        return Characters(turns=turns, flattens=flattens)

    alone = trained(build, isolation="alone")
    # which tokens are whose, no axis of the call tells that is as long as that of records
    found = trained(build, loss=of_tokens)  # warnings are errors
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-6)
    way = choose_isolation(build(), texts(), "rules", loss=of_tokens).isolation
    assert way == choose_isolation(build(), texts(), loss=of_tokens).isolation


@pytest.mark.parametrize("axis", [None, 1])
def test_records_are_found_on_each_tensor_s_axis(axis: int | None) -> None:
    chosen = choose_isolation(Characters(), texts(), batch_axis=axis, loss=of_tokens)
    assert chosen.sample is not None
    assert (chosen.isolation.tier, chosen.sample.axis, chosen.sample.second) == ("rules", 0, {1, 2})
    assert chosen.isolation.time_first == {"table", "decoder"}
    one = chosen.sample.records([0])
    assert [x.shape[:2] for x in (one.args[0], *one.args[1])] == [(1, T), (2, 1), (2, 1)]


class Mixes(Characters):
    """Whose states another record's tokens change."""

    def forward(self, x: Tensor, states: Any) -> tuple[Tensor, Any]:
        scores, states = super().forward(x, states)
        return scores + 0.1 * scores.mean(1, keepdim=True), states


def test_records_that_are_mixed_beside_states_are_found() -> None:
    with pytest.raises(dpoptim.SamplesInteractError, match="mixed"):
        choose_isolation(Mixes(), texts(), loss=of_tokens)
