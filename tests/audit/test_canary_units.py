"""Attacks on plans that protect persons: each canary is a person, whose rows are clipped as one.

False alarms: each lower bound is wrong with probability at most 1e-6; seeds are fixed.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from command_work import run
from dpoptim.audit.attack_families import attack
from dpoptim.methods import DPFTRL, DPSGD, DiceSGD, SparseSGD
from dpoptim.plan import Plan
from dpoptim.privacy_unit import Unit
from mutants.mutants import MUTANTS
from patients import SCHEMA, records, write_table

CLIPPED_APART = next(m for m in MUTANTS if m.name == "two rows of a person clipped apart")
SETTINGS: dict[str, Any] = {"n": 600, "delta": 1e-5, "neighboring": "zero-out"}
PLANS = {
    "two worlds": DPSGD(1.0).plan(batch_size=600, steps=4, noise_multiplier=2.0, **SETTINGS),
    "two worlds, added": DPSGD(1.0).plan(
        n=600, batch_size=600, steps=4, noise_multiplier=2.0, delta=1e-5
    ),
    "fixed order": DPFTRL(1.0).plan(batch_size=100, epochs=2, noise_multiplier=1.5, **SETTINGS),
    "by turns": DPFTRL(1.0, sampling="cyclic-poisson", bands=2).plan(
        batch_size=300, steps=6, noise_multiplier=0.9, **SETTINGS
    ),
    "selected rows": SparseSGD(1.0).plan(batch_size=600, steps=4, noise_multiplier=2.0, **SETTINGS),
    "error feedback": DiceSGD(1.0).plan(batch_size=100, epochs=1, noise_multiplier=0.5, **SETTINGS),
}


def of_persons(plan: Plan) -> Plan:
    return replace(plan, unit=Unit("person", 3))


@pytest.mark.parametrize("name", PLANS)
def test_persons_are_attacked_as_records_are(name: str) -> None:
    found = attack(of_persons(PLANS[name]), 8000, 0)
    assert found.claimed == pytest.approx(PLANS[name].guarantee.epsilon, rel=1e-4)
    assert 0.5 * found.claimed <= found.lower_bound <= found.claimed


def test_a_saved_run_is_attacked_for_persons(tmp_path: Path) -> None:
    """As ``dpoptim train`` leaves it, with one row a person and step at most."""
    table, schema, saved = tmp_path / "t.csv", tmp_path / "s.toml", tmp_path / "run"
    write_table(table, records(400, 0))
    schema.write_text(SCHEMA)
    data = ["--data", str(table), "--schema", str(schema), "--records-per-person", "1"]
    options = [
        "--epsilon",
        "4",
        "--delta",
        "1e-5",
        "--n",
        "100",
        "--epochs",
        "2",
        "--records-per-person",
        "1",
    ]
    run("train", *data, *options, "--out", str(saved))
    found = run("audit", "--run", str(saved), "--trials", "2000", "--out", str(tmp_path / "audit"))
    assert "too weak to tell" in found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["two worlds", "fixed order", "error feedback"])
def test_rows_that_are_clipped_apart_are_found(name: str) -> None:
    with CLIPPED_APART.apply():
        found = attack(of_persons(PLANS[name]), 8000, 0)
    assert found.verdict == "refuted"
