"""A run that was saved by some number of processes goes on in any other."""

from pathlib import Path

import pytest
import torch

import distributed_work as work
import dpoptim
from ranks import run_ranks

# several processes each, seconds of all cores
pytestmark = pytest.mark.slow


@pytest.mark.set_aside("flat", "dice")
@pytest.mark.parametrize(
    "method",
    [
        *("flat", "dice", "ftrl, b-min-sep"),
        *(pytest.param(name, marks=pytest.mark.variants) for name in ("quantile along", "scaled")),
    ],
)
def test_without_noise_the_run_goes_on_alike_in_1_2_and_3_processes(
    method: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "run")
    run_ranks(3, work.saved_part, method, path, 0.0)
    alone = work.resumed_part(0, method, path, 0.0, str(tmp_path / "again-1"))
    for size in (2, 3):
        for result in run_ranks(
            size, work.resumed_part, method, path, 0.0, str(tmp_path / f"again-{size}")
        ):
            assert result["steps"] == 8
            assert (result["parameters"] - alone["parameters"]).abs().max() < 1e-12


@pytest.mark.set_aside("quantile first", "dice")
@pytest.mark.parametrize("method", ["dice", "ftrl", "quantile first"])
def test_what_ranks_keep_in_parts_is_whole_in_the_file(method: str, tmp_path: Path) -> None:
    """Saved by two, taken up and saved by three: the same noise to take back, error, batches
    ahead, and reservation.
    """
    path, again = str(tmp_path / "run"), str(tmp_path / "again")
    reservations = set(run_ranks(2, work.saved_part, method, path, 0.5))
    results = run_ranks(3, work.resumed_part, method, path, 0.5, again)
    assert {result["reservation"] for result in results} == reservations
    first, second = (work.as_lists(work.with_whole_tensors(file)) for file in (path, again))
    assert first.pop("identity") == second.pop("identity")
    assert len(first.pop("streams")) == 2  # of a seeded run; three have others
    assert len(second.pop("streams")) == 3
    assert first == second
    with dpoptim.Ledger(path + ".ledger") as ledger:
        (entry,) = ledger.entries()
        assert (entry.state, entry.resumed) == ("committed", 1)


def test_programs_that_save_in_one_folder_take_turns(tmp_path: Path) -> None:
    """Else one would remove the files that another's checkpoint is about to name."""
    first, second = run_ranks(2, work.turns_of_a_save, str(tmp_path / "run"))
    assert first == [False, True, True, False]
    assert second[0] is second[-1] is False


@pytest.mark.slow
def test_runs_on_shards_go_on_where_their_records_are(tmp_path: Path) -> None:
    """At sampling rate 1 nothing is drawn ahead: any processes go on, alike. Batches drawn ahead,
    and orders of records, go on where the same records are, and are refused elsewhere.
    """
    path = str(tmp_path / "run")
    run_ranks(2, work.part_in_shards, [20, 9], "flat", path, True)
    expected = work.part_in_shards(0, [29], "flat", path, False)
    for sizes in ([20, 9], [5, 20, 4]):
        for result in run_ranks(len(sizes), work.shards_go_on, sizes, "flat", path):
            assert (result - expected).abs().max() < 1e-12
    for method, ahead in (("flat", 3), ("dice", 0)):
        run_ranks(2, work.part_in_shards, [20, 10], method, path, True, ahead)
        for result in run_ranks(2, work.shards_go_on, [20, 10], method, path):
            assert isinstance(result, torch.Tensor)
        for sizes in ([10, 20], [10, 10, 10]):
            for result in run_ranks(len(sizes), work.shards_go_on, sizes, method, path):
                assert "spread over the processes in another way" in result
