"""A slice of ``make torture``, and what shows that its trials can fail."""

import time
from pathlib import Path

import pytest

from torture import data_files, full_disk, kills, memory, mutations, targets  # noqa: F401 (two register)
from torture.mutations import TARGETS, Target
from torture.outcomes import Outcomes


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_damaged_files(name: str, tmp_path: Path) -> None:
    outcomes = mutations.trial(name, tmp_path, seed=1, attempts=100)
    assert outcomes.wrong == []
    assert sum(outcomes.counts.values()) == 100


@pytest.mark.variants
@pytest.mark.slow
def test_kills(tmp_path: Path) -> None:
    outcomes = kills.trial(tmp_path, seed=1, kills=24)
    assert outcomes.wrong == []
    assert outcomes.counts["killed"] > 8
    assert outcomes.counts["releases seen"] > 20


@pytest.mark.slow
def test_exhausted_memory(tmp_path: Path) -> None:
    outcomes = memory.trial(tmp_path, seed=1, every=25)
    assert outcomes.wrong == []
    assert outcomes.counts["gone on to the end"] > 5


@pytest.mark.slow
def test_full_disks(tmp_path: Path) -> None:
    outcomes = full_disk.trial(tmp_path, seed=1, up_to=24)
    assert outcomes.wrong == []
    assert outcomes.counts["clear errors"] > 7


def outcome_of(folder: Path, monkeypatch: pytest.MonkeyPatch, read: object) -> Outcomes:
    def make(place: Path) -> Path:
        (place / "file").write_bytes(b"all of this means something " * 20)
        return place / "file"

    monkeypatch.setitem(TARGETS, "careless file", Target(make, read))  # type: ignore[arg-type]
    return mutations.trial("careless file", folder, seed=0, attempts=40)


def test_a_careless_reader_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = outcome_of(tmp_path, monkeypatch, lambda path: path.read_bytes())
    assert outcomes.counts["silently changed"] > 30
    assert "WRONG" in str(outcomes)
    outcomes = outcome_of(
        tmp_path, monkeypatch, lambda path: path.read_text("ascii").index("all of this")
    )
    assert outcomes.counts["tracebacks"] > 0


def test_a_reader_that_hangs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torture.outcomes.PATIENCE", 1)
    calls: list[Path] = []

    def read(path: Path) -> int:
        calls.append(path)
        if len(calls) == 3:
            time.sleep(30)
        return 0

    assert outcome_of(tmp_path, monkeypatch, read).counts["hangs"] == 1
