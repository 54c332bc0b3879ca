"""``dpoptim tune``: free on public proxies, one charge in private, and a model that predicts."""

import json
from pathlib import Path

import numpy as np
import pytest

import dpoptim
from command_work import run

SCHEMA = """
[columns.a]
kind = "number"
bounds = [-4, 4]
[columns.b]
kind = "number"
bounds = [-4, 4]
[columns.y]
kind = "target"
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A table, its schema, and the same with a number to predict."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2_000, 2))
    line = x @ [1.0, -1.0]
    rows = [
        f"{a:.4f},{b:.4f},{'yes' if c > 0 else 'no'}" for (a, b), c in zip(x, line, strict=True)
    ]
    table = tmp_path / "t.csv"
    table.write_text("\n".join(["a,b,y", *rows]) + "\n")
    schema, numeric = tmp_path / "s.toml", tmp_path / "r.toml"
    schema.write_text(SCHEMA + 'classes = ["no", "yes"]\n')
    numeric.write_text(SCHEMA + "bounds = [-8, 8]\n")
    return table, schema, numeric


GRID = ("--grid", "clip_norm=0.2,20", "--grid", "steps=10,20")
PROMISE = ("--epsilon", "2", "--delta", "1e-5")


def test_public_proxies_cost_nothing_and_rank(files: tuple[Path, Path, Path]) -> None:
    table, schema, _ = files
    arguments = ("tune", "--public-data", str(table), "--schema", str(schema), *GRID, *PROMISE)
    text = run(*arguments)
    assert "nothing was charged" in text
    assert text.index("clip_norm=0.2") < text.index("clip_norm=20")
    alike = run(*arguments, "--n", "1600")  # as many as the proxies have in training
    assert alike == text
    assert run(*arguments, "--n", "40") != text  # noise of few records: other scores


def test_a_private_search_is_one_charge_and_predicts(
    files: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    table, schema, _ = files
    out, ledger = tmp_path / "tuned", tmp_path / "l.sqlite"
    arguments = (
        *("tune", "--data", str(table), "--schema", str(schema), *GRID, *PROMISE),
        *("--ledger", str(ledger), "--budget", "2,1e-5", "--noise-seed", "1", "--out", str(out)),
    )
    text = run(*arguments)
    assert "--public-data ranks settings for free" in text
    found = json.loads((out / "tune.json").read_text())
    assert 1.98 <= found["guarantee"]["epsilon"] <= 2
    assert found["settings"]["clip_norm"] == 0.2
    with dpoptim.Ledger(ledger) as opened:
        assert len(opened.entries()) == 1
    predicted = tmp_path / "p.csv"
    run("predict", str(out), str(table), "--out", str(predicted))
    labels = [line.split(",")[2] for line in table.read_text().splitlines()[1:]]
    said = [line.split(",")[0] for line in predicted.read_text().splitlines()[1:]]
    assert np.mean([a == b for a, b in zip(labels, said, strict=True)]) > 0.9
    # nothing is left: a second search is refused, and what is there is not replaced
    assert "is not empty" in run(*arguments, code=2)
    alone = (*arguments[: arguments.index("--ledger")], "--out", str(tmp_path / "alone"))
    assert "this fit alone: others on the same records add to it" in run(*alone)
    assert "this fit alone" not in text
    again = (*arguments[:-1], str(tmp_path / "again"))
    assert "over the budget" in run(*again, code=2)


def test_one_ledger_from_search_to_score(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Later commands take over its relation, which the first one has chosen."""
    table, schema, _ = files
    ledger, out = tmp_path / "l.sqlite", tmp_path / "run"
    paid = ("--ledger", str(ledger), "--delta", "1e-5", "--n", "2000")
    data = ("--data", str(table), "--schema", str(schema), "--epsilon", "1")
    run("tune", *data, *GRID, *paid, "--budget", "3,1e-5", "--out", str(tmp_path / "tuned"))
    text = run("train", *data, *paid, "--epochs", "2", "--out", str(out))
    assert "at delta=1e-05 (zero-out" in text
    run("evaluate", str(out), str(table), "--epsilon", "0.5", *paid, "--records", "training")
    with dpoptim.Ledger(ledger) as opened:
        assert opened.neighboring == "zero-out"
        assert len(opened.entries()) == 3
    # the other way round there is a word of what to do
    other = (*paid[2:], "--ledger", str(tmp_path / "other.sqlite"))
    run("train", *data, *other, "--epochs", "2", "--out", str(tmp_path / "first"))
    said = run("tune", *data, *GRID, *other, "--out", str(tmp_path / "second"), code=2)
    assert "Fix: --neighboring zero-out" in said


def test_persons_and_weights_of_classes_are_tuned_for(
    files: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """Per person in the guarantee and the ledger; a class of weight 0 is never predicted."""
    table, out, ledger = tmp_path / "p.csv", tmp_path / "tuned", tmp_path / "l.sqlite"
    head, *rows = files[0].read_text().splitlines()
    table.write_text("\n".join([f"{head},who", *(f"{r},p{i % 500}" for i, r in enumerate(rows))]))
    schema = tmp_path / "p.toml"
    schema.write_text(files[1].read_text() + '[columns.who]\nkind = "person"\n')
    of_persons = (*("--schema", str(schema), "--person-column", "who"), *PROMISE)
    weights = ("--class-weight", "no=0", "--class-weight", "yes=3")
    private = ("--data", str(table), "--ledger", str(ledger), "--out", str(out))
    few = ("--records-per-person", "3", "--grid", "clip_norm=0.1,0.2", "--noise-seed", "1")
    text = run("tune", *private, *of_persons, *weights, *few)
    assert "per person" in text
    assert "has no certificate. Fix: dpoptim ledger" in run("verify", str(out), code=2)
    found = json.loads((out / "tune.json").read_text())["guarantee"]
    assert found["unit"] == "person"
    assert "at most 3 of them" in str(found)
    with dpoptim.Ledger(ledger) as opened:
        assert opened.dataset is not None
        assert opened.dataset.endswith("per person")
    predicted = tmp_path / "said.csv"
    run("predict", str(out), str(table), "--out", str(predicted))
    said = [line.split(",")[0] for line in predicted.read_text().splitlines()[1:]]
    assert said.count("yes") > 0.99 * len(said)
    public = ("--public-data", str(table), *of_persons, *GRID, "--seeds", "1")
    assert run("tune", *public) == run("tune", *public, "--n", "400")  # four fifths of 500
    assert run("tune", *public) != run("tune", *public, "--n", "40")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give one of --public-data"),
        (("--public-data", "T", "--data", "T"), "give one of --public-data"),
        (("--public-data", "T", "--schema", "S", "--ledger", "l.sqlite"), "not charged"),
        (("--public-data", "T", "--schema", "S", "--grid", "clip_norm"), "NAME=VALUE"),
        (("--public-data", "T", "--schema", "S", "--grid", "size=3"), "no setting 'size'"),
        (("--data", "T", "--schema", "S", "--grid", "epsilon=1,2"), "may not set"),
        (("--data", "T", "--schema", "S", "--class-weight", "2"), "CLASS=WEIGHT such as yes=5"),
        (("--data", "T", "--schema", "S", "--class-weight", "maybe=2"), "The classes are no, yes"),
    ],
)
def test_what_cannot_be_tuned(
    files: tuple[Path, Path, Path],
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    table, schema, _ = files
    given = [{"T": str(table), "S": str(schema)}.get(word, word) for word in arguments]
    assert said in run("tune", *given, *PROMISE, code=2)
