"""Planning: estimates near what is exact, targets kept by the trade-off curve, all methods of the
registry."""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from command_work import run
from dpoptim.accounting.accountant import compute_epsilon, tradeoff_curve
from dpoptim.accounting.attacker import (
    LEAST_NOISE,
    FoundAtMost,
    RightAtMost,
    calibrate_to_attacker,
    right_at_most,
)
from dpoptim.accounting.profiles import LossDistribution
from dpoptim.methods import DPFTRL, DPSGD
from dpoptim.planning import EpsilonAtMost, Question, StepCost, choose, learning_rate, sweep
from dpoptim.planning.choice import CLOSE
from dpoptim.planning.targets import estimated_noise
from dpoptim.recipes import planned, recipe
from dpoptim.registry import entries, register_method, unregister_method
from dpoptim.runs.step_cost import measured_cost

PUBLIC_DELTA = 1e-6


def question(**changes: object) -> Question:
    settings: dict[str, object] = {
        "n": 20_000,
        "parameters": 62,
        "target": EpsilonAtMost(1.0, PUBLIC_DELTA),
        "methods": ["dp-sgd"],
        **changes,
    }
    return Question(**settings)  # type: ignore[arg-type]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("neighboring", ["add-or-remove-one", "zero-out"])
@pytest.mark.parametrize("epsilon", [0.3, 8.0])
def test_the_estimated_noise_is_near_the_exact(neighboring: str, epsilon: float) -> None:
    for batch_size, epochs in ((64, 40.0), (512, 5.0), (20_000, 5.0)):
        plan = DPSGD(clip_norm=1.0).plan(
            n=20_000,
            batch_size=batch_size,
            epochs=epochs,
            epsilon=epsilon,
            delta=PUBLIC_DELTA,
            neighboring=neighboring,
        )
        mu = EpsilonAtMost(epsilon, PUBLIC_DELTA).mu
        estimate = estimated_noise(plan.mechanism, plan.shape, mu)
        assert 0.85 * plan.noise_multiplier < estimate < 1.01 * plan.noise_multiplier


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "target", [RightAtMost(0.6), FoundAtMost(0.1, 0.01), FoundAtMost(0.5, 0.1)], ids=str
)
def test_an_attackers_target_is_kept_by_the_whole_trade_off_curve(
    target: RightAtMost | FoundAtMost,
) -> None:
    found = choose(question(target=target, batch_size=500, epochs=10.0))
    event = found.plan.event
    rates = np.linspace(0.001, 0.999, 999)
    caught = 1 - tradeoff_curve(event, found.plan.neighboring, rates)
    if isinstance(target, RightAtMost):
        # an attacker with even prior odds takes the point of the curve where it gains most
        assert np.max(caught - rates) <= 2 * target.share - 1 + 1e-9
        assert right_at_most(event, found.plan.neighboring) <= target.share
    else:
        at = 1 - tradeoff_curve(event, found.plan.neighboring, [target.false_alarms])[0]
        assert at <= target.share
    assert target.reached(event, found.plan.neighboring) >= 0.98 * target.mu  # and no more noise
    # a release of a single Gaussian of the target's mu is as the target says
    alone = DPSGD(clip_norm=1.0).plan(
        n=10, batch_size=10, steps=1, noise_multiplier=1 / target.mu, delta=PUBLIC_DELTA
    )
    assert target.reached(alone.event, "add-or-remove-one") == pytest.approx(target.mu, rel=0.02)


def test_calibration_to_an_attacker_never_probes_little_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where loss distributions are slow to compose, or overflow."""
    probed: list[float] = []
    plan = DPSGD(clip_norm=1.0).plan(
        n=1000, batch_size=100, steps=20, noise_multiplier=1.0, delta=1e-5
    )

    def event_of(noise: float) -> object:
        probed.append(noise)
        return plan.mechanism.event(plan.shape, noise)

    compositions: list[int] = []
    honest = LossDistribution.__init__

    def counted(self: LossDistribution, *args: object, **settings: object) -> None:
        compositions.append(1)
        honest(self, *args, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(LossDistribution, "__init__", counted)
    target = RightAtMost(1 - 1e-9)
    found = calibrate_to_attacker(
        event_of,  # type: ignore[arg-type]
        target,
        neighboring="zero-out",
        start=0.001,
    )
    assert found == pytest.approx(LEAST_NOISE)
    assert min(probed) >= LEAST_NOISE * (1 - 1e-12)
    calibrate_to_attacker(
        event_of,  # type: ignore[arg-type]
        RightAtMost(0.7),
        neighboring="zero-out",
        start=1.0,
    )
    assert len(compositions) <= 16


def test_every_training_loop_of_the_registry_is_considered() -> None:
    @dataclass(frozen=True)
    class Another(DPSGD):
        name: ClassVar[str] = "another-one"
        summary: ClassVar[str] = "a method of another package"

    register_method(Another)
    try:
        loops = {name for name, entry in entries().items() if not entry.solver}
        found = sweep(question(methods=None, epochs=5.0))
        assert "another-one" in loops
        # a model of which only the size is known has no tables
        assert {setting.method.name for setting in found} == loops - {"sparse-sgd"}
        named = sweep(question(methods=("sparse-sgd",), epochs=5.0))
        assert {setting.method.name for setting in named} == {"sparse-sgd"}
        assert any("sampling=cyclic-poisson" in setting.name for setting in found)
    finally:
        unregister_method("another-one")


def test_the_chosen_setting_is_the_cheapest_of_the_best_and_its_noise_is_exact() -> None:
    found = choose(question())
    good = [each for each in found.settings if each.error <= CLOSE * found.settings[0].error]
    assert min(each.records for each in good) == found.chosen.records
    assert [each.error for each in found.settings] == sorted(each.error for each in found.settings)
    epsilon = compute_epsilon(found.plan.event, PUBLIC_DELTA, found.plan.neighboring).epsilon
    assert 0.99 <= epsilon <= 1.0
    assert found.plan.noise_multiplier == found.chosen.noise_multiplier


def test_time_limits_what_is_considered() -> None:
    cost = StepCost(1e-3, 1e-5)
    free = choose(question(cost=cost))
    assert free.chosen.seconds is not None
    limit = free.chosen.seconds / 10
    short = choose(question(cost=cost, max_seconds=limit))
    assert all(each.seconds <= limit for each in short.settings)  # type: ignore[operator]
    assert short.settings[0].error >= free.settings[0].error
    with pytest.raises(ValueError, match="no setting is left"):
        sweep(question(cost=cost, max_seconds=1e-6))


def test_less_noise_for_more_steps_is_never_wrong_way_round() -> None:
    """More budget, more records and fewer parameters are each predicted to help."""
    base = sweep(question())[0].error
    assert sweep(question(target=EpsilonAtMost(2.0, PUBLIC_DELTA)))[0].error < base
    assert sweep(question(n=40_000))[0].error < base
    assert sweep(question(parameters=620))[0].error > base
    assert learning_rate(0.01, 500, 100, 0.9) > learning_rate(1.0, 500, 100, 0.9) > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target": EpsilonAtMost(999.0, PUBLIC_DELTA)}, "promises next to nothing"),
        ({"target": EpsilonAtMost(0.001, PUBLIC_DELTA)}, "far below what anyone asks for"),
        ({"target": EpsilonAtMost(1.0, 0.01)}, "above 1/(10 n)"),
        ({"n": 200, "parameters": 5000}, "is small for 5,000 parameters"),
        ({"n": 499}, "below 500 records ranks are hardly better than a guess"),
    ],
)
def test_what_should_give_pause_is_said(changes: dict[str, object], said: str) -> None:
    found = choose(question(**changes))
    assert any(said in warning for warning in found.warnings), found.warnings
    assert choose(question()).warnings == ()


FAST = ("--method", "dp-sgd", "--records-per-second", "1e5")


def test_defaults_of_what_no_plan_estimates_are_the_recipes() -> None:
    """``--method dp-ftrl --set sampling=balls-in-bins``, and ``noise=tree``, were refused."""
    base, target = recipe("softmax", 600), EpsilonAtMost(2.0, PUBLIC_DELTA)
    assert planned(base, DPFTRL(1.0, sampling="balls-in-bins"), 600, 12, target) == base
    tree = DPFTRL(1.0, noise="tree")
    assert tree.variants(600, 60) == (tree,)
    assert planned(base, tree, 600, 12, target) != base


def test_training_says_it_before_anything_is_spent(tmp_path: Path) -> None:
    text = run(
        *("train", "--data", "digits", "--epsilon", "999", "--delta", "0.5", "--no-compare"),
        *("--method", "noisy-gd", "--set", "steps=1", "--out", str(tmp_path / "run")),
    )
    notes = text[: text.index("results")]
    assert "Note: epsilon" in notes
    assert "delta 0.5 is above 1/(10 n)" in notes


def test_the_command_says_what_to_run_next_and_that_runs(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    size = ("--n", "1438", "--features", "64", "--outputs", "10", "--epochs", "2")
    arguments = (*size, "--attacker-right", "0.7", *FAST, "--out", str(page))
    found = json.loads(run("plan", *arguments, "--json"))
    text = page.read_text()
    assert text.count("<svg") == 3
    assert "<script" not in text
    assert "right at most 0.7" in text
    words = found["command"].replace("FILE", "digits").split()[1:]
    said = run(*words, "--no-compare", "--out", str(tmp_path / "run"))
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["noise_multiplier"] == found["chosen"]["noise_multiplier"]
    assert plan["steps"] == found["chosen"]["steps"]
    certificate = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert certificate["attacker"]["right_at_most"] <= 0.7
    assert certificate["attacker"]["right_at_most"] > 0.69
    assert "epsilon" in said


def test_the_table_marks_the_choice_and_a_schema_gives_the_size(tmp_path: Path) -> None:
    schema = tmp_path / "s.toml"
    schema.write_text(
        '[columns.age]\nkind = "number"\nbounds = [0, 100]\n[columns.y]\nkind = "target"\n'
        'classes = ["no", "yes"]\n'
    )
    out = ("--out", str(tmp_path / "p.html"))
    text = run("plan", "--n", "5000", "--schema", str(schema), "--epsilon", "1", *FAST, *out)
    assert "delta 1e-05" in text
    assert "a softmax model, n = 5,000 records" in text
    assert f"next dpoptim train --data FILE --schema {schema} --method" in text
    assert len(re.findall(r"\d\.\d\d x", text)) >= 3
    assert re.search(r"\d+ settings", text)
    schema.write_text(schema.read_text() + '[columns.who]\nkind = "person"\n')
    text = run("plan", "--n", "5000", "--schema", str(schema), "--epsilon", "1", *FAST, *out)
    assert "n = 5,000 persons" in text
    assert "per person)" in text
    page = (tmp_path / "p.html").read_text()
    assert "<span>per person</span>" in page
    assert "each person joins each step" in page
    assert "each record" not in page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--features", "3"), "give one target"),
        (("--features", "3", "--epsilon", "1", "--attacker-right", "0.6"), "give one target"),
        (("--features", "3", "--attacker-tpr", "0.1"), "belong together"),
        (("--features", "3", "--attacker-right", "0.4"), "above 0.5"),
        (("--epsilon", "1"), "model's size once"),
        (("--parameters", "9", "--epsilon", "1", "--max-minutes", "1"), "cost of a step"),
        (("--parameters", "9", "--epsilon", "1", "--method", "noisy-gd"), "no training loop"),
    ],
)
def test_what_cannot_be_planned(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    out = tmp_path / "p.html"
    assert said in run("plan", "--n", "1000", *arguments, "--out", out, code=2)
    assert not out.exists()


def test_a_step_is_measured_without_torchs_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose import would be a fourth of the time that a plan takes."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # its import fails
    for outputs in (1, 3):
        cost = measured_cost("softmax", (4,), outputs)
        assert cost.per_step > 0
        assert cost.per_record > 0
