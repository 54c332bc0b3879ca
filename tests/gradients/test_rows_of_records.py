"""Records of several rows: their gradients are sums over rows, clipped once, in every layer and by
every formula.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.gradients import choose_formula as choose_formula_module
from dpoptim.gradients.choose_formula import PublicSizes
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.per_sample.sequence_outer import SequenceOuter
from dpoptim.gradients.rows_of_records import RowsOfRecords
from support import (
    CASES,
    WITHOUT_ORACLE,
    Case,
    clipped,
    joint_norm,
    pairs,
    record_loss,
    reduced,
    vmap_gradients,
)

RECORDS, K = 4, 3
WAYS = ["as chosen", "one by one", "claimed", "not kept"]


def by_rows(
    model: nn.Module,
    x: Tensor,
    target: Tensor,
    clipping: Clipping,
    rows: RowsOfRecords,
    *,
    reduction: str = "mean",
    present: Tensor | None = None,
    positions: dict[str, int] | None = None,
) -> list[Tensor]:
    """The engine's sums for a batch of rows, of one pass."""
    records = len(x) // rows.per_record
    engine = Engine(
        model, clipping, capacity=records, reduction=reduction, rows=rows, positions=positions
    )
    engine.attach()
    try:
        engine.begin_microbatch(records, present=present)
        reduced(record_loss(model(x), target), reduction).backward()
        return engine.split(engine.take())
    finally:
        engine.detach()


def of_records(
    gradients: list[Tensor], reduction: str, present: Tensor | None = None
) -> list[Tensor]:
    """The oracle's gradients of records, from those of rows."""
    there = torch.ones(len(gradients[0]) // K, K, dtype=torch.bool) if present is None else present
    summed = [
        (g.unflatten(0, (-1, K)) * there.view(-1, K, *[1] * (g.dim() - 1))).sum(1)
        for g in gradients
    ]
    if reduction == "sum":
        return summed
    return [g / there.sum(1).view(-1, *[1] * (g.dim() - 1)) for g in summed]


def median_norm(gradients: list[Tensor]) -> float:
    return float(
        torch.stack([g.reshape(len(g), -1).square().sum(1) for g in gradients])
        .sum(0)
        .sqrt()
        .median()
    )


def measured(way: str, patch: pytest.MonkeyPatch) -> None:
    """Have every gradient measured in this way, where it can be."""
    if way == "as chosen":
        return
    if way == "not kept":
        patch.setattr("dpoptim.gradients.per_sample.lazy.may_keep", lambda most, entries: False)
        patch.setattr(
            "dpoptim.gradients.per_sample.sequence_outer.may_keep", lambda most, entries: False
        )
        return
    for name in ("KEPT_GRADIENTS", "FEW_POSITIONS", "WORTH_A_CALL", "LARGE_KERNEL"):
        patch.setattr(
            choose_formula_module,
            name,
            -1 if way == "one by one" or name == "KEPT_GRADIENTS" else math.inf,
        )
    honest = SequenceOuter.chosen

    def chosen(grad: SequenceOuter, public: PublicSizes) -> SequenceOuter:
        grad = honest(grad, public._replace(positions=public.positions or K))
        return replace(grad, ghost_norms=grad.ghost_norms or way == "claimed")

    patch.setattr(SequenceOuter, "chosen", chosen)


REDUCTIONS = [("mean", "mean"), ("sum", "mean"), ("mean", "sum")]  # of the loss, of rows


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("case", "way", "reductions"), pairs(CASES, WAYS, REDUCTIONS), ids=str)
def test_equals_the_oracle(
    case: Case, way: str, reductions: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = case.build()
    x, target = case.inputs(RECORDS * K, torch.float32)
    measured(way, monkeypatch)
    reduction, of_rows = reductions
    truth = of_records(vmap_gradients(model, x, target), of_rows)
    clipping = Clipping(median_norm(truth))
    expected = clipped(truth, clipping, RECORDS, reduction)
    sums = by_rows(model, x, target, clipping, RowsOfRecords(K, of_rows), reduction=reduction)
    assert joint_norm([a - b for a, b in zip(sums, expected, strict=True)]) <= 3e-5 * joint_norm(
        expected
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.thinned(3)
def test_rows_that_are_not_there_count_as_zero(
    case: Case, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    model = case.build()
    x, target = case.inputs(RECORDS * K, torch.float32)
    measured(way, monkeypatch)
    present = torch.tensor(
        [[True, True, True], [True, False, False], [True, False, True], [True, True, False]]
    )
    truth = of_records(vmap_gradients(model, x, target), "mean", present)
    clipping = Clipping(median_norm(truth))
    expected = clipped(truth, clipping, RECORDS, "sum")
    others = target.clone()
    others[~present.reshape(-1)] = 1e6  # whatever they hold
    sums = by_rows(model, x, others, clipping, RowsOfRecords(K), reduction="sum", present=present)
    assert joint_norm([a - b for a, b in zip(sums, expected, strict=True)]) <= 3e-5 * joint_norm(
        expected
    )


@pytest.mark.parametrize("case", WITHOUT_ORACLE, ids=lambda case: case.name)
def test_cases_without_an_oracle_equal_their_rows_differentiated_alone(case: Case) -> None:
    torch.manual_seed(0)
    model = case.build()
    x, target = case.inputs(RECORDS * K, torch.float32)
    parameters = list(model.parameters())
    alone = [
        torch.autograd.grad(record_loss(model(x[i : i + 1]), target[i : i + 1]).sum(), parameters)
        for i in range(len(x))
    ]
    truth = of_records([torch.stack(column) for column in zip(*alone, strict=True)], "mean")
    clipping = Clipping(median_norm(truth))
    sums = by_rows(model, x, target, clipping, RowsOfRecords(K))
    expected = clipped(truth, clipping, RECORDS)
    assert joint_norm([a - b for a, b in zip(sums, expected, strict=True)]) <= 3e-5 * joint_norm(
        expected
    )
