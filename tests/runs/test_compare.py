"""Methods side by side: each at the same guarantee, on public data only."""

import json
import re
from pathlib import Path

import pytest

from command_work import run


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
    found = {each["method"]: each for each in json.loads(out.read_text())}
    assert set(found) == {*methods, "without privacy"}
    for name in methods:
        assert name in text
        assert len(found[name]["scores"]) == 2
        epsilon = float(
            re.match(r"epsilon=([\d.]+) at delta=1e-05", found[name]["guarantee"]).group(1)
        )  # type: ignore[union-attr]
        assert 2.9 <= epsilon <= 3
        assert 0.3 < found[name]["mean"] <= 1
    means = [each["mean"] for each in json.loads(out.read_text())]
    assert means == sorted(means, reverse=True)
    assert found["without privacy"]["mean"] > 0.9


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-method"], "no method 'no-method'"),
        (["dp-sgd", "--data", "TABLE", "--target", "y"], "--classes is missing"),
    ],
)
def test_what_cannot_be_compared(tmp_path: Path, arguments: list[str], said: str) -> None:
    table = tmp_path / "t.csv"
    table.write_text("a,y\n1,0\n2,1\n")
    given = [str(table) if word == "TABLE" else word for word in arguments]
    assert said in run("compare", *given, "--out", str(tmp_path / "c.json"), code=2)
    assert not (tmp_path / "c.json").exists()
