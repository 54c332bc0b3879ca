"""Embedding bags, tables used several times, tied heads: right, and never a table per record."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpoptim
from dpoptim.clipping import Clipping
from dpoptim.errors import PrivacyError
from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.arithmetic.products import consecutive_groups
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.per_sample.lazy import Lazy
from dpoptim.gradients.per_sample.sequence_outer import SequenceOuter
from dpoptim.gradients.per_sample.sparse import Pairs, Rows, SparseOuter, distinct_and_zeros
from dpoptim.gradients.per_sample.tied import TiedHead, merge
from support import loss_of_outputs, mismatch

ROWS, T, V, D = 7, 5, 9, 4


class Bags(nn.Module):
    """A bag of embeddings and a head; ``twice``: the same table for two features."""

    def __init__(self, mode: str, form: str, *, twice: bool = False, **options: Any) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(V, D, mode=mode, **options), nn.Linear(D, 3)
        self.form, self.twice = form, twice

    def look_up(self, x: Tensor, lengths: Tensor, weights: Tensor) -> Tensor:
        weights = weights if self.form == "weighted" else None
        if self.form != "offsets":
            return self.bag(x, per_sample_weights=weights)
        valid = torch.arange(T) < lengths[:, None]
        starts = F.pad(lengths.cumsum(0), (1, 0))
        return self.bag(x[valid], starts if self.bag.include_last_offset else starts[:-1])

    def forward(self, x: Tensor, lengths: Tensor, weights: Tensor) -> Tensor:
        out = self.look_up(x, lengths, weights)
        return self.head(
            torch.tanh(out + self.look_up(x.flip(1), lengths, weights) if self.twice else out)
        )


def batch(dtype: torch.dtype) -> tuple[Tensor, ...]:
    lengths = torch.tensor([5, 3, 0, 1, 5, 4, 2])
    return (
        torch.randint(0, V, (ROWS, T)),
        lengths,
        torch.rand(ROWS, T, dtype=dtype) - 0.3,
        torch.randn(ROWS, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize(
    ("mode", "form", "options"),
    [
        ("sum", "square", {}),
        ("mean", "square", {}),
        ("max", "square", {}),
        ("sum", "weighted", {}),
        ("sum", "offsets", {}),
        ("mean", "offsets", {"padding_idx": 2}),
        ("max", "offsets", {"padding_idx": 2}),
        ("sum", "offsets", {"include_last_offset": True}),
        ("mean", "square", {"include_last_offset": True, "padding_idx": 0}),
    ],
)
def test_embedding_bags(
    mode: str, form: str, options: dict[str, Any], twice: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = Bags(mode, form, twice=twice, **options).to(dtype)
    assert mismatch(model, batch(dtype)) < (3e-5 if dtype == torch.float32 else 1e-7)


def test_a_large_table_is_never_held_per_record() -> None:
    """64 records x a million rows would take 4 GiB; the sum touches only what was looked up."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(10**6, 16, mode="mean"), nn.Linear(16, 2))
    x = torch.randint(0, 10**6, (64, 20))
    engine = Engine(model, Clipping(0.1), capacity=64)
    engine.attach()
    engine.begin_microbatch(64)
    model(x).sum(1).mean().backward()
    entry = SparseOuter.of(
        torch.tensor([0, 0]),
        torch.tensor([10**6 - 1] * 2),
        torch.ones(2),
        torch.ones(64, 16),
        10**6,
    )
    assert entry.weight.tolist() == [2.0]
    touched = engine.split(engine.take())[0].abs().sum(1).nonzero().flatten()
    assert set(touched.tolist()) == set(x.flatten().tolist())


@pytest.mark.parametrize(
    "option", [{"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}]
)
def test_options_that_cannot_be_clipped(option: dict[str, Any]) -> None:
    with pytest.raises(PrivacyError, match=next(iter(option))):
        Engine(nn.Sequential(nn.EmbeddingBag(V, D, **option)), Clipping(1.0), capacity=3).attach()


def test_trained_weights_of_lookups_are_refused() -> None:
    model = Bags("sum", "weighted")
    engine = Engine(model, Clipping(1.0), capacity=ROWS)
    engine.attach()
    x, lengths, weights, _ = batch(torch.float32)
    with pytest.raises(PrivacyError, match="per_sample_weights that are trained"):
        model(x, lengths, weights.requires_grad_())


def test_check_passes_bags() -> None:
    torch.manual_seed(0)
    assert dpoptim.check(
        Bags("mean", "square"), loss_of_outputs, batch(torch.float32)
    ).loss_reduction == ("mean")


# ---- several per_sample_grads to one table ------------------------------------------------------


def tied_uses(dtype: torch.dtype) -> tuple[SequenceOuter, Rows]:
    torch.manual_seed(0)
    head = SequenceOuter(torch.randn(ROWS, T, V, dtype=dtype), torch.randn(ROWS, T, D, dtype=dtype))
    return head, Rows(torch.randint(0, V, (ROWS, 6)), torch.randn(ROWS, 6, D, dtype=dtype), V)


@pytest.mark.parametrize("ghost_norms", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_a_tied_head_counts_its_cross_terms(dtype: torch.dtype, ghost_norms: bool) -> None:
    head, rows = tied_uses(dtype)
    gradients = (head.materialise(slice(0, ROWS)) + rows.materialise(slice(0, ROWS))).double()
    merged = merge([rows, replace(head, ghost_norms=ghost_norms)], ROWS, V * D)
    assert isinstance(merged, TiedHead)
    groups = consecutive_groups(ROWS)
    squared = merged.squared_norms(groups)
    torch.testing.assert_close(squared, gradients.square().sum(1), rtol=1e-4, atol=1e-4)
    keep = torch.arange(ROWS) != 3
    weights = torch.linspace(0.5, 2, ROWS, dtype=torch.float64) * keep
    total = Sums([V * D])
    merged.without(keep).add_weighted_sums(total, weights[None], groups)
    torch.testing.assert_close(total.settle()[0], weights @ gradients, rtol=1e-4, atol=1e-4)


def test_a_claim_that_errs_cannot_break_the_bound() -> None:
    """Head and lookup cancel almost: what the Gram form makes of it is rounding, and the sum keeps
    to it.
    """
    torch.manual_seed(0)
    a, g = 1e3 * torch.randn(ROWS, T, D), torch.zeros(ROWS, T, V)
    index = torch.arange(T).expand(ROWS, T)
    g.scatter_(2, index[:, :, None], 1.0)
    rows = Rows(index, -a + 1e-3 * torch.randn(ROWS, T, D), V)
    merged = merge([SequenceOuter(g, a, ghost_norms=True), rows], ROWS, V * D)
    groups = consecutive_groups(1)
    for i in range(ROWS):
        alone = merge(
            [
                SequenceOuter(g[i : i + 1], a[i : i + 1], ghost_norms=True),
                Rows(index[:1], rows.g[i : i + 1], V),
            ],
            1,
            V * D,
        )
        claimed = float(alone.squared_norms(groups)) ** 0.5
        total = Sums([V * D])
        alone.add_weighted_sums(total, torch.ones(1, 1, dtype=torch.float64), groups)
        assert float(total.settle()[0].norm()) <= claimed * (1 + 1e-6)
    assert isinstance(merged, TiedHead)


def test_joined_tables_are_the_sum_of_their_gradients() -> None:
    torch.manual_seed(0)
    rows = Rows(torch.randint(0, V, (ROWS, 6)), torch.randn(ROWS, 6, D), V)
    record, row = torch.randint(0, ROWS, (20,)), torch.randint(0, V, (20,))
    outer = SparseOuter.of(record, row, torch.rand(20), torch.randn(ROWS, D), V)
    for uses in ([rows, outer], [outer, outer], [rows, rows], [rows, outer, outer.pairs()]):
        merged = merge(uses, ROWS, V * D)
        assert isinstance(merged, Rows | Pairs)
        truth = torch.stack([use.materialise(slice(0, ROWS)) for use in uses]).sum(0)
        torch.testing.assert_close(merged.materialise(slice(0, ROWS)), truth)
        torch.testing.assert_close(merged.materialise(slice(2, 5)), truth[2:5])
        groups = consecutive_groups(ROWS)
        torch.testing.assert_close(
            merged.squared_norms(groups), truth.double().square().sum(1), rtol=1e-5, atol=1e-5
        )
        keep = torch.arange(ROWS) != 3
        weights = torch.rand(ROWS, dtype=torch.float64) * keep
        total = Sums([V * D])
        merged.without(keep).add_weighted_sums(total, weights[None], groups)
        torch.testing.assert_close(
            total.settle()[0], weights @ truth.double(), rtol=1e-5, atol=1e-5
        )


def test_a_table_that_is_also_multiplied_by_single_positions() -> None:
    """Outer products and lookups: formed block by block."""
    head, rows = tied_uses(torch.float64)
    merged = merge(
        [rows, SequenceOuter(head.g, head.a), SequenceOuter(head.g, head.a)], ROWS, V * D
    )
    assert isinstance(merged, Lazy)
    truth = rows.materialise(slice(0, ROWS)) + 2 * head.materialise(slice(0, ROWS))
    torch.testing.assert_close(merged.materialise(slice(0, ROWS)), truth)


@pytest.mark.parametrize("numbers", [[], [3], [5, 2, 5, 5, 0, 2, 9], [0, 0], [4, 4, 4]])
def test_lookups_are_merged_without_knowing_how_many_differ(numbers: list[int]) -> None:
    given = torch.tensor(numbers, dtype=torch.int64)
    exact, inverse = torch.unique(given, return_inverse=True)
    found, place = distinct_and_zeros(given)
    assert torch.equal(place, inverse)
    assert torch.equal(found[: len(exact)], exact)
    assert len(found) == len(given)
    assert not found[len(exact) :].any()
