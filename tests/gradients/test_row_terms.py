"""Sums of large tables by the rows that were looked up: the numbers of a table in full, bounded."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torch.utils.dlpack import from_dlpack

import dpoptim
from dpoptim.clipping import Clipping
from dpoptim.gradients import expected_sums
from dpoptim.gradients.accumulation import sums as sums_module
from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.memory import ReusedMemory
from dpoptim.noise.few_rows import FewRows, write_out
from dpoptim.training.trials.isolation import choose_isolation

ROWS, COLUMNS, BOUND = 400, 5, 0.7


@contextmanager
def tables_count_as_large(entries: int = 1) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums_module, "LARGE", entries)
        yield


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.words = nn.EmbeddingBag(ROWS, COLUMNS), nn.Embedding(ROWS, COLUMNS)
        self.head = nn.Linear(COLUMNS, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bag(x) + self.words(x).mul(3.0).sum(1))


def engine_of(dtype: torch.dtype = torch.float32) -> Engine:
    torch.manual_seed(0)
    engine = Engine(Tables().to(dtype), Clipping(BOUND), capacity=100, reduction="sum")
    engine.attach()
    return engine


def run(engine: Engine, x: Tensor, factors: Tensor) -> None:
    engine.begin_microbatch(len(x), groups=[[1]] * len(x))
    engine.backward(engine.model(x).square().sum(1) * factors)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_they_are_the_sums_of_tables_in_full_to_the_last_bit(
    dtype: torch.dtype, passes: int
) -> None:
    torch.manual_seed(1)
    batches = [torch.randint(ROWS, (6, 4)) for _ in range(passes)]
    engine = engine_of(dtype)
    for x in batches:
        run(engine, x, torch.ones(6))
    expected = engine.take_by_parameter()
    with tables_count_as_large():
        for x in batches:
            run(engine, x, torch.ones(6))
        found = engine.take_by_parameter()
        assert sum(isinstance(each, FewRows) for each in found) == 2 * (dtype != torch.bfloat16)
        assert not any(sums._rows for sums in engine.totals.sums)
        for x in batches:
            run(engine, x, torch.ones(6))
        vectors = engine.split(engine.take())
    for one, other, vector in zip(expected, found, vectors, strict=True):
        assert isinstance(one, Tensor)
        dense = other.dense() if isinstance(other, FewRows) else other
        assert torch.equal(one.double(), dense.double())
        assert torch.equal(one.double(), vector.view(-1))


@settings(max_examples=50)
@given(
    seed=st.integers(0, 1000),
    pending=st.sampled_from([1, 20, 1000]),
    most=st.sampled_from([1, 4, 100]),
    kinds=st.lists(st.sampled_from(["rows", "table", "settle"]), min_size=1, max_size=6),
)
def test_terms_of_any_kind_add_up_in_their_order(
    seed: int, pending: int, most: int, kinds: list[str]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    total, sums = torch.zeros(30, 2, dtype=torch.float64), Sums([60])
    with pytest.MonkeyPatch.context() as patch, tables_count_as_large():
        patch.setattr(sums_module, "PENDING", pending)
        patch.setattr(sums_module, "MOST_ROWS", most)
        for kind in kinds:
            values = torch.randn(30, 2, generator=generator, dtype=torch.float64)
            if kind == "rows":
                row = torch.randint(30, (7,), generator=generator)
                sums.add_rows(row, values[:7], torch.full((1, 7), 0.5, dtype=torch.float64))
                total.index_add_(0, row, values[:7] * 0.5)
            elif kind == "table":
                sums.add(values.flatten().clone())
                total += values
            else:
                assert torch.equal(sums.settle()[0], total.flatten())
        assert not sums.empty
        few = sums.take_few_rows(torch.float32)
        if few is None:
            held = sums.take()[0]
            assert held is not None
        assert torch.equal(held if few is None else few.dense(), total.flatten())
        assert sums.empty


def test_threads_do_not_change_them() -> None:
    torch.manual_seed(3)
    row, values = torch.randint(5_000, (60_000,)), torch.randn(60_000, 16, dtype=torch.float64)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.append(sums_module.added_up(row, values))
    finally:
        torch.set_num_threads(before)
    table = torch.zeros(5_000, 16, dtype=torch.float64)
    for k, value in zip(row.tolist(), values, strict=True):
        table[k] += value
    for rows, total in found:
        assert torch.equal(table[rows], total)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    spread=st.floats(0, 12),
    attack=st.floats(-12, 18),
    same_rows=st.booleans(),
    there=st.integers(1, 40),
)
def test_a_record_moves_the_sum_by_the_bound_at_most(
    seed: int, spread: float, attack: float, same_rows: bool, there: int
) -> None:
    """Beside records of all lengths, that look up the same rows or others, or a row twice."""
    torch.manual_seed(seed)
    x = torch.randint(ROWS, (there + 1, 6))
    if same_rows:
        x[:] = x[0] // 40
    factors = 10 ** (spread * (torch.rand(there + 1) - 0.5))
    factors[-1] = 10**attack
    moved = []
    with tables_count_as_large():
        engine = engine_of()
        for records in (there + 1, there):
            run(engine, x[:records], factors[:records])
            taken = engine.take_by_parameter()
            assert any(isinstance(each, FewRows) for each in taken)
            parts = [e.dense() if isinstance(e, FewRows) else e.double() for e in taken]
            moved.append(torch.cat(parts))
    assert float((moved[0] - moved[1]).norm()) <= BOUND


def test_a_whole_run_leaves_the_same_model() -> None:
    torch.manual_seed(5)
    data = TensorDataset(torch.randint(ROWS, (40, 4)), torch.randint(3, (40,)))
    plan = dpoptim.DPSGD(clip_norm=BOUND).plan(
        n=40, batch_size=10, steps=4, noise_multiplier=1.0, delta=1e-5
    )
    found = []
    for entries in (1, 1 << 20):
        torch.manual_seed(6)
        model = Tables()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            tables_count_as_large(entries),
            dpoptim.attach(plan, model, optimizer, data, noise_seed=7) as private,
        ):
            for x, y in private.batches(physical_batch_size=6):
                private.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
                optimizer.step()
                optimizer.zero_grad()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize(
    "kept",
    [
        lambda out: out,
        lambda out: out.view(10, 100)[3],
        lambda out: nn.Parameter(out),
        lambda out: out.div_(1.0).data,
        lambda out: out.numpy()[5:],
        lambda out: memoryview(out.numpy()),
        lambda out: from_dlpack(out),
        lambda out: torch.empty(0).set_(out.untyped_storage()),
    ],
)
def test_whoever_keeps_a_gradient_keeps_its_numbers(kept: Callable[[Tensor], Any]) -> None:
    memory = ReusedMemory()
    held = kept(memory.take(1000, torch.float32, None).fill_(1.0))
    memory.take(1000, torch.float32, None).fill_(2.0)
    memory.take(1000, torch.float32, None).fill_(3.0)
    assert len(held)
    assert bool((torch.as_tensor(held) == 1.0).all())


def test_gradients_of_large_tables_that_were_written_stay_as_they_are() -> None:
    with tables_count_as_large():
        engine, kept = engine_of(), []
        for seed in range(4):
            torch.manual_seed(seed)
            run(engine, torch.randint(ROWS, (6, 4)), torch.ones(6))
            engine.write_means(write_out(engine.take_by_parameter()), 6.0)
            gradients = [p.grad for p in engine.parameters if p.grad is not None]
            kept.append((gradients, [each.clone() for each in gradients]))
            for p in engine.parameters:
                p.grad = None
    for gradients, then in kept:
        assert len(then) == 4
        assert all(map(torch.equal, gradients, then))


def test_memory_is_used_again_when_nobody_has_it() -> None:
    memory = ReusedMemory()
    places = {memory.take(1000, torch.float32, torch.device("cpu")).data_ptr() for _ in range(5)}
    assert len(places) == 1
    assert len(memory.take(999, torch.float32, None)) == 999
    assert memory.take(999, torch.float64, None).dtype == torch.float64


@pytest.mark.parametrize("wrong", [0.0, 0.5, math.nan])
def test_records_are_taken_from_a_table_as_from_one_in_full(
    wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in rows that the sum has not: a rule that leaves some out is found."""
    monkeypatch.setattr(expected_sums, "WIDENED", 64)
    torch.manual_seed(8)
    row, value = torch.tensor([3, 20]), torch.randn(2, COLUMNS, dtype=torch.float64)
    few = FewRows(torch.empty(ROWS * COLUMNS), 0, row, value)
    table, left = few.dense().view(ROWS, COLUMNS), few
    for times in (0.5, 2.0):
        g = torch.zeros(ROWS, COLUMNS)
        g[3], g[-1, 2] = 1.0, wrong
        table.sub_(g, alpha=times)
        left = expected_sums.less(left, g, times)
    assert torch.allclose(left.dense().view(ROWS, COLUMNS), table, equal_nan=True)
    assert len(left.row) == (2 if wrong == 0 else 3)


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_rule_that_forgets_a_row_is_found(
    forgotten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Sums.add_rows

    def add_rows(self: Sums, row: Tensor, values: Tensor, weights: Tensor) -> None:
        keep = row != row.max() if forgotten else row >= 0
        honest(self, row[keep], values[keep], weights[:, keep])

    monkeypatch.setattr(Sums, "add_rows", add_rows)
    torch.manual_seed(9)
    data = TensorDataset(torch.randint(ROWS, (8, 4)), torch.zeros(8))
    with tables_count_as_large():
        isolation = choose_isolation(Tables(), data).isolation
    assert (isolation == Isolation()) != forgotten
