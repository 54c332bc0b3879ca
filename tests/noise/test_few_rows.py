"""Noise written over a table of which few rows hold a sum: what it is for a table in full."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpoptim.noise import KeyStream, add_normal, draws_in_place, gaussian, ziggurat
from dpoptim.noise.few_rows import FewRows, write_out


def few_rows(rows: int, columns: int, share: float, dtype: torch.dtype, seed: int) -> FewRows:
    """A table in memory that is not clear."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.rand(rows, generator=generator).lt(share).nonzero()[:, 0]
    value = torch.randn(len(row), columns, generator=generator, dtype=torch.float64)
    return FewRows(torch.full((rows * columns,), torch.nan, dtype=dtype), 0, row, value)


def in_full(few: FewRows) -> Tensor:
    """The table by an independent formula."""
    table = torch.zeros(len(few) // few.value.shape[1], few.value.shape[1], dtype=torch.float64)
    for row, value in zip(few.row.tolist(), few.value, strict=True):
        table[row] = value
    return table.flatten()


def without(patch: pytest.MonkeyPatch) -> None:
    for module in (gaussian, ziggurat, draws_in_place):
        patch.setattr(module, "functions", lambda: None)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 3_000),
    columns=st.sampled_from([1, 3, 16, 1_000]),
    share=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    compiled=st.booleans(),
)
def test_every_entry_gets_the_noise_of_a_table_in_full(
    seed: int, rows: int, columns: int, share: float, dtype: torch.dtype, compiled: bool
) -> None:
    """To the last bit, among other tensors, rounded once."""
    few = few_rows(min(rows, 400_000 // columns), columns, share, dtype, seed)
    before, table, after = torch.ones(777), in_full(few), torch.ones(5, dtype=torch.float64)
    add_normal(KeyStream.from_seed(seed, "test"), [before, table, after], 1.7)
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            without(patch)
        others = [torch.ones(777), torch.ones(5, dtype=torch.float64)]
        add_normal(KeyStream.from_seed(seed, "test"), [others[0], few, others[1]], 1.7)
    assert torch.equal(few.out, table.to(dtype))
    assert torch.equal(others[0], before)
    assert torch.equal(others[1], after)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_of_a_table_of_several_chunks_too(threads: int) -> None:
    few = few_rows(100_000, 23, 0.05, torch.float32, 1)
    table = in_full(few)
    add_normal(KeyStream.from_seed(1, "test"), table, 0.3, threads=1)
    add_normal(KeyStream.from_seed(1, "test"), few, 0.3, threads=threads)
    assert torch.equal(few.out, table.float())


def test_draws_that_are_settled_afterwards_are_added_to_the_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of them are unsettled here, and their sums are looked up again."""
    few = few_rows(300, 7, 0.5, torch.float32, 2)
    table = in_full(few)
    monkeypatch.setattr(ziggurat, "STEP_AND_INNER", ziggurat.STEP_AND_INNER * [1.0, 0.5])
    monkeypatch.setattr(ziggurat, "INNER", ziggurat.INNER * 0.5)
    add_normal(KeyStream.from_seed(1, "test"), table, 0.3)
    add_normal(KeyStream.from_seed(1, "test"), few, 0.3)
    assert torch.equal(few.out, table.float())


def test_without_noise_the_sums_are_written() -> None:
    few, plain = few_rows(50, 4, 0.3, torch.float32, 3), torch.ones(3)
    assert torch.equal(write_out([plain, few])[1], in_full(few).float())
    few.out.fill_(torch.nan)
    add_normal(KeyStream(), [plain, few], 0.0)
    assert torch.equal(few.out, in_full(few).float())
    assert torch.equal(plain, torch.ones(3))


@given(start=st.integers(0, 120), stop=st.integers(0, 120), again=st.integers(0, 60))
def test_a_stretch_holds_what_the_table_does(start: int, stop: int, again: int) -> None:
    few = few_rows(24, 5, 0.4, torch.float64, 4)
    table = in_full(few)
    stop = max(start, stop)
    stretch, part = few[start:stop][again:], table[start:stop][again:]
    assert torch.equal(stretch.dense(), part)
    index = torch.arange(len(part))[::3]
    assert torch.equal(stretch.index_select(0, index), part[index])
