"""The paper's example of the bias of clipping, and the comparison's parts."""

import csv
import math
from pathlib import Path

import pytest

from dpoptim.reproduce import dice_table
from dpoptim.reproduce.dice_bias import bias_of_clipping


def test_clipping_is_biased_and_error_feedback_is_not(tmp_path: Path) -> None:
    endings = {ending.method: ending for ending in bias_of_clipping(tmp_path, clip_norms=(0.5,), passes=400)}
    assert endings["clipped"].x == pytest.approx(-0.75, abs=0.01)
    for name in ("DiceSGD, R infinite", "DiceSGD, R finite"):
        assert endings[name].x == pytest.approx(0, abs=0.01)
    assert -0.75 < endings["DiceSGD, with resets"].x < -0.1  # part of the bias stays
    with (tmp_path / "dice_bias.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 4
    assert (tmp_path / "dice_bias.png").stat().st_size > 1000


def test_the_comparison_promises_what_its_rows_say() -> None:
    for name, plan in dice_table.candidates(5000, 2.0, (1, 2), (100,), (1.0,)):
        row = dice_table.row(name, plan, 2.0, 1.0, [0.5, 0.6])
        assert row.accuracy == pytest.approx(0.55)
        assert row.noise > 0
        assert not math.isnan(row.standard_deviation)
        assert plan.neighboring == "zero-out"
        if name == dice_table.PUBLISHED:
            assert plan.guarantee.status != "proven"
            assert row.proven_epsilon > 3 * row.epsilon
        else:
            assert plan.guarantee.status == "proven"
            assert 0.98 * row.epsilon <= row.proven_epsilon <= row.epsilon
