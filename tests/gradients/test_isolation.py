"""Ways to keep records apart: each gives every record its own gradient, whatever a module does
with its parameters.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpoptim.clipping import Clipping
from dpoptim.errors import PrivacyError
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.oracle import clipped_sums, gradients_alone
from support import CASES, Case, joint_norm, record_loss

ROWS = 7
RECURRENT = ("lstm", "lstm-time-major", "gru-both-ways", "rnn")  # which vmap does not know


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return record_loss(model(batch[0]), batch[1]).mean()


def sums_of(
    model: nn.Module,
    batch: tuple[Tensor, ...],
    isolation: Isolation,
    loss: Any = mean_loss,
    bound: float = 0.3,
) -> list[Tensor]:
    """The engine's sums; records one at a time where they pass alone."""
    rows = len(batch[0])
    engine = Engine(model, Clipping(bound), capacity=rows, isolation=isolation)
    engine.attach()
    try:
        for part in [slice(i, i + 1) for i in range(rows)] if isolation.alone else [slice(None)]:
            engine.begin_microbatch(1 if isolation.alone else rows)
            loss(model, tuple(t[part] for t in batch)).backward()
        assert all(p.grad is None for p in model.parameters())
        return [t.clone() for t in engine.split(engine.take())]
    finally:
        engine.detach()


def expected_of(
    model: nn.Module, batch: tuple[Tensor, ...], loss: Any = mean_loss, bound: float = 0.3
) -> list[Tensor]:
    alone = [tuple(t[i : i + 1] for t in batch) for i in range(len(batch[0]))]
    return clipped_sums(gradients_alone(model, loss, alone), Clipping(bound), len(batch[0]))


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    return joint_norm([x - y for x, y in zip(a, b, strict=True)])


@pytest.mark.thinned(2)
@pytest.mark.parametrize("tier", ["vmap", "alone"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_layer_in_every_way(case: Case, tier: str) -> None:
    torch.manual_seed(0)
    model, batch = case.build().double(), case.inputs(ROWS, torch.float64)
    if tier == "vmap" and case.name in RECURRENT:
        with pytest.raises(PrivacyError, match='isolation="alone"'):
            sums_of(model, batch, Isolation.of("vmap"))
        return
    expected = expected_of(model, batch)
    assert distance(sums_of(model, batch, Isolation.of(tier)), expected) < 1e-7 * max(
        joint_norm(expected), 1e-3
    )


class Borrowing(nn.Module):
    """What rules cannot follow: weights used functionally, positions without a record axis,
    records folded away.
    """

    def __init__(self, use: Callable[["Borrowing", Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.position, self.table = nn.Embedding(9, 5), nn.Parameter(torch.randn(9, 5))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


USES: dict[str, Callable[[Borrowing, Tensor], Tensor]] = {
    "transposed weight": lambda m, x: F.linear(m.first(x), m.first.weight.t()),
    "positions of one axis": lambda m, x: m.first(x) + m.position(torch.arange(x.shape[1])),
    "records and positions folded": lambda m, x: m.second(m.first(x).flatten(0, 1)).view_as(x),
    "parameter against data": lambda m, x: torch.einsum("btd,ed->bte", m.first(x), m.table),
    "weight of one layer through another": lambda m, x: m.first(x) @ m.second(m.first.weight),
    "in place": lambda m, x: m.first(x).mul_(m.second.weight.sum()),
    "two backward paths": lambda m, x: m.second(m.first(x)) + F.linear(x, m.second.weight),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tier", ["vmap", "alone"])
# as many as positions, as features, and as neither
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 7])
@pytest.mark.parametrize("use", USES)
def test_what_rules_cannot_follow(use: str, rows: int, tier: str) -> None:
    torch.manual_seed(0)
    model = Borrowing(USES[use]).double()
    batch = torch.randn(rows, 4, 5, dtype=torch.float64), torch.randn(rows, dtype=torch.float64)
    expected = expected_of(model, batch)
    assert distance(sums_of(model, batch, Isolation.of(tier)), expected) < 1e-7 * joint_norm(
        expected
    )


def test_a_record_cannot_see_another_one() -> None:
    """A model that subtracts the batch's mean has nothing to subtract but the record itself."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.layer(x) - 0.5 * self.layer(x).mean(0))

    torch.manual_seed(0)
    model, batch = (
        Centred().double(),
        (torch.randn(ROWS, 5, dtype=torch.float64), torch.randn(ROWS, dtype=torch.float64)),
    )
    expected = expected_of(model, batch)
    for tier in ("vmap", "alone"):
        assert distance(sums_of(model, batch, Isolation.of(tier)), expected) < 1e-7
    # which rules alone do not notice
    assert distance(sums_of(model, batch, Isolation()), expected) > 0.1


def test_neighbours_differ_by_the_bound_at_most_where_the_model_mixes_records() -> None:
    """Adversarial: every record's output depends on the whole batch, as far as the model can see
    one.
    """

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * x.abs().amax() + self.layer(x).sum(0) * 1e3

    torch.manual_seed(0)
    model, x = Mixing(), torch.randn(ROWS, 5)
    x[-1] *= 1e6
    target = torch.zeros(ROWS)
    for tier in ("vmap", "alone"):
        whole = sums_of(model, (x, target), Isolation.of(tier), bound=1.0)
        less = sums_of(model, (x[:-1], target[:-1]), Isolation.of(tier), bound=1.0)
        assert distance(whole, less) <= 1.0
    rules = [sums_of(model, (x[:n], target[:n]), Isolation(), bound=1.0) for n in (ROWS, ROWS - 1)]
    assert distance(*rules) > 1.5  # so this is no matter of course


def test_any_loss_may_be_taken_of_records_that_pass_alone() -> None:
    """A mean over the tokens of the whole batch, whose padding is that of the longest record."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)).double()
    tokens = torch.randint(0, 11, (ROWS, 5))
    labels = torch.where(torch.arange(5) < torch.randint(1, 6, (ROWS, 1)), tokens, -100)

    def token_mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)

    expected = expected_of(model, (tokens, labels), token_mean)
    assert (
        distance(sums_of(model, (tokens, labels), Isolation.of("alone"), token_mean), expected)
        < 1e-9
    )


@pytest.mark.parametrize("tier", ["vmap", "alone"])
def test_gradient_penalties(tier: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    batch = torch.randn(ROWS, 5, dtype=torch.float64), torch.randn(ROWS, dtype=torch.float64)

    def penalised(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0].clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return (out[:, 0] + slope.square().sum(1)).mean()

    expected = expected_of(model, batch, penalised)
    assert distance(sums_of(model, batch, Isolation.of(tier), penalised), expected) < 1e-9


class Dropping(nn.Module):
    """Without a rule; draws a mask of its own for each record."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(torch.einsum("bi,ij->bj", x, self.weight), 0.5)


def test_dropout_inside_a_module_without_a_rule() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Dropping()), torch.rand(ROWS, 4) + 0.5
    engine = Engine(model, Clipping(1e6), capacity=ROWS, reduction="sum")
    engine.attach()
    engine.begin_microbatch(ROWS)
    out = model(x)
    out.sum().backward()
    kept = (out != 0).double() * 2
    assert 0 < float(kept.mean()) < 2
    assert len({tuple(row) for row in kept.tolist()}) > 1  # every record has its own mask
    torch.testing.assert_close(
        engine.split(engine.take())[0], x.double().T @ kept, rtol=1e-5, atol=1e-5
    )
    engine.detach()


def test_a_layer_in_two_places_is_vectorised_and_left_as_it_was() -> None:
    """Left to itself, ``torch.func`` takes such a layer's parameters away."""
    torch.manual_seed(0)
    layer = nn.Linear(5, 5)
    tied = nn.Linear(5, 5)
    tied.bias = layer.bias
    model = nn.Sequential(nn.Sequential(layer, nn.Tanh()), nn.Sequential(layer, tied)).double()
    batch = torch.randn(ROWS, 5, dtype=torch.float64), torch.randn(ROWS, dtype=torch.float64)
    before = [*model.named_parameters(remove_duplicate=False)]
    expected = expected_of(model, batch)
    assert distance(sums_of(model, batch, Isolation.of("vmap")), expected) < 1e-7
    after = [*model.named_parameters(remove_duplicate=False)]
    assert [(name, id(p)) for name, p in after] == [(name, id(p)) for name, p in before]


def test_numbers_without_an_axis_come_back_one_for_each_record() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> dict[str, Any]:
            out = self.layer(x)
            return {"loss": out.square().mean(), "logits": out, "cache": object(), "length": 5}

    torch.manual_seed(0)
    model, x = WithLoss().double(), torch.randn(ROWS, 5, dtype=torch.float64)
    losses = [model(x[i : i + 1])["loss"].detach() for i in range(ROWS)]
    engine = Engine(
        model, Clipping(0.1), capacity=ROWS, reduction="sum", isolation=Isolation.of("vmap")
    )
    engine.attach()
    engine.begin_microbatch(ROWS)
    out = model(x)
    assert out["loss"].shape == (ROWS,)
    assert out["cache"] is None
    assert out["length"] == 5
    torch.testing.assert_close(out["loss"].detach(), torch.stack(losses))
    out["loss"].sum().backward()
    sums = [t.clone() for t in engine.split(engine.take())]
    engine.detach()
    expected = expected_of(model, (x,), lambda m, b: m(b[0])["loss"], bound=0.1)
    # margins of means and sums differ
    assert distance(sums, expected) < 1e-4 * joint_norm(expected)


@pytest.mark.parametrize("tier", ["rules", "vmap", "alone"])
def test_spectral_norms_train(tier: str) -> None:
    """What their iterations write follows from the weights alone, once a step.

    However many microbatches it has: that many records there are, roughly, and later records would
    meet other weights if one more came.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 2)
    ).double()
    batch = torch.randn(ROWS, 5, dtype=torch.float64), torch.randn(ROWS, dtype=torch.float64)
    before, moved = copy.deepcopy([*model.buffers()]), list[Tensor]()
    engine = Engine(
        model, Clipping(0.3), capacity=ROWS, reduction="sum", isolation=Isolation.of(tier)
    )
    engine.attach()
    for part in zip(*(t.split(1 if tier == "alone" else ROWS - 1) for t in batch), strict=True):
        engine.begin_microbatch(len(part[0]))
        moved = moved or copy.deepcopy([*model.buffers()])
        (mean_loss(model, part) * len(part[0])).backward()
        # neither forward passes nor later microbatches write
        assert all(map(torch.equal, model.buffers(), moved))
    engine.refuse_changes()
    assert not any(map(torch.equal, before, moved))
    sums = [t.clone() for t in engine.split(engine.take())]
    engine.detach()
    still = copy.deepcopy(model)
    still[0].parametrizations.weight[0].eval()
    expected = expected_of(still, batch)
    assert distance(sums, expected) < 1e-4 * joint_norm(
        expected
    )  # margins of means and sums differ


def test_spectral_norms_follow_the_weights_at_each_step_once() -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4)), nn.Linear(4, 2))
    u = model[0].parametrizations.weight[0]._u
    engine = Engine(model, Clipping(0.3), capacity=ROWS)
    engine.attach()
    engine.begin_microbatch(1)
    first = u.clone()
    engine.restart()  # the same step once more
    engine.begin_microbatch(1)
    assert torch.equal(u, first)
    engine.take()
    engine.begin_microbatch(1)
    assert not torch.equal(u, first)
    engine.detach()


def test_what_forward_passes_write_into_iterated_buffers_is_seen_in_later_microbatches() -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4)), nn.Linear(4, 2))
    engine = Engine(model, Clipping(0.3), capacity=ROWS, reduction="sum")
    engine.attach()
    for size in (2, 1):
        engine.begin_microbatch(size)
        model(torch.randn(size, 5)).sum().backward()
        if size > 1:
            model[0].parametrizations.weight[0]._u.data.mul_(2.0)
    with pytest.raises(PrivacyError, match="_u' was changed"):
        engine.refuse_changes()
    engine.detach()


def test_copies_of_a_model_that_passes_alone_are_plain() -> None:
    model = nn.Sequential(nn.Linear(5, 3))
    engine = Engine(model, Clipping(1.0), capacity=ROWS, isolation=Isolation.of("alone"))
    engine.attach()
    engine.begin_microbatch(1)
    model(torch.randn(1, 5)).sum().backward()
    engine.detach()
    model(torch.randn(1, 5)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_rows_that_pass_alone_must_be_single() -> None:
    model = nn.Sequential(nn.Linear(5, 3))
    engine = Engine(model, Clipping(1.0), capacity=ROWS, isolation=Isolation.of("alone"))
    engine.attach()
    engine.begin_microbatch(2)
    with pytest.raises(PrivacyError, match="did not cover exactly the rows"):
        model(torch.randn(2, 5)).sum().backward()
    engine.detach()


# ---- calls that used to crash, or to leave stale rows behind ------------------------------------


class Encoder(nn.Module):
    """Positions of shape (1, T), behind a method of its own, and behind a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(11, 6), nn.Embedding(9, 6)
        self.head = nn.Linear(6, 3)

    def encode(self, x: Tensor) -> Tensor:
        return self.token(x) + self.position(torch.arange(x.shape[1])[None])

    def forward(self, batch: Any) -> Tensor:
        x = batch["x"] if isinstance(batch, dict) else batch
        return self.head(self.encode(x))


def tokens(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randint(0, 11, (rows, 5)), torch.randn(rows, dtype=torch.float64)


@pytest.mark.parametrize("rows", [3, 5, 7])
def test_nested_inputs_with_positions(rows: int) -> None:
    model, batch = Encoder().double(), tokens(rows)
    nested = lambda m, b: record_loss(m({"x": b[0]}), b[1]).mean()  # noqa: E731
    expected = expected_of(model, batch)
    assert distance(sums_of(model, batch, Isolation(), nested), expected) < 1e-7


@pytest.mark.parametrize("rows", [3, 5, 7])
def test_a_method_call_does_not_meet_the_rows_of_an_earlier_batch(rows: int) -> None:
    model, batch = Encoder().double(), tokens(rows)
    method = lambda m, b: record_loss(m.head(m.encode(b[0])), b[1]).mean()  # noqa: E731
    expected = expected_of(model, batch)
    engine = Engine(model, Clipping(0.3), capacity=9)
    engine.attach()
    engine.begin_microbatch(9)
    mean_loss(model, tokens(9)).backward()
    engine.take()
    engine.begin_microbatch(rows)
    method(model, batch).backward()
    sums = [t.clone() for t in engine.split(engine.take())]
    engine.detach()
    assert distance(sums, expected) < 1e-4 * joint_norm(expected)  # margins of other capacities


def test_checkpointed_blocks_know_their_rows_again_in_the_backward_pass() -> None:
    class Checkpointed(Encoder):
        def forward(self, batch: Any) -> Tensor:
            return self.head(checkpoint(self.encode, batch, use_reentrant=False))

    model, batch = Checkpointed().double(), tokens(ROWS)
    expected = expected_of(model, batch)
    assert distance(sums_of(model, batch, Isolation()), expected) < 1e-7


def test_the_margin_of_one_record() -> None:
    """A single record's gradient is clipped as any other: norm C at most, and nearly that."""
    model = nn.Linear(5, 3)
    engine = Engine(model, Clipping(0.5), capacity=ROWS, isolation=Isolation.of("alone"))
    engine.attach()
    engine.begin_microbatch(1)
    (1e4 * model(torch.ones(1, 5))).sum().backward()
    norm = joint_norm(engine.split(engine.take()))
    engine.detach()
    assert math.isclose(norm, 0.5, rel_tol=0.02)
    assert norm <= 0.5
