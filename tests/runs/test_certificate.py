"""The certificate claims what the run may claim, in strict JSON, and nothing private."""

import json
import math
import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dpoptim import DPFTRL, DPSGD, DiceSGD, Guarantee, Plan, PrivateQuantile, SparseSGD
from dpoptim.accounting.accountant import tradeoff_curve
from dpoptim.assumptions import Assumption
from dpoptim.cli import app
from dpoptim.methods import TrainingMethod
from dpoptim.runs.certificate import (
    account_command,
    best_guess,
    certificate,
    guarantee_in_words,
    percent_up,
    verdict,
    write_certificate,
)
from dpoptim.runs.report import report
from finished_run import SEEDED, UNPROVEN, small_run


def test_it_is_strict_json_with_the_plans_epsilon(tmp_path: Path) -> None:
    result = small_run()
    write_certificate(tmp_path / "certificate.json", result)
    text = (tmp_path / "certificate.json").read_text(encoding="utf-8")
    data = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not strict JSON"))
    assert data == certificate(result)
    assert data["format"] == "dpoptim.certificate/3"
    assert data["guarantee"]["epsilon"] == result.plan.guarantee.epsilon
    assert data["guarantee"]["text"] == str(result.guarantee)
    assert data["verdict"]["for_release"] is True
    assert "q=0.1" in data["settings"]["sampling"]
    assert data["settings"]["clip_norm"] == 1.0
    assert data["ledger"]["reservation"] == "r-17"
    assert "secret-folder" not in text


def test_its_plan_can_be_read_and_computed_again() -> None:
    result = small_run()
    assert Plan.from_json(json.dumps(certificate(result)["plan"])) == result.plan


def test_its_command_names_every_number_exactly() -> None:
    result = small_run(noise_multiplier=1.2345678901234567)
    command = certificate(result)["verify"]
    assert command == (
        "dpoptim account --n 1000 --batch-size 100 --steps 20 --noise-multiplier "
        "1.2345678901234567 "
        "--delta 1e-05 --neighboring add-or-remove-one"
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "method",
    [
        DPSGD(1.0, noise_schedule=(1.0, 3.0)),
        DPSGD(1.0, batch_schedule=((10, 2.0),)),
        DPSGD(1.0, largest_batch=300),
        DPSGD(PrivateQuantile(0.5)),
        SparseSGD(1.0),
        DPFTRL(1.0),
        DPFTRL(1.0, sampling="cyclic-poisson", bands=2),
        DPFTRL(1.0, sampling="balls-in-bins", bands=2),
        DPFTRL(1.0, sampling="b-min-sep", bands=2, momentum=0.9, decay=(0.1, 1.0, 0.5)),
    ],
    ids=str,
)
def test_its_command_computes_the_epsilon_of_what_was_run(method: TrainingMethod) -> None:
    """Not that of plain DP-SGD with the same numbers, which may be less."""
    plan = method.plan(n=1000, batch_size=100, steps=20, noise_multiplier=2.0, delta=1e-4)
    words = shlex.split(account_command(plan) or "")
    said = CliRunner().invoke(app, [*words[1:], "--json"])
    assert json.loads(said.output)[0]["epsilon"] == plan.guarantee.epsilon


def test_a_method_that_no_command_names_has_no_command() -> None:
    class Own(DPFTRL):
        name = "own"

    method = Own(1.0, sampling="cyclic-poisson", bands=2)
    plan = method.plan(n=1000, batch_size=100, steps=20, noise_multiplier=2.0, delta=1e-4)
    assert account_command(plan) is None


def test_further_deltas_are_upper_bounds_near_the_exact_epsilon() -> None:
    result = small_run()
    rows = certificate(result)["further_deltas"]
    assert [row["delta"] for row in rows] == [1e-4, 1e-5, 1e-6, 1e-7, 1e-8]
    assert rows[1]["epsilon"] == result.plan.guarantee.epsilon
    for row in rows:
        assert row["epsilon"] == pytest.approx(result.plan.epsilon(row["delta"]), rel=5e-3)
    assert [row["epsilon"] for row in rows] == sorted(row["epsilon"] for row in rows)


@pytest.mark.parametrize("neighboring", ["add-or-remove-one", "zero-out", "replace-one"])
def test_the_best_guess_is_what_the_trade_off_curve_allows(neighboring: str) -> None:
    plan = small_run(neighboring=neighboring).plan
    rates = [i / 1000 for i in range(1001)]
    errors = tradeoff_curve(plan.event, neighboring, rates) + rates
    allowed = 1 - float(errors.min()) / 2
    guess = best_guess(plan, plan.guarantee)
    assert allowed - 1e-3 <= guess <= allowed + 5e-3
    assert guess < (math.exp(plan.guarantee.epsilon) + 1e-5) / (
        1 + math.exp(plan.guarantee.epsilon)
    )


def test_the_best_guess_of_one_gaussian_is_known_exactly() -> None:
    """One full-batch step with z = 2 tells N(0, 1) from N(1/2, 1): right with probability
    Phi(1/4).
    """
    from dpoptim import DPSGD

    plan = DPSGD(clip_norm=1.0).plan(n=10, batch_size=10, steps=1, noise_multiplier=2, delta=1e-5)
    exact = 0.5 * (1 + math.erf(0.25 / math.sqrt(2)))
    assert exact <= best_guess(plan, plan.guarantee) < exact + 1e-3


def test_nothing_released_is_a_coin_toss() -> None:
    result = small_run()
    nothing = replace(result.guarantee, epsilon=0.0, delta=0.0, accountant="nothing released")
    assert best_guess(result.plan, nothing) == 0.5


@pytest.mark.parametrize(
    ("neighboring", "question"),
    [
        ("add-or-remove-one", "whether one particular record was used"),
        ("zero-out", "whether one particular record contributed"),
        ("replace-one", "which of two values one particular record has"),
    ],
)
def test_the_reading_answers_the_relations_question(neighboring: str, question: str) -> None:
    result = small_run(neighboring=neighboring)
    assert question in guarantee_in_words(result)
    assert percent_up(best_guess(result.plan, result.guarantee)) in guarantee_in_words(result)
    users = replace(result, guarantee=replace(result.guarantee, unit="user"))
    assert question.replace("record", "user") in guarantee_in_words(users)


def test_percentages_of_bounds_are_rounded_up() -> None:
    assert percent_up(0.59601) == "59.7\N{NO-BREAK SPACE}%"
    assert percent_up(0.5) == "50.0\N{NO-BREAK SPACE}%"


def test_what_is_not_proven_is_not_claimed() -> None:
    proven = small_run()
    guarantee = proven.guarantee
    cases = {
        "marked": replace(
            proven, guarantee=replace(guarantee, notes=("one", SEEDED)), basis=(UNPROVEN,)
        ),
        "unproven": replace(proven, basis=(*proven.basis, UNPROVEN)),
        "none": small_run(noise_multiplier=0),
    }
    for kind, result in cases.items():
        data = certificate(result)
        assert data["verdict"]["kind"] == verdict(result).kind == kind
        assert data["verdict"]["for_release"] is False
        assert data["attacker"] is None
        assert "at most" not in data["guarantee"]["reading"]
    counterexample = replace(guarantee, status="unproven (counterexample known)")
    assert verdict(replace(proven, guarantee=counterexample)).title == (
        "Unproven (counterexample known)"
    )
    assert certificate(cases["marked"])["guarantee"]["notes"] == ["one", SEEDED]
    assert certificate(cases["unproven"])["basis"]["unproven"] == [UNPROVEN.text]


def test_without_noise_there_is_no_number_and_no_plan() -> None:
    result = replace(small_run(noise_multiplier=0), ledger=None)
    data = certificate(result)
    json.dumps(data, allow_nan=False)
    assert data["guarantee"]["epsilon"] == "inf"
    assert data["plan"] is data["verify"] is data["ledger"] is None
    assert data["further_deltas"] == []
    assert not any(data["basis"].values())


def test_an_infinite_clip_norm_fits_strict_json() -> None:
    from dpoptim import DPSGD

    plan = DPSGD(clip_norm=math.inf).plan(
        n=1000, batch_size=100, steps=20, noise_multiplier=0, delta=1e-5
    )
    data = certificate(replace(small_run(), plan=plan, guarantee=plan.guarantee))
    json.dumps(data, allow_nan=False)
    assert data["settings"]["clip_norm"] == "inf"


def test_scores_name_their_measure_and_say_public() -> None:
    result = small_run()
    scores = certificate(result)["scores"]
    assert "on data declared public" in scores["measured"]
    assert scores["measure"] == "accuracy"
    assert certificate(replace(result, classes=0))["scores"]["measure"] == "R2"
    assert scores["private"] == [0.5, 0.7123]
    alone = certificate(replace(result, comparison_scores=None))["scores"]
    assert alone["without_privacy"] is None
    for none in (None, ()):
        assert (
            certificate(replace(result, private_scores=none, comparison_scores=None))["scores"]
            is None
        )


def test_every_basis_is_under_its_kind() -> None:
    result = replace(
        small_run(),
        basis=(Assumption("trusted", "a"), Assumption("enforced", "b"), Assumption("trusted", "c")),
    )
    assert certificate(result)["basis"] == {
        "enforced": ["b"],
        "trusted": ["a", "c"],
        "unproven": [],
    }


def test_its_guarantee_can_be_read_back() -> None:
    result = small_run()
    stored = certificate(result)["guarantee"]
    names = ("epsilon", "delta", "neighboring", "accountant", "status", "notes", "unit")
    assert Guarantee.from_json({name: stored[name] for name in names}) == result.guarantee


def test_a_full_disk_leaves_the_old_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "certificate.json"
    path.write_text("old")

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"certificate\.json.*disk space"):
        write_certificate(path, small_run())
    assert path.read_text() == "old"


def test_a_claim_without_a_proof_is_never_dressed_up() -> None:
    """DiceSGD's published accounting: no curve, no attacker, no command that would print a smaller
    number.
    """
    with pytest.warns(UserWarning, match="theorem is false"):
        method = DiceSGD(clip_norm=1.0, accounting="paper")
    plan = method.plan(n=1000, batch_size=20, steps=40, epsilon=1.0, delta=1e-5)
    result = replace(small_run(), plan=plan, guarantee=plan.guarantee, basis=plan.basis)
    data = certificate(result)
    assert data["verdict"]["kind"] == "unproven"
    assert data["verdict"]["for_release"] is False
    assert "counterexample known" in data["verdict"]["title"]
    assert "counterexample known" in data["guarantee"]["text"]
    assert data["attacker"] is data["verify"] is None
    assert data["further_deltas"] == []
    page = report(result)
    assert "counterexample known" in page
    assert "One run, many readings" not in page


@pytest.mark.parametrize("method", [DiceSGD(clip_norm=1.0), DPFTRL(clip_norm=1.0)])
def test_runs_that_are_one_gaussian(method: DiceSGD | DPFTRL) -> None:
    plan = method.plan(n=1000, batch_size=20, epochs=2, epsilon=1.0, delta=1e-5)
    result = replace(small_run(), plan=plan, guarantee=plan.guarantee, basis=plan.basis)
    data = certificate(result)
    assert data["verdict"]["for_release"] is True
    assert data["verify"].startswith("dpoptim account --n 1000 --batch-size 1000 --steps 1 ")
    full = DPSGD(clip_norm=1.0).plan(
        n=1000,
        batch_size=1000,
        steps=1,
        noise_multiplier=plan.noise_multiplier,
        delta=1e-5,
        neighboring="zero-out",
    )
    assert full.guarantee.epsilon == plan.guarantee.epsilon
    assert "disjoint batches" in data["settings"]["sampling"]
    assert "shorter plans" not in report(result)  # all steps are one event
