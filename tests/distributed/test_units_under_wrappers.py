"""One record, with several rows or not, or one person: what they move in wrapped models."""

import pytest
import torch

import units_work as work
from ranks import run_ranks

# replacing an enormous record by its opposite moves a sum by two clip norms at most, rounding
# included; saturated neurons and the bias, which it has in both worlds, keep it below
MOST, LEAST = 2 * (1 + 1e-6), 1.7


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.variants)])
def test_whoever_differs_moves_the_sum_of_all_ranks_by_one_bound(size: int) -> None:
    """Under DDP by microbatches, and fully_shard whole; of one data set and of shards."""
    for found in run_ranks(size, work.all_moved, ["DDP", "fully_shard by layers"]):
        assert len(found) == 2 * 6
        for way, moved in found.items():
            assert LEAST < moved <= MOST, way


@pytest.mark.variants
def test_the_sum_is_that_of_one_process() -> None:
    (alone,) = run_ranks(1, work.sums, ["bare"])
    for found in run_ranks(2, work.sums, list(work.WRAPPERS)):
        for way, total in found.items():
            expected = alone[f"bare, {way.split(', ')[1]}"]
            assert float(expected.norm()) > 10
            torch.testing.assert_close(total, expected, rtol=0, atol=1e-5)


def test_a_person_on_two_ranks_is_refused_under_each_wrapper() -> None:
    for found in run_ranks(2, work.refused):
        for wrapper, said in found.items():
            assert said.startswith("RankError: persons: somebody has rows in the shards"), wrapper


@pytest.mark.variants
def test_without_the_check_such_a_person_would_count_twice() -> None:
    for found in run_ranks(2, work.unchecked):
        for wrapper, moved in found.items():
            assert moved > 2 * LEAST, wrapper


def test_shards_whose_first_records_differ_in_form_are_tried_alike() -> None:
    ((_, expected),) = run_ranks(1, work.of_unequal_shards, group=False)
    (basis, one), (same, other) = run_ranks(2, work.of_unequal_shards)
    assert basis == same
    assert torch.equal(one, other)
    torch.testing.assert_close(one, expected, rtol=0, atol=1e-6)


def test_ranks_that_go_by_their_own_first_records_find_other_ways() -> None:
    """Where there is no other way, because records cannot be sent, they are refused together."""
    for found in (run_ranks(2, work.by_own_rows), run_ranks(2, work.that_cannot_be_sent)):
        assert found[0] == found[1]
        assert "rank 1 would not go on with the same isolation as rank 0" in found[0]
