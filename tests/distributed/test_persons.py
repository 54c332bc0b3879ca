"""Persons with several rows, in several processes: each counts once, in one of them."""

import pytest

import persons_work as work
from ranks import run_ranks

# replacing all that a person has moves a sum by two clip norms at most, rounding included
MOST = 2 * (1 + 1e-6)


@pytest.mark.set_aside("3")
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_person_moves_the_sum_of_all_ranks_by_one_bound(size: int) -> None:
    """Whether every rank has everybody's rows, or those of some; as in one process."""
    for found in run_ranks(size, work.differences):
        for way, moved in found.items():
            assert 0.9 * MOST < moved <= MOST, way


def test_persons_of_two_shards_are_refused_on_all_ranks_and_by_name() -> None:
    first, second = run_ranks(2, work.refused)
    for way in work.WAYS:
        case = f"{way} split"
        assert first[case] == second[case]
        assert first[case].startswith("RankError: persons: somebody has rows in the shards of two")
        assert "zlib.crc32(name) % world_size" in first[case]
    for case in (
        "names and numbers in shards",
        "other owners",
        "other owners in a network",
        "persons on one rank",
    ):
        assert "rank 1 would not go on with the same persons as" in first[case], case
        assert second[case] == first[case]


def test_without_the_check_a_person_would_count_twice() -> None:
    """The measurement above finds the bug that it looks for."""
    for found in run_ranks(2, work.unchecked):
        for way, moved in found.items():
            assert moved > 1.8 * MOST, way
