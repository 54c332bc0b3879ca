"""Tries to falsify that a record moves the sum by at most C with *all* its rows, whatever these
hold.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from dpoptim.clipping import Clipping
from dpoptim.gradients import choose_formula as choose_formula_module
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.rows_of_records import RowsOfRecords
from support import CASES, WITHOUT_ORACLE, Case, joint_norm, record_loss

RECORDS, K = 5, 3
FLOAT_CASES = [case for case in CASES + WITHOUT_ORACLE if not case.integers]


def poison(x: torch.Tensor, how: str) -> torch.Tensor:
    """Make the K rows of one record adversarial."""
    x = x.clone()
    if how == "cancel":
        x[1] = -x[0]
    elif how == "agree":
        x[:] = 1e3 * x[0]
    elif how == "huge":
        x *= 1e20
    elif how == "one nan":
        x[-1].view(-1)[0] = torch.nan
    elif how == "one inf":
        x[0].view(-1)[-1] = torch.inf
    elif how == "steep":
        x *= 1e4
        x[1] = -x[0] * (1 + 1e-6)
    return x


def sums(
    model: nn.Module,
    x: torch.Tensor,
    target: torch.Tensor,
    rows: RowsOfRecords,
    bound: float,
    present: torch.Tensor,
):
    engine = Engine(model, Clipping(bound), capacity=RECORDS, reduction="sum", rows=rows)
    engine.attach()
    try:
        engine.begin_microbatch(len(x) // K, present=present)
        record_loss(model(x), target).sum().backward()
        return engine.split(engine.take())
    finally:
        engine.detach()


@pytest.mark.one_in(3)
@settings(
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    how=st.sampled_from(["plain", "cancel", "agree", "huge", "one nan", "one inf", "steep"]),
    seed=st.integers(0, 1000),
    exponent=st.integers(-3, 3),
    reduction=st.sampled_from(["mean", "sum"]),
    removed=st.integers(0, RECORDS - 1),
    singly=st.booleans(),
)
@pytest.mark.parametrize("case", FLOAT_CASES, ids=lambda case: case.name)
def test_removing_a_record_of_adversarial_rows(
    case: Case, how: str, seed: int, exponent: int, reduction: str, removed: int, singly: bool
) -> None:
    torch.manual_seed(seed)
    model, bound = case.build(), 10.0**exponent
    x, target = case.inputs(RECORDS * K, torch.float32)
    own = slice(K * removed, K * (removed + 1))
    x[own] = poison(x[own], how)
    present = torch.rand(RECORDS, K) < 0.7
    present[:, 0] = True
    keep = torch.ones(RECORDS, dtype=torch.bool)
    keep[removed] = False
    rows = keep.repeat_interleave(K)
    with pytest.MonkeyPatch.context() as patch:
        if singly:
            for name in ("KEPT_GRADIENTS", "FEW_POSITIONS", "WORTH_A_CALL", "LARGE_KERNEL"):
                patch.setattr(choose_formula_module, name, -1)
        whole = sums(model, x, target, RowsOfRecords(K, reduction), bound, present)
        without = sums(
            model, x[rows], target[rows], RowsOfRecords(K, reduction), bound, present[keep]
        )
    assert all(torch.isfinite(s).all() for s in whole)
    assert joint_norm([a - b for a, b in zip(whole, without, strict=True)]) <= bound


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", FLOAT_CASES, ids=lambda case: case.name)
def test_what_fills_a_record_up_is_not_seen(case: Case) -> None:
    """To the last bit: rows that are not there may be anything, also not finite."""
    torch.manual_seed(0)
    model = case.build()
    x, target = case.inputs(RECORDS * K, torch.float32)
    present = torch.ones(RECORDS, K, dtype=torch.bool)
    present[1, 1:] = present[3, 2:] = False
    found = []
    for target_of_absent in (0.0, 1e9, torch.nan):
        target[~present.reshape(-1)] = target_of_absent
        found.append([s.clone() for s in sums(model, x, target, RowsOfRecords(K), 0.1, present)])
    assert all(
        torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)
    )
