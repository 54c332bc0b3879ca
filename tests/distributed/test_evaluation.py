"""Scores on private records in several processes: those of one process, charged once."""

from pathlib import Path

import numpy as np
import pytest

import evaluation_work as work
from ranks import run_ranks


@pytest.mark.set_aside("DistributedDataParallel", "bare")
@pytest.mark.parametrize("way", ["bare", "DistributedDataParallel", "fully_shard"])
def test_all_ranks_get_what_one_process_would_release(way: str, tmp_path: Path) -> None:
    (alone,) = run_ranks(1, work.scored, "bare", str(tmp_path / "alone.sqlite"))
    found = run_ranks(2, work.scored, way, str(tmp_path / "ledger.sqlite"))
    assert alone["entries"] == ["training run", "evaluation", "evaluation"]
    assert [each.pop("of others") for each in found] == [1, 0]  # on rank 0's ledger
    for each in found:
        assert "BudgetExceeded" in each.pop("refused")
        for mine, one in zip(each.pop("scores"), alone["scores"], strict=True):
            assert np.array_equal(mine, one)
        assert all(each[name] == alone[name] for name in each)


def test_runs_in_groups_of_ranks_score_each_by_itself(tmp_path: Path) -> None:
    """Also those without rank 0; nothing has been trained, so the scores are the same."""
    first, *others = run_ranks(3, work.in_groups, str(tmp_path))
    for each in (first, *others):
        assert each["entries"] == ["evaluation"]  # the run has released nothing
        assert np.array_equal(each["scores"], first["scores"])


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        ("others", "rank 1 would not go on with the same hold_out", "same hold_out as rank 0"),
        ("a failure", "rank 1 left it with an error", "RuntimeError: mat1 and mat2"),
        ("none", "rank 1 left the run", "rank 0 calls private.evaluate (step 1)"),
    ],
)
def test_a_rank_that_does_not_score_the_same_is_named(how: str, first: str, second: str) -> None:
    said = run_ranks(2, work.mistaken, how)
    assert first in said[0]
    assert second in said[1]
    assert not any(str(number) in text for text in said for number in (50, 51))
