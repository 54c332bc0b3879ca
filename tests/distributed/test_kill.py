"""A rank killed at any moment: the ledger never shows less than was released, survivors end in
time, the run goes on.

``PYTHONPATH=src:tests python tests/distributed/test_kill.py 50`` makes as many trials.
"""

import random
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import distributed_work as work
import dpoptim
from ranks import run_ranks


def trial(number: int, folder: Path) -> str:
    """One run of three ranks, killed somewhere in or after a random step; returns what happened,
    for people.
    """
    chance = random.Random(number)
    path, victim = str(folder / f"run{number}"), chance.randrange(3)
    # Whoever does not end within its limit fails there.
    step, seconds = chance.choice([0, 1, 2, 4, 5, 6, 7, 8, 11, 14]), chance.random() * 0.2
    heard = run_ranks(3, work.until_killed, path, victim, step, seconds)
    assert heard[victim] == "died"
    for rank, error in enumerate(heard):
        if rank == victim:
            continue
        assert error.startswith("RankError: ")
        (named,) = re.findall(r"ranks? ([\d, ]+) gave no sign of life", error)
        assert str(victim) in named.split(", ")
    logs = [log.read_text().split() for log in folder.glob(f"run{number}.released.*")]
    released = {reservation for log in logs for reservation in log}
    steps = max(map(len, logs), default=0)
    assert len(released) <= 1  # one charge, not one a rank
    if not Path(path + ".ledger").exists():
        assert not released
        return f"killed rank {victim} before there was a ledger"
    with dpoptim.Ledger(path + ".ledger") as ledger:
        entries = ledger.entries()
        assert len(entries) <= 1
        assert released <= {entry.id for entry in entries if entry.begun >= steps}
    if not Path(path).exists():
        return f"killed rank {victim} after {steps} steps, before a checkpoint"
    size = 1 + number % 3
    done = run_ranks(size, work.goes_on, path) if size > 1 else [work.goes_on(0, path)]
    assert done == [(3, entries[0].id)] * size
    return f"killed rank {victim} after {steps} steps, went on in {size}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [0, *(pytest.param(n, marks=pytest.mark.variants) for n in (1, 2))]
)
def test_a_rank_killed_at_any_moment(number: int, tmp_path: Path) -> None:
    trial(number, tmp_path)


if __name__ == "__main__":
    with TemporaryDirectory() as place:
        for number in range(int(sys.argv[1])):
            print(number, trial(number, Path(place)), flush=True)
