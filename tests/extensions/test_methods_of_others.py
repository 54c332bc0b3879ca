"""The extension points: a method is one file and one call (or entry point), and everything knows
it.
"""

import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest

import dpoptim
from command_work import run
from dpoptim import registry
from dpoptim.assumptions import CODE_OF_OTHERS
from dpoptim.audit.attack_families import attack, audits
from dpoptim.audit.finding import Finding, finding
from dpoptim.estimators import DPSGDClassifier, DPSGDRegressor
from dpoptim.methods import DPSGD, PrivateQuantile, TrainingMethod, register_method
from dpoptim.runs.method_table import markdown_table
from dpoptim.sampling import PoissonSampling
from extensions.decaying_noise import DecayingSGD
from extensions.returned_noise import ReturningSGD
from spies import plans_attached

HERE = Path(__file__).parent


@pytest.fixture(params=[DecayingSGD, ReturningSGD], ids=lambda method: method.name)
def method(request: pytest.FixtureRequest) -> Iterator[type[TrainingMethod]]:
    register_method(request.param)
    yield request.param
    registry.unregister_method(request.param.name)


def test_each_is_one_short_file() -> None:
    for file in ("decaying_noise.py", "returned_noise.py"):
        assert len((HERE / file).read_text().splitlines()) <= 60


def test_it_trains_from_the_command_line(method: type[TrainingMethod], tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(
        "train",
        "--method",
        method.name,
        "--epsilon",
        "4",
        "--epochs",
        "1",
        "--batch-size",
        "256",
        "--no-compare",
        "--out",
        str(out),
    )
    certificate = json.loads((out / "certificate.json").read_text())
    assert certificate["settings"]["method"] == method.__name__
    plan = dpoptim.Plan.from_json((out / "plan.json").read_text())
    assert plan.method == method(plan.method.clip_norm)  # type: ignore[call-arg]
    assert plan.method.name == method.name
    assert 3.9 < plan.guarantee.epsilon <= 4
    note = CODE_OF_OTHERS.format("extensions")
    assert note in certificate["guarantee"]["notes"]
    assert html.escape(note) in (out / "report.html").read_text()
    assert method.name in run("methods")
    assert method.summary in markdown_table()
    assert method.name in audits()
    assert re.search(
        "consistent|too weak",
        run("audit", "--run", str(out), "--trials", "500", "--out", str(tmp_path / "a")),
    )


def test_a_plan_says_whose_code_its_promise_rests_on(method: type[TrainingMethod]) -> None:
    """This package enforces nothing of it: its sampler may say Poisson, and take every record."""
    shape: Any = {"n": 60, "batch_size": 10, "epochs": 1, "noise_multiplier": 1.0, "delta": 1e-5}
    plan = method(1.0).plan(**shape)  # type: ignore[call-arg]
    assert "trusted      the method comes from the package 'extensions'" in plan.describe()
    assert not [each for each in plan.basis if each.kind == "enforced"]
    note = CODE_OF_OTHERS.format("extensions")
    assert plan.guarantee.notes == plan.guarantee_at(1e-6).notes == (note,)
    assert note in str(plan.guarantee)
    assert note in plan.guarantee.to_json()["notes"]
    own = dpoptim.DPSGD(1.0).plan(**shape)
    assert "package" not in own.describe()
    assert not own.guarantee.notes


def test_a_sampler_or_policy_of_others_counts_as_their_method() -> None:
    shape: Any = {"n": 600, "batch_size": 100, "epochs": 9, "noise_multiplier": 1.0, "delta": 1e-5}

    class Found(PrivateQuantile):
        pass

    class Drawn(DPSGD):
        def sampler(self, n: int, batch_size: int) -> PoissonSampling:
            return type("Own", (PoissonSampling,), {"__module__": "elsewhere.drawn"})(0.5)

    Drawn.__module__ = "dpoptim.methods"
    here = __name__.partition(".")[0]
    for method, package in ((DPSGD(Found()), here), (Drawn(1.0), "elsewhere")):
        assert CODE_OF_OTHERS.format(package) in method.plan(**shape).guarantee.notes


def test_estimators_train_with_it(
    method: type[TrainingMethod], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = plans_attached(monkeypatch)
    x = np.random.default_rng(0).uniform(-1, 1, (400, 3))
    settings: Any = {"epsilon": 4.0, "epochs": 1, "batch_size": 100, "method": method.name}
    network = DPSGDClassifier(classes=[False, True], clip_norm=0.5, **settings).fit(x, x[:, 0] > 0)
    DPSGDRegressor(target_bound=1.0, **settings).fit(x, x[:, 0])
    assert {type(plan.method) for plan in plans} == {method}
    assert plans[0].method.norm_bound == 0.5
    assert 3.9 < network.privacy_.epsilon <= 4
    assert CODE_OF_OTHERS.format("extensions") in network.privacy_.notes


def test_its_claim_stands_up_to_its_family(method: type[TrainingMethod]) -> None:
    found = audits()[method.name](8000, 0)
    assert found.verdict != "refuted"
    assert 0.3 * found.claimed < found.lower_bound <= found.claimed


def test_the_attack_on_decaying_noise_is_on_its_own_noise() -> None:
    """At full batches the attack shows nearly all; forgetting the decay in the event would be
    refuted.
    """
    plan = DecayingSGD(1.0, half_life=1.0).plan(
        n=100, batch_size=100, steps=4, noise_multiplier=4.0, delta=1e-5, neighboring="zero-out"
    )
    found = attack(plan, 8000, 0)
    assert 0.7 * found.claimed < found.lower_bound <= found.claimed
    flat = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(4.0), 4)
    forgotten = dpoptim.accounting.compute_epsilon(flat, 1e-5, "zero-out").epsilon
    assert found.lower_bound > 1.5 * forgotten


def test_an_entry_point_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("decaying-sgd", "extensions.decaying_noise:DecayingSGD", registry.GROUP)
    monkeypatch.setattr(registry, "_third_parties", lambda: {point.name: point})
    assert registry.entry("decaying-sgd").make is DecayingSGD
    assert "decaying-sgd" in registry.method_names()
    wrong = EntryPoint("wrong", "json:loads", registry.GROUP)
    monkeypatch.setattr(registry, "_third_parties", lambda: {"wrong": wrong})
    with pytest.raises(ValueError, match="is no method"):
        registry.entry("wrong")


def test_a_broken_package_takes_nothing_else_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is named where it is asked for; elsewhere it is left out, with a warning."""
    broken = EntryPoint("broken", "no_such_module:Method", registry.GROUP)
    monkeypatch.setattr(registry, "_third_parties", lambda: {"broken": broken})
    message = "'broken' in the group 'dpoptim.methods' cannot be loaded (ModuleNotFoundError"
    with pytest.raises(ValueError, match=re.escape(message)):
        registry.entry("broken")
    with pytest.warns(UserWarning, match=f"broken is left out.*{re.escape(message)}"):
        assert set(registry.entries()) == set(registry.BUILT_IN)
    with pytest.warns(UserWarning, match="left out"):
        assert "dp-sgd" in run("methods")
    fast = ["--epochs", "1", "--batch-size", "256", "--out", str(tmp_path / "run"), "--no-compare"]
    run("train", *fast)  # which loads the one that it needs
    assert message in run("train", "--method", "broken", *fast, "--overwrite", code=2)


def test_two_packages_may_not_list_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("twice", f"extensions.{module}", registry.GROUP)
        for module in ("decaying_noise:DecayingSGD", "returned_noise:ReturningSGD")
    ]
    monkeypatch.setattr(registry, "entry_points", lambda **chosen: points)
    monkeypatch.setattr(registry, "_third_parties", lambda: {"twice": points[1]})
    with pytest.raises(ValueError, match="listed by two packages"):
        registry.entry("twice")


def test_a_package_cannot_take_a_built_in_name(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("dp-sgd", "extensions.decaying_noise:DecayingSGD", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda **chosen: [point])
    with pytest.warns(UserWarning, match="another package's method 'dp-sgd'.*another name"):
        assert registry.entries()["dp-sgd"].make is dpoptim.DPSGD


def test_methods_are_listed_by_whole_names_on_narrow_terminals() -> None:
    said = run("methods", columns=80)
    assert all(name in said for name in registry.BUILT_IN)
    for words in ("add-or-remove-one", "sufficient-statistics", "noise_schedule", "clip_norm"):
        assert words in said  # nothing is cut within a word


def test_what_cannot_be_listed_is_refused() -> None:
    with pytest.raises(TypeError, match="subclass of dpoptim.methods.TrainingMethod"):
        register_method(dict)

    class Nameless(TrainingMethod):
        pass

    with pytest.raises(TypeError, match="name is missing"):
        register_method(Nameless)

    @dataclass(frozen=True)
    class Open(DecayingSGD):
        name = "open"
        pace: float = field(kw_only=True)

    with pytest.raises(TypeError, match=r"Open\.pace has no default"):
        register_method(Open)

    class Taken(DecayingSGD):
        name = "dp-sgd"

    with pytest.raises(ValueError, match="name of another method"):
        register_method(Taken)


def test_a_class_that_is_defined_again_takes_its_own_place() -> None:
    """As a notebook's cell that is run again; another class does not."""

    def cell(summary: str) -> type[TrainingMethod]:
        text = summary

        class Own(DecayingSGD):
            name = "own"
            summary = text

        return register_method(Own)

    class Other(DecayingSGD):
        name = "own"

    try:
        cell("first")
        second = cell("second")
        assert registry.entry("own").make is second
        assert "second" in run("methods")
        with pytest.raises(ValueError, match="name of another method"):
            register_method(Other)
        assert registry.entry("own").make is second
    finally:
        registry.unregister_method("own")


def test_a_mechanism_without_a_family_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ReturningSGD(1.0).plan(n=60, batch_size=10, epochs=1, noise_multiplier=1.0, delta=1e-5)
    monkeypatch.setattr(
        type(plan.mechanism), "audit_family", lambda mechanism, shape: "none that I know of"
    )
    with pytest.raises(ValueError, match="none that I know of"):
        attack(plan, 100, 0)


def own_attack(plan: dpoptim.Plan, trials: int, seed: int) -> Finding:
    return finding(5.0, 1.0 + seed, 5.0, trials)


def test_a_mechanism_may_name_an_attack_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ReturningSGD(1.0).plan(n=60, batch_size=10, epochs=1, noise_multiplier=1.0, delta=1e-5)
    named = f"{__name__}:own_attack"
    monkeypatch.setattr(type(plan.mechanism), "audit_family", lambda mechanism, shape: named)
    assert attack(plan, 100, 3) == own_attack(plan, 100, 3)
    named = f"{__name__}:no_attack"
    with pytest.raises(ValueError, match="Fix: name one of them, or an attack of your own"):
        attack(plan, 100, 3)


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_no_method_is_listed_without_audit_page_and_command(name: str) -> None:
    """The page is what the command prints; a change of a method changes it by `dpoptim methods
    --markdown`.
    """
    from dpoptim.audit.attack_families import FAMILIES
    from dpoptim.runs.method_table import examples

    for plan in examples(registry.entry(name)):
        assert plan.mechanism.audit_family(plan.shape) in FAMILIES
    assert any(audit.partition(",")[0] == name for audit in audits())
    page = (HERE.parents[1] / "docs" / "methods.md").read_text()
    assert page.strip() == markdown_table().strip()
    assert f"| {name} |" in page
    assert name in run("train", "--help")


def settings_of(**given: Any) -> list[str]:
    return [part for name, value in given.items() for part in ("--set", f"{name}={value}")]


def test_settings_of_a_method_reach_it(method: type[TrainingMethod], tmp_path: Path) -> None:
    fast = ["--epochs", "1", "--batch-size", "256", "--out", str(tmp_path / "run"), "--no-compare"]
    assert "has no setting 'half'" in run(
        "train", "--method", method.name, *settings_of(half=3), *fast, code=2
    )
    run(
        "train",
        "--method",
        "dice-sgd",
        *settings_of(residual_clip="inf", reset_each_epoch="false"),
        *fast,
    )
    plan = dpoptim.Plan.from_json((tmp_path / "run" / "plan.json").read_text())
    assert plan.method.residual_clip == float("inf")  # type: ignore[attr-defined]
    assert plan.method.reset_each_epoch is False  # type: ignore[attr-defined]
