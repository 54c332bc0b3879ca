"""A run that was saved by some number of processes goes on in any other."""

from pathlib import Path

import pytest

import distributed_work as work
import dpoptim
from dpoptim.training.checkpoint import read_checkpoint
from ranks import run_ranks


@pytest.mark.parametrize("method", ["flat", "dice", "quantile along"])
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


@pytest.mark.parametrize("method", ["dice", "ftrl", "quantile first"])
def test_what_ranks_keep_in_parts_is_whole_in_the_file(method: str, tmp_path: Path) -> None:
    """Saved by two, taken up and saved by three: the same noise to take back, error, batches
    ahead, and reservation.
    """
    path, again = str(tmp_path / "run"), str(tmp_path / "again")
    reservations = set(run_ranks(2, work.saved_part, method, path, 0.5))
    results = run_ranks(3, work.resumed_part, method, path, 0.5, again)
    assert {result["reservation"] for result in results} == reservations
    first, second = (work.as_lists(read_checkpoint(Path(file))[0]) for file in (path, again))
    assert first.pop("identity") == second.pop("identity")
    assert first == second
    with dpoptim.Ledger(path + ".ledger") as ledger:
        (entry,) = ledger.entries()
        assert (entry.state, entry.resumed) == ("committed", 1)
