"""Methods side by side: each at the same guarantee, on public data only."""

import json
import math
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from command_work import run
from dpoptim.registry import entries
from dpoptim.runs.compare import OWN, Compared, not_told_apart


def test_methods_are_compared_at_one_guarantee(tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    methods = ["dp-sgd", "dp-ftrl", "noisy-gd"]
    text = run(
        *(
            "compare",
            *methods,
            "--data",
            "digits",
            "--epsilon",
            "3",
            "--epochs",
            "3",
            "--seeds",
            "2",
            "--out",
            str(out),
        )
    )
    document = json.loads(out.read_text())
    found = {each["method"]: each for each in document["methods"]}
    assert set(found) == {*methods, "without privacy"}
    for name in methods:
        assert name in text
        assert len(found[name]["scores"]) == 2
        epsilon = float(
            re.match(r"epsilon=([\d.]+) at delta=1e-05", found[name]["guarantee"]).group(1)
        )  # type: ignore[union-attr]
        assert 2.9 <= epsilon <= 3
        assert 0.3 < found[name]["mean"] <= 1
        # no method is helped by a weaker promise than another's
        assert "zero-out" in found[name]["guarantee"]
        assert found[name]["plan"]["neighboring"] == "zero-out"
    assert document["data"] == "digits"
    assert document["versions"]["torch"] == torch.__version__
    ours = found["dp-sgd"]
    error = math.sqrt(ours["mean"] * (1 - ours["mean"]) / document["hold_out_records"])
    assert ours["hold_out_error"] == pytest.approx(error)
    means = [each["mean"] for each in document["methods"]]
    assert means == sorted(means, reverse=True)
    assert found["without privacy"]["mean"] > 0.9


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-method"], "no method 'no-method'"),
        (["dp-sgd:clip-norm=x"], "clip_norm"),
        (["dp-sgd:nothing=1"], "the method dp-sgd has no setting 'nothing'"),
        (["dp-sgd:"], "NAME=VALUE"),
        (["noisy-gd", "--neighboring", "add-or-remove-one"], "neighboring"),
        (["dp-sgd", "--data", "fashion-mnist", "--data-dir", "nowhere"], "nowhere"),
        (["dp-sgd", "--data", "TABLE", "--target", "y"], "--classes is missing"),
    ],
)
def test_what_cannot_be_compared(tmp_path: Path, arguments: list[str], said: str) -> None:
    table = tmp_path / "t.csv"
    table.write_text("a,y\n1,0\n2,1\n")
    given = [str(table) if word == "TABLE" else word for word in arguments]
    assert said in run("compare", *given, "--out", str(tmp_path / "c.json"), code=2)
    assert not (tmp_path / "c.json").exists()


def test_settings_of_one_method_and_the_relation_of_all(tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    words = ["dp-sgd", "dp-sgd:clip-norm=0.5:learning-rate=0.25", "dp-ftrl:momentum=0.5:epochs=2"]
    common = ["--epochs", "1", "--seeds", "1", "--noise-seed", "3", "--out", str(out)]
    run("compare", *words, "--neighboring", "replace-one", *common)
    found = {each["method"]: each for each in json.loads(out.read_text())["methods"]}
    assert {found[name]["plan"]["neighboring"] for name in words} == {"replace-one"}
    assert found[words[1]]["plan"]["method"]["clip_norm"] == 0.5
    assert found[words[1]]["settings"].endswith("learning rate 0.25")
    assert found[words[2]]["plan"]["method"]["momentum"] == 0.5
    assert json.loads(out.read_text())["noise_seed"] == 3


def test_methods_closer_than_the_hold_outs_error_are_named() -> None:
    def scored(name: str, score: float, measure: str = "accuracy") -> Compared:
        return Compared(name, "epsilon=1", (score,), 1.0, measure, 400)

    three = {"a": 0.90, "b": 0.88, "c": 0.86}  # twice the error of 0.9 is 0.03
    assert not_told_apart([scored(*each) for each in three.items()]) == ["a", "b"]
    assert not_told_apart([scored(*each, "R2") for each in three.items()]) == []


def test_options_of_one_method_are_no_settings() -> None:
    """Else one name would mean two things; `--set` takes neither clip norm nor clipping."""
    for entry in entries().values():
        if not entry.solver:
            names = {each.name for each in fields(entry.make)}
            assert names & set(OWN) <= {"clip_norm", "clipping"}
