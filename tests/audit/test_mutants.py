"""Every seeded bug is caught by the detector that is named for it; the library as it is passes all
detectors.

False alarms: a right implementation is refuted by each statistical detector with probability at
most 1e-6 (`detectors.FAILURE`), or that for each audit that it names, so by the set with at most
1.5e-5; the others are exact. Seeds are fixed, so a result repeats.
"""

from pathlib import Path

import pytest

from dpoptim.audit import DETECTORS, banded, method_detectors, min_separation, solvers
from dpoptim.audit.method_detectors import named_audits
from mutants.mutants import MUTANTS, Mutant, catch, mutant_table

# the others take audits by their names, which test_named_audits.py runs with as many trials
OWN = [name for name, detect in DETECTORS.items() if getattr(detect, "func", None) != named_audits]


@pytest.fixture(autouse=True)
def _few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds err to the safe side by a little more then, and bugs are still beyond them."""
    monkeypatch.setattr(min_separation, "SIMULATED", 1 << 15)
    monkeypatch.setattr(banded, "SIMULATED", 1 << 17)
    monkeypatch.setattr(solvers, "FEWEST_RUNS", 300)


@pytest.mark.parametrize("name", OWN)
def test_the_library_passes(name: str) -> None:
    assert len(OWN) > 15
    assert DETECTORS[name]() == ""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """By audits of 8,000 trials, all the more where 3,000 show it."""
    if mutant.detector not in ("balls in bins", "b-min-sep"):
        monkeypatch.setattr(method_detectors, "TRIALS", 3000)
    result = catch(mutant)
    assert result.caught
    assert "refuted" in result.evidence


def test_mutants_leave_nothing_behind() -> None:
    """After all of them, in one process, the library still passes."""
    for mutant in MUTANTS:
        with mutant.apply():
            pass
    for name in ("two worlds, replace-one", "charging", "refusals", "replay"):
        assert DETECTORS[name]() == ""


def test_the_table_names_real_detectors() -> None:
    table = mutant_table()
    assert len(table) >= 25
    assert len({row["mutant"] for row in table}) == len(table)
    assert {row["detector"] for row in table} == set(DETECTORS)  # none is idle


def test_the_documents_list_every_mutant() -> None:
    rows = [f"| {r['mutant']} | `{r['where']}` | {r['detector']} |" for r in mutant_table()]
    page = (Path(__file__).parents[2] / "docs/audit.md").read_text()
    listed = page[page.index("| bug | where it is put") :].split("\n\n")[0].splitlines()[2:]
    assert [line for line in listed if line] == rows
