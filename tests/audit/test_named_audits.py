"""Every method's audit: consistent, nearly tight, and refuting what is false; and the command that
runs them.

False alarms: each lower bound is wrong with probability at most 1e-6, so the set with at most
2e-5; seeds are fixed.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from command_work import run
from dpoptim.audit import banded, min_separation, solvers
from dpoptim.audit.attack_families import attack, audits, run_audits
from dpoptim.audit.command import chosen, verdict_text
from dpoptim.audit.named_audits import AUDITS
from dpoptim.audit.solvers import adaptive_norms
from dpoptim.documents import with_digest
from dpoptim.methods import DPFTRL, DPSGD, DiceSGD, WholeRun

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SHARE = {  # of the claimed epsilon that `trials_of` certify at least
    "dp-sgd": 0.6,
    "dp-sgd, sampled": 0.55,
    "value-sgd": 0.5,
    "sparse-sgd": 0.6,
    "dp-ftrl, sampled by turns": 0.6,
    "dp-ftrl, every turn": 0.7,  # 4,034 trials could show 0.76 at best
    "dp-ftrl, balls in bins": 0.5,  # 0.86 of 100,000
    "dp-ftrl, b-min-sep": 0.55,  # 0.88 of 100,000
    "dice-sgd": 0.999,
    "adaptive-gd, norms": 0.45,  # 300 runs
    "quantile": 0.99,
    "search": 0.81,  # exact, of the published bound; see docs/audit.md
    "search, order statistics": 0.93,
}


LONG = {"adaptive-gd, norms", "dp-ftrl, balls in bins", "dp-ftrl, b-min-sep"}


def trials_of(name: str) -> int:
    """As many as a seeded bug is found with where each of them takes long; see test_mutants.py."""
    return 3000 if name in LONG else 8000


@pytest.fixture
def _few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds err to the safe side by a little more then."""
    monkeypatch.setattr(min_separation, "SIMULATED", 1 << 15)
    monkeypatch.setattr(banded, "SIMULATED", 1 << 17)
    monkeypatch.setattr(solvers, "FEWEST_RUNS", 300)


# a thousand steps, as test_two_worlds.py and a detector have fewer of
@pytest.mark.set_aside("dp-sgd, sampled")
@pytest.mark.usefixtures("_few_runs")
@pytest.mark.parametrize("name", audits())
def test_the_claim_stands_and_the_attack_is_strong(name: str) -> None:
    (found,) = run_audits([name], trials=trials_of(name))
    assert found.as_expected
    assert found.method == name
    if found.expected == "refuted":
        assert found.lower_bound > 8 * found.claimed
    else:
        assert SHARE.get(name, 0.85) * found.claimed <= found.lower_bound <= found.claimed


def test_the_committed_audits_are_of_every_method_and_nearly_tight() -> None:
    document = json.loads((RESULTS / "audit.json").read_text())
    for found in document["findings"]:
        assert found["verdict"] == found["expected"]
        least = 0.81 if found["method"] == "search" else 0.85
        assert found["lower_bound"] >= least * found["claimed"]
    assert [found["method"] for found in document["findings"]] == list(audits())


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "audit"
    text = run("audit", "dice-sgd as published", "--trials", "500", "--out", str(out))
    assert "refuted" in text
    document = json.loads((out / "audit.json").read_text())
    assert document["findings"][0]["verdict"] == "refuted"
    assert (out / "audit.png").stat().st_size > 1000
    assert chosen("dp-ftrl") == [name for name in AUDITS if name.startswith("dp-ftrl")]
    assert chosen("all") == list(audits())
    assert "method must be 'all' or one of dp-sgd" in run(
        "audit", "dpsgd", "--out", str(out), code=2
    )


@pytest.mark.set_aside("dp-ftrl", "accelerated-srgd")
@pytest.mark.parametrize(
    "method", ["dp-sgd", "dp-ftrl", "dice-sgd", "noisy-gd", "accelerated-srgd"]
)
def test_saved_runs_are_audited(tmp_path: Path, method: str) -> None:
    saved, out = tmp_path / "run", tmp_path / "audit"
    fast = (
        []
        if method in ("noisy-gd", "accelerated-srgd")
        else ["--epochs", "1", "--batch-size", "512"]
    )
    run(
        "train",
        "--data",
        "digits",
        "--method",
        method,
        "--epsilon",
        "4",
        "--out",
        str(saved),
        "--no-compare",
        *fast,
    )
    found = run("audit", "--run", str(saved), "--trials", "2000", "--out", str(out))
    # A sampled run shows little of its epsilon to 2,000 trials.
    assert ("too weak to tell: about --trials" if method == "dp-sgd" else "consistent") in found
    certificate = json.loads((saved / "certificate.json").read_text())
    certificate["guarantee"]["epsilon"] = 0.5
    (saved / "certificate.json").write_text(json.dumps(with_digest(certificate)))
    assert "do not trust it" in run(
        "audit", "--run", str(saved), "--trials", "2000", "--out", str(out), code=2
    )
    assert "is missing" in run("audit", "--run", str(tmp_path), "--out", str(out), code=2)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (("--noise-seed", "1"), "seeded: not for release"),
        (("--noise-multiplier", "0"), "no noise, nothing promised"),
    ],
)
def test_runs_that_promise_nothing_are_audited_under_that_name(
    tmp_path: Path, setting: tuple[str, str], said: str
) -> None:
    saved, out = str(tmp_path / "run"), str(tmp_path / "audit")
    short = ("--epochs", "1", "--batch-size", "512", "--no-compare", *setting)
    run("train", "--data", "digits", "--out", saved, *short)
    run("audit", "--run", saved, "--trials", "100", "--out", out)
    document = (tmp_path / "audit" / "audit.json").read_text()
    assert said in document
    assert "Infinity" not in document


REPLACE: dict[str, Any] = {"noise_multiplier": 1.5, "delta": 1e-5, "neighboring": "replace-one"}
REPLACED = {  # a record's value turns round: twice the shift
    "dp-ftrl": DPFTRL(1.0).plan(n=600, batch_size=100, epochs=2, **REPLACE),
    "dice-sgd": DiceSGD(1.0).plan(n=60, batch_size=10, epochs=2, **REPLACE),
    "noisy-gd": WholeRun("noisy-gd", 1.0).plan(n=60, **REPLACE),
    "adaptive-gd": WholeRun("adaptive-gd", 1.0).plan(n=60, **REPLACE),
    "kl-spider": WholeRun("kl-spider", 1.0).plan(n=60, **REPLACE),
    "accelerated-srgd": WholeRun("accelerated-srgd", 1.0).plan(n=60, **REPLACE),
    "sufficient-statistics": WholeRun("sufficient-statistics", 1.0).plan(n=60, **REPLACE),
}


@pytest.mark.parametrize("name", REPLACED)
def test_claims_for_replaced_records_stand_too(name: str) -> None:
    plan = REPLACED[name]
    found = attack(plan, 8000, 0)
    assert found.claimed == pytest.approx(plan.guarantee.epsilon, rel=1e-4)
    assert 0.8 * found.claimed <= found.lower_bound <= found.claimed


@pytest.mark.variants
def test_claims_about_norms_stand_for_replaced_records() -> None:
    found = adaptive_norms(8000, 0, neighboring="replace-one")
    assert 0.55 * found.claimed <= found.lower_bound <= found.claimed


def test_an_attack_that_could_show_nothing_says_so(tmp_path: Path) -> None:
    """A run at epsilon 0.5 with 2,000 trials was "consistent" with a limit of 0.000."""
    plan = DPSGD(1.0).plan(
        n=1000, batch_size=1000, steps=4, epsilon=0.5, delta=1e-5, neighboring="zero-out"
    )
    weak = attack(plan, 2000, 0)
    assert weak.verdict == "too weak to tell"
    assert weak.as_expected
    assert weak.limit < weak.claimed / 2
    assert f"--trials {weak.trials_needed * 2000 // weak.trials}"[:-2] in verdict_text(weak, 2000)
    enough = attack(plan, weak.trials_needed * 2000 // weak.trials, 0)
    assert enough.verdict == "consistent"
    assert enough.limit >= enough.claimed / 2
    half = attack(plan, weak.trials_needed * 2000 // weak.trials // 4, 0)
    assert half.verdict == "too weak to tell"  # the number is not far too large
