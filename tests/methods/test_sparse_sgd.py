"""SparseSGD: what a record adds is bounded, what is released has the law of noise on every row that
is then thresholded, and what has no rows to select is refused.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr
from scipy.stats import binom, chi2
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.audit.attack_families import attack
from dpoptim.gate import Gate, SelectedRows, planned
from dpoptim.gate.row_selection import select_rows
from dpoptim.gradients.accumulation.table_sums import ONE, weights_of
from dpoptim.gradients.per_sample.sparse import sparse_rows
from dpoptim.noise import KeyStream
from dpoptim.noise.gaussian import add_normal
from dpoptim.optim import AdamBC
from support import pairs

N, BATCH, ROWS = 40, 10, 30
FAILURE = 1e-9  # of a statistical check under a right implementation; seeds are fixed


class Clicks(nn.Module):
    """Two tables, bags and a sequence, and a head: what a click model is made of."""

    def __init__(self, rows: int = ROWS, mode: str = "mean") -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(rows, 3, mode=mode, padding_idx=0)
        self.users = nn.Embedding(rows, 3, padding_idx=0)
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.words(x), self.users(x[:, :2]).sum(1)], 1))[:, 0]


def clicks(n: int = N, rows: int = ROWS, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, rows, (n, 5), generator=generator)
    return x, torch.ones(n)


def model_of(seed: int = 1, **settings: Any) -> Clicks:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Clicks(**settings).double()


def plan_of(
    method: Any = None,
    *,
    batch_size: int = BATCH,
    steps: int = 4,
    noise: float = 1.0,
    neighboring: str = "add-or-remove-one",
) -> dpoptim.Plan:
    method = method or dpoptim.SparseSGD(0.7, share=0.3, false_positives=0.1)
    return dpoptim.Plan(method, N, batch_size, steps, noise, neighboring, 1e-5)


def train(
    plan: Any,
    data: TensorDataset,
    model: nn.Module | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.5),
    *,
    batches: dict[str, Any] | None = None,
    **attached: Any,
) -> nn.Module:
    model = model or model_of()
    moved = optimizer(model.parameters())
    attached = {"noise_seed": 0, **attached}
    with dpoptim.attach(plan, model, moved, data, **attached) as private:
        for x, weight in private.batches(**(batches or {})):
            private.backward(model(x) * weight)
            moved.step()
    return model


# ---- what a record adds -------------------------------------------------------------------------


@given(st.integers(1, 2**40))
def test_a_map_has_at_most_norm_one_and_wastes_next_to_nothing(k: int) -> None:
    weight = int(weights_of(torch.tensor([k]))[0])
    assert k * weight**2 <= ONE**2 < k * (weight + 1) ** 2


def test_a_record_without_rows_adds_nothing() -> None:
    assert weights_of(torch.tensor([0])).tolist() == [ONE]  # to no row


KINDS = ["plain", "every row", "one row", "padding", "huge", "not finite"]
CUTS: list[dict[str, Any]] = [
    {},
    {"physical_batch_size": 3},
    {"physical_batch_size": 4, "fixed_shape": True},
]


def queries(
    plan: Any, data: TensorDataset, monkeypatch: pytest.MonkeyPatch, **given: Any
) -> list[list[Tensor]]:
    """What each step asks the gate for; both worlds are given the same releases."""
    asked: list[list[Tensor]] = []

    def spy(self: Gate, sums: list[Tensor]) -> list[Tensor]:
        asked.append([each.to_dense().double().clone() for each in sums])
        self.released += 1
        tables = sum(each.is_sparse for each in sums) // 2
        return [
            sparse_rows(torch.arange(3), torch.full((3, 3), 2.0).double(), each.shape)
            if each.is_sparse
            else torch.full_like(each, 2.0)
            for each in sums[: len(sums) - tables]
        ]

    with monkeypatch.context() as patch:
        patch.setattr(Gate, "release_sum", spy)
        train(plan, data, **given)
    return asked


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "neighboring", "cut"),
    pairs(KINDS, ["add-or-remove-one", "zero-out", "replace-one"], range(len(CUTS))),
)
def test_one_record_moves_a_step_by_what_is_paid_for(
    neighboring: str, kind: str, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query is one vector; a record's part of it is at most 1 long (2 under replace-one)."""
    # without a record, other coins would be tossed for the others
    by_coins = neighboring != "add-or-remove-one"
    plan = plan_of(neighboring=neighboring, batch_size=BATCH if by_coins else N)
    share, norm = plan.method.share, plan.method.clip_norm
    x, weight = clicks()
    x, record = torch.cat([x, x[:, :1].expand(-1, ROWS)], 1), N - 1
    match kind:
        case "every row":
            x[record, :ROWS] = torch.arange(ROWS)
        case "one row":
            x[record] = 7
        case "padding":
            x[record] = 0
        case "huge":
            weight[record] = 1e6
        case "not finite":
            weight[record] = math.inf
    other, others = x.clone(), weight.clone()
    kept = slice(None)
    if neighboring == "add-or-remove-one":
        kept = slice(0, N - 1)
    elif neighboring == "zero-out":
        other[record], others[record] = 0, 0.0
    else:
        other[record], others[record] = torch.arange(5).repeat(7), -1.0
    worlds = [
        queries(plan, TensorDataset(a, b.double()), monkeypatch, batches=CUTS[cut])
        for a, b in ((x, weight), (other[kept], others[kept]))
    ]
    allowed = 2 if neighboring == "replace-one" else 1
    moves = []
    for one, two in zip(*worlds, strict=True):
        assert len(one) == 6  # two tables, a weight, a bias, and the counts of the tables
        sums, counts = (
            math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(*pair, strict=True)))
            for pair in ((one[:4], two[:4]), (one[4:], two[4:]))
        )
        assert sums <= allowed * norm
        assert counts <= allowed
        moves.append(math.hypot(math.sqrt(share) * counts, math.sqrt(1 - share) * sums / norm))
    assert 0.3 < max(moves) <= allowed  # it was seen
    assert (min(moves) == 0) == by_coins  # of steps that it was not in


def test_counts_are_of_rows_looked_up_and_of_persons(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person's rows are one record's: what two of them look up counts once."""
    x = torch.tensor([[1, 2, 0, 0, 0], [1, 3, 0, 0, 0]] * (N // 2))
    data = TensorDataset(x, torch.ones(N).double())
    plan = dpoptim.Plan(dpoptim.SparseSGD(1.0), N, N, 1, 0.0, "add-or-remove-one", 1e-5)
    (alone,) = queries(plan, data, monkeypatch)
    k = 4  # of each record: two words, and two users
    assert alone[4].nonzero()[:, 0].tolist() == alone[5].nonzero()[:, 0].tolist() == [1, 2, 3]
    torch.testing.assert_close(
        alone[4][1:4], torch.tensor([N, N / 2, N / 2]).double() / math.sqrt(k)
    )
    persons = dpoptim.Plan(
        dpoptim.SparseSGD(1.0), N // 2, N // 2, 1, 0.0, "add-or-remove-one", 1e-5
    )
    (together,) = queries(persons, data, monkeypatch, persons=np.arange(N) // 2, rows_per_record=3)
    torch.testing.assert_close(together[4][1:4], torch.full((3,), N / 2).double() / math.sqrt(6))


# ---- what is released ---------------------------------------------------------------------------


def test_without_noise_and_threshold_it_is_dp_sgd() -> None:
    """The limit: the clipped sum of all rows that were touched."""
    data = TensorDataset(*clicks())
    worlds = [
        train(plan_of(method, noise=0.0), data).state_dict()
        for method in (dpoptim.SparseSGD(0.7), dpoptim.DPSGD(0.7))
    ]
    for name, value in worlds[0].items():
        torch.testing.assert_close(value, worlds[1][name], rtol=1e-12, atol=1e-14)
        assert not torch.equal(value, model_of().state_dict()[name])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("step", "proportion"), [(0, 0.2), (1, 0.2), (0, 1e-3), (0, 0.9)])
def test_rows_are_selected_as_noise_on_every_count_would(step: int, proportion: float) -> None:
    """Against the mechanism as it is written, noise on all counts and a threshold, many times."""
    query = SelectedRows(0.7, 1.3, (1.0, 2.0), 0.3, proportion)
    counts = torch.tensor([0, 0.5, 0, 1.0, 3.0, 0, 0, 0, 9.0, 0, 0, 40.0]).double()
    repeats, deviation = 40_000, 1.3 / math.sqrt(0.3) * query.scales[step]
    size = len(counts) * repeats
    noisy = counts.repeat(repeats)
    rows = noisy.nonzero()[:, 0]
    sums = [
        sparse_rows(rows, torch.ones(len(rows), 2).double(), (size, 2)),
        sparse_rows(rows, noisy[rows], (size,)),
    ]
    (kept,) = select_rows(query, step, KeyStream.from_seed(2, "drawn"), sums)
    found = kept.indices()[0]
    assert (kept.values() == torch.isin(found, rows)[:, None]).all()
    drawn = torch.zeros(size).double().index_fill_(0, found, 1.0).view(repeats, -1)
    add_normal(KeyStream.from_seed(1, "written"), noisy, deviation)
    written = (noisy > query.threshold(step)).double().view(repeats, -1)
    expected = ndtr((counts.numpy() - query.threshold(step)) / deviation)
    assert expected[0] == pytest.approx(proportion)
    together = np.outer(expected, expected)  # rows are selected independently
    apart = ~np.eye(len(counts), dtype=bool)
    for seen in (written, drawn):
        assert all_likely(seen.sum(0), repeats, expected)
        assert all_likely((seen.T @ seen)[apart], repeats, together[apart])


def all_likely(seen: Tensor, trials: int, expected: Any) -> bool:
    heads = seen.numpy()
    least = np.minimum(binom.cdf(heads, trials, expected), binom.sf(heads - 1, trials, expected))
    return bool((least > FAILURE).all())


def test_every_row_selected_has_noise_and_no_other_moves() -> None:
    """Rows that nobody touched among them; the noise is that of the gradients' own share."""
    rows, steps = 20_000, 3
    method = dpoptim.SparseSGD(0.7, share=0.3, false_positives=0.25)
    plan = plan_of(method, steps=steps, noise=1.3)
    x, _ = clicks(rows=50)
    squares: list[float] = []
    count = 0
    for seed in range(2):
        model = model_of(rows=rows)
        before = model.users.weight.detach().clone()
        one = dpoptim.Plan(method, N, BATCH, 1, 1.3, "add-or-remove-one", 1e-5)
        train(one, TensorDataset(x, torch.ones(N).double()), model, noise_seed=seed)
        moved = (model.users.weight.detach() - before)[50:] / 0.5 * BATCH
        selected = moved.ne(0).any(1)
        assert (moved[selected] != 0).all()
        assert FAILURE < binom.cdf(int(selected.sum()), rows - 50, 0.25) < 1 - FAILURE
        squares.append(float(moved.square().sum()))
        count += int(selected.sum()) * 3
    variance = (1.3 * 0.7) ** 2 / (1 - 0.3)
    assert FAILURE < chi2.cdf(sum(squares) / variance, count) < 1 - FAILURE
    assert plan.query.deviation(0) == pytest.approx(math.sqrt(variance))


def test_a_step_draws_the_noise_of_the_rows_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a million rows, next to none of which is selected."""
    drawn: list[int] = []

    def counted(stream: KeyStream, out: Any, std: float) -> None:
        drawn.append(sum(each.numel() for each in out))
        add_normal(stream, out, std)

    monkeypatch.setattr(planned, "add_normal", counted)
    method = dpoptim.SparseSGD(1.0, false_positives=1e-5)
    model = nn.Sequential(nn.EmbeddingBag(1_000_000, 2), nn.Linear(2, 1))
    data = TensorDataset(*clicks(rows=1_000_000))
    plan = plan_of(method, steps=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dpoptim.attach(plan, model, optimizer, data, noise_seed=3) as private:
        for x, _ in private.batches():
            private.backward(model(x)[:, 0])
            optimizer.step()
    assert len(drawn) == 3
    assert all(3 < each < 200 for each in drawn)  # 10 false positives a step, two entries each


def test_it_costs_what_dp_sgd_costs_and_is_reserved_first(tmp_path: Path) -> None:
    given: Any = {"n": 400, "batch_size": 40, "epochs": 2, "epsilon": 3.0, "delta": 1e-5}
    sparse, dense = (method(1.0).plan(**given) for method in (dpoptim.SparseSGD, dpoptim.DPSGD))
    assert sparse.event == dense.event
    assert sparse.guarantee == dense.guarantee
    assert sparse.event_of_part(3) == dense.event_of_part(3) != dense.event
    assert dpoptim.Plan.from_json(sparse.to_json()) == sparse
    query = sparse.query
    both = query.count_deviation(0) ** -2 + (query.deviation(0) / query.norm_bound) ** -2
    assert sparse.noise_multiplier <= both**-0.5 < sparse.noise_multiplier * (1 + 1e-9)
    ledger = dpoptim.Ledger(tmp_path / "ledger.db")
    train(plan_of(), TensorDataset(*clicks()), ledger=ledger, noise_seed=None)
    (entry,) = ledger.entries()
    assert (entry.state, entry.event) == ("committed", plan_of().event)
    ledger.close()


def test_schedules_scale_counts_and_gradients_alike() -> None:
    method = dpoptim.SparseSGD(1.0, share=0.2, noise_schedule=(2.0, 1.0))
    query = plan_of(method).query
    for step, scale in ((0, 2.0), (3, 1.0)):
        assert query.count_deviation(step) == pytest.approx(scale / math.sqrt(0.2))
        assert query.deviation(step) == pytest.approx(scale / math.sqrt(0.8))


def test_the_attack_shows_most_of_the_claim_and_not_more() -> None:
    for neighboring, share in (("add-or-remove-one", 0.1), ("replace-one", 0.1), ("zero-out", 0.6)):
        method = dpoptim.SparseSGD(1.0, share=share)
        plan = dpoptim.Plan(method, 1000, 1000, 4, 2.0, neighboring, 1e-5)
        found = attack(plan, 8000, 0)
        assert 0.3 * found.claimed < found.lower_bound <= found.claimed, neighboring
    sampled = dpoptim.Plan(dpoptim.SparseSGD(1.0), 1000, 100, 60, 0.8, "add-or-remove-one", 1e-5)
    found = attack(sampled, 8000, 0)
    assert 0.3 * found.claimed < found.lower_bound <= found.claimed


# ---- who moves the rows -------------------------------------------------------------------------

SPARSE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}
DENSE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD, decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "Adagrad, decay": lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of PyTorch's own Adagrad
@pytest.mark.parametrize("name", [*SPARSE, *DENSE])
def test_gradients_are_sparse_for_those_that_move_selected_rows_alone(name: str) -> None:
    model = model_of()
    optimizer = {**SPARSE, **DENSE}[name](model.parameters())
    found: list[Tensor] = []
    data = TensorDataset(*clicks())
    with dpoptim.attach(plan_of(), model, optimizer, data, noise_seed=0) as private:

        def look(*given: Any) -> None:
            found.extend(p.grad for p in model.parameters() if p.grad is not None)

        optimizer.register_step_pre_hook(look)
        for x, _ in private.batches():
            assert all(p.grad is None for p in model.parameters())
            private.backward(model(x))
            optimizer.step()
    assert [each.is_sparse for each in found] == [name in SPARSE, name in SPARSE, False, False] * 4
    assert all(each.isfinite().all() for each in model.state_dict().values())
    assert all(0 < each.to_dense().any(1).sum() < ROWS for each in found[:2])


def test_optimizers_of_their_own_step_where_no_row_was_selected() -> None:
    method = dpoptim.SparseSGD(0.7, share=0.01, false_positives=1e-9)
    model = model_of()
    tables = [model.words.weight, model.users.weight]
    both = [torch.optim.SGD(tables, lr=0.1), torch.optim.SGD(model.head.parameters(), lr=0.1)]
    data = TensorDataset(*clicks())
    with dpoptim.attach(plan_of(method), model, both, data, noise_seed=0) as private:
        for x, _ in private.batches():
            private.backward(model(x))
            for optimizer in both:
                optimizer.step()
    assert private.steps_done == plan_of(method).steps


def test_tables_and_the_rest_may_have_optimizers_of_their_own() -> None:
    model = model_of()
    tables = [model.words.weight, model.users.weight]
    both = [torch.optim.SparseAdam(tables, lr=0.1), torch.optim.Adam(model.head.parameters())]
    before = model.state_dict()["users.weight"].clone()
    data = TensorDataset(*clicks())
    with dpoptim.attach(plan_of(), model, both, data, noise_seed=0) as private:
        for x, _ in private.batches():
            private.backward(model(x))
            for optimizer in both:
                optimizer.step()
    assert not torch.equal(model.users.weight, before)
    changed = dpoptim.attach(plan_of(), model, both, TensorDataset(*clicks()))
    with pytest.raises(dpoptim.PrivacyError, match="did not come through the gate"), changed:
        for x, _ in changed.batches():
            changed.backward(model(x))
            both[1].step()
            gradient = model.users.weight.grad
            assert gradient is not None
            gradient.values().mul_(2)
            both[0].step()


def test_a_resumed_run_releases_what_it_would_have(tmp_path: Path) -> None:
    data = TensorDataset(*clicks())
    whole = train(plan_of(), data).state_dict()
    model, path = model_of(), tmp_path / "run.pt"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with dpoptim.attach(plan_of(), model, optimizer, data, noise_seed=0) as private:
        for x, weight in private.batches():
            private.backward(model(x) * weight)
            optimizer.step()
            if private.steps_done == 2:
                private.save(path)
                break
    resumed = train(plan_of(), data, model_of(5), resume=path).state_dict()
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_an_update_that_failed_is_redone_from_the_selected_rows(tmp_path: Path) -> None:
    class Failing(torch.optim.SGD):
        fails = True

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise MemoryError
            return super().step(closure)

    data, path = TensorDataset(*clicks()), tmp_path / "run.pt"
    plan = plan_of(steps=1)
    whole = train(plan, data).state_dict()
    model = model_of()
    optimizer = Failing(model.parameters(), lr=0.5)
    private = dpoptim.attach(plan, model, optimizer, data, noise_seed=0)
    with private, pytest.raises(MemoryError):
        for x, weight in private.batches():
            private.backward(model(x) * weight)
            optimizer.step()
    Failing.fails = False
    private.save(path)
    again = model_of(5)
    redone = Failing(again.parameters(), lr=0.5)
    with dpoptim.attach(plan, again, redone, data, noise_seed=0, resume=path):
        assert all(torch.equal(again.state_dict()[name], value) for name, value in whole.items())


def test_an_ended_run_leaves_its_budget_what_dp_sgd_leaves(tmp_path: Path) -> None:
    reserved = []
    for method in (dpoptim.SparseSGD(1.0), dpoptim.DPSGD(1.0)):
        ledger = dpoptim.Ledger(tmp_path / f"{method.name}.db", epsilon=20.0, delta=1e-4)
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        plan, data = plan_of(method, steps=30, noise=2.0), TensorDataset(*clicks())
        with dpoptim.attach(plan, model, optimizer, data, ledger=ledger) as private:
            whole = []
            for x, _ in private.batches():
                private.backward(model(x))
                optimizer.step()
                whole.append(ledger.remaining().reserved)
                if private.steps_done == 2:
                    private.finish(refund=True)
        assert ledger.remaining().reserved < 0.5 * whole[-1]
        reserved.append(ledger.remaining().reserved)
        ledger.close()
    assert reserved[0] == reserved[1]


# ---- refusals -----------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(ROWS, 3), nn.Linear(3, ROWS, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x).mean(1)).sum(1)


class Positions(nn.Module):
    """Looks up the same rows for all records, and what the records say."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(ROWS, 3), nn.Embedding(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.words(x) * self.places(torch.arange(5))).sum((1, 2))


class Own(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.weight.sum()


REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: nn.Linear(5, 1), "trains no nn.Embedding"),
    (
        lambda: nn.Sequential(nn.Embedding(ROWS, 1).requires_grad_(False), nn.Linear(1, 1)),
        "trains no",
    ),
    (Tied, "'table.weight' is an embedding table that Linear uses too"),
    (lambda: model_of(mode="max"), "mode 'max'"),
]


@pytest.mark.parametrize(("make", "said"), REFUSED)
def test_models_without_rows_to_select_are_refused_by_name(
    make: Callable[[], nn.Module], said: str, tmp_path: Path
) -> None:
    model, ledger = make(), dpoptim.Ledger(tmp_path / "ledger.db")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(clicks()[0] if said != "trains no nn.Embedding" else torch.ones(N, 5))
    with pytest.raises(dpoptim.PrivacyError, match=said):
        dpoptim.attach(plan_of(), model, optimizer, data, ledger=ledger)
    assert ledger.entries() == []
    ledger.close()


@pytest.mark.parametrize("make", [Positions, lambda: nn.Sequential(Own(ROWS, 3), nn.Flatten())])
def test_lookups_that_are_not_told_apart_are_refused(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    model, ledger = make(), dpoptim.Ledger(tmp_path / "ledger.db")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(clicks()[0])
    with pytest.raises(dpoptim.PrivacyError, match="dpoptim.DPSGD"):
        private = dpoptim.attach(plan_of(), model, optimizer, data, ledger=ledger)
        with private:
            for (x,) in private.batches():
                private.backward(model(x).flatten(1).sum(1) if model(x).dim() > 1 else model(x))
                optimizer.step()
    assert ledger.entries() == []
    ledger.close()


@pytest.mark.parametrize("isolation", ["vmap", "alone"])
def test_other_ways_of_keeping_records_apart_are_refused(isolation: Any) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(dpoptim.PrivacyError, match=f"isolation '{isolation}'"):
        dpoptim.attach(plan_of(), model, optimizer, TensorDataset(*clicks()), isolation=isolation)


def test_optimizers_that_count_on_more_are_refused() -> None:
    model, data = model_of(), TensorDataset(*clicks())
    with pytest.raises(dpoptim.PrivacyError, match="SparseAdam holds parameter 'head.weight'"):
        dpoptim.attach(plan_of(), model, torch.optim.SparseAdam(model.parameters()), data)
    corrected = AdamBC(model.parameters())
    with pytest.raises(dpoptim.PrivacyError, match="AdamBC corrects for noise in every entry"):
        dpoptim.attach(plan_of(), model, corrected, data)


def test_settings_out_of_range_are_refused() -> None:
    for wrong in ({"share": 0.0}, {"share": 1.0}, {"false_positives": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            dpoptim.SparseSGD(1.0, **wrong)
    with pytest.raises(ValueError, match="at most 0.5"):
        dpoptim.SparseSGD(1.0, false_positives=0.6)
    with pytest.raises(ValueError, match="clip_norm must be a number for sparse-sgd"):
        dpoptim.SparseSGD(dpoptim.PrivateQuantile(0.1))  # type: ignore[arg-type]


@settings(max_examples=15)
@given(
    st.lists(st.lists(st.integers(0, ROWS - 1), min_size=5, max_size=5), min_size=2, max_size=6),
    st.integers(0, 5),
)
def test_any_record_moves_the_counts_by_its_own_map(lookups: list[list[int]], place: int) -> None:
    """Exactly, in whole numbers: removing it takes away w_k for each of its k rows."""
    x, record = torch.tensor(lookups), place % len(lookups)
    plan = dpoptim.Plan(dpoptim.SparseSGD(1.0), 8, 8, 1, 0.0, "add-or-remove-one", 1e-5)
    with pytest.MonkeyPatch.context() as patch:
        counts = [
            torch.cat(queries(plan, TensorDataset(each, torch.ones(len(each))), patch)[0][4:])
            for each in (x, torch.cat([x[:record], x[record + 1 :]]))
        ]
    own = {*lookups[record]} - {0}, {*lookups[record][:2]} - {0}
    k = len(own[0]) + len(own[1])
    expected = torch.zeros(2 * ROWS).double()
    for table, rows in enumerate(own):
        expected[[row + table * ROWS for row in rows]] = int(weights_of(torch.tensor([k]))[0]) / ONE
    assert torch.equal(counts[0] - counts[1], expected)
