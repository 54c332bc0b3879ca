"""From a table to predictions on new records in four commands, as well as without privacy."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from command_work import run
from dpoptim.runs.predict import predict_file
from dpoptim.runs.saved_model import load_model
from patients import COLUMNS, SCHEMA, records, write_table


def completed(draft: str, person: bool) -> str:
    """The draft as its owner completes it, from what is publicly known."""
    assert draft.count("[columns.") == len(COLUMNS)
    assert "FILL-IN" in draft
    return SCHEMA if person else SCHEMA.replace('kind = "person"', 'kind = "drop"')


def four_commands(folder: Path, rows: int, *, person: bool, n: int) -> float:
    """Draft, complete, train, predict; returns the share of new records predicted right."""
    data = write_table(folder / "patients.csv", records(rows, 1))
    schema, out = folder / "patients.schema.toml", folder / "run"
    owner = ["--person-column", "patient"] if person else []
    run("schema", "new", str(data), "--target", "outcome", *owner)
    schema.write_text(completed(schema.read_text(), person))
    run("schema", "check", str(schema))
    text = run(
        *(
            "train",
            "--data",
            str(data),
            "--schema",
            str(schema),
            "--epsilon",
            "2",
            "--delta",
            "1e-6",
        ),
        *("--n", str(n), "--out", str(out), "--noise-seed", "7"),
    )
    assert ("per person" in text) is person
    new = records(rows, 2)
    run(
        "predict",
        str(out),
        str(write_table(folder / "new.csv", new, COLUMNS[::-1])),
        "--out",
        str(folder / "p.csv"),
    )
    with (folder / "p.csv").open(newline="") as file:
        predicted = [row["prediction"] for row in csv.DictReader(file)]
    return float(np.mean([a == b[-1] for a, b in zip(predicted, new, strict=True)]))


def without_privacy(rows: int) -> float:
    """scikit-learn's pipeline on the same columns."""
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    def split(seed: int) -> tuple[np.ndarray, list[str]]:  # type: ignore[type-arg]
        table = records(rows, seed)
        numbers = [[float(v) if v not in ("", "NA") else np.nan for v in row[2:6]] for row in table]
        return np.array([[*a, *row[6:8]] for a, row in zip(numbers, table, strict=True)], object), [
            r[-1] for r in table
        ]

    numbers = make_pipeline(SimpleImputer(strategy="median", add_indicator=True), StandardScaler())
    columns = ColumnTransformer([("n", numbers, [0, 1, 2, 3]), ("c", OneHotEncoder(), [4, 5])])
    pipeline = make_pipeline(columns, LogisticRegression(max_iter=1000))
    x, y = split(1)
    x_new, y_new = split(2)
    return float(pipeline.fit(x, y).score(x_new, y_new))


@pytest.mark.figures
@pytest.mark.parametrize(("person", "n", "points"), [(False, 20_000, 2), (True, 5_000, 4)])
def test_four_commands_come_close_to_training_without_privacy(
    tmp_path: Path, person: bool, n: int, points: int
) -> None:
    """At epsilon 2 for everything."""
    private = four_commands(tmp_path, 20_000, person=person, n=n)
    assert private >= without_privacy(20_000) - points / 100
    guarantee = json.loads((tmp_path / "run" / "certificate.json").read_text())["guarantee"]
    assert guarantee["epsilon"] <= 2
    assert guarantee["unit"] == ("person" if person else "record")


@pytest.mark.variants
def test_the_same_on_a_small_table(tmp_path: Path) -> None:
    assert four_commands(tmp_path, 1_500, person=True, n=375) > 0.55
    saved = torch.load(tmp_path / "run" / "model.pt", weights_only=True)
    assert "columns.age" in saved["schema"]
    assert (tmp_path / "run" / "schema.toml").read_text() == saved["schema"]
    assert "owner of every row" in (tmp_path / "run" / "certificate.json").read_text()
    assert "follows from its settings" in run("verify", str(tmp_path / "run"))
    report = (tmp_path / "run" / "report.html").read_text()
    assert "per person" in report


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    data = write_table(folder / "t.csv", records(400, 1))
    (folder / "s.toml").write_text(SCHEMA)
    run(
        *(
            "train",
            "--data",
            str(data),
            "--schema",
            str(folder / "s.toml"),
            "--epsilon",
            "8",
            "--delta",
            "1e-4",
        ),
        *("--epochs", "2", "--out", str(folder / "run")),
    )
    return folder / "run"


def test_prediction_is_by_column_name_and_record_by_record(trained: Path, tmp_path: Path) -> None:
    rows = records(60, 3)
    tables = {
        "whole": write_table(tmp_path / "a.csv", rows),
        "reversed": write_table(tmp_path / "b.csv", rows, COLUMNS[::-1]),
        "tail": write_table(tmp_path / "c.csv", rows[40:]),
        "only features": write_table(tmp_path / "d.csv", rows, COLUMNS[2:8]),
    }
    lines = {}
    for name, path in tables.items():
        run("predict", str(trained), str(path), "--out", str(tmp_path / "p.csv"), "--overwrite")
        lines[name] = (tmp_path / "p.csv").read_text().splitlines()
    assert lines["whole"] == lines["reversed"] == lines["only features"]
    assert lines["whole"][41:] == lines["tail"][1:]
    assert lines["whole"][0] == "prediction,probability of healthy,probability of ill"


def test_scores_need_public_truth(trained: Path, tmp_path: Path) -> None:
    table = str(write_table(tmp_path / "a.csv", records(60, 3)))
    assert "(accuracy" not in run("predict", str(trained), table, "--out", str(tmp_path / "p.csv"))
    assert "(accuracy" in run(
        "predict", str(trained), table, "--out", str(tmp_path / "q.csv"), "--data-is-public"
    )


def test_what_cannot_be_predicted_is_refused(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.csv"
    out.write_text("kept")
    short = write_table(tmp_path / "a.csv", records(5, 3), ("age", "bmi"))
    assert "has no column 'income'" in run(
        "predict", str(trained), str(short), "--out", str(out), "--overwrite", code=2
    )
    bad = write_table(tmp_path / "b.csv", [["V", "P", "old", "1", "2", "3", "north", "no", "ill"]])
    assert "column 'age' is not a number" in run(
        "predict", str(trained), str(bad), "--out", str(out), "--overwrite", code=2
    )
    assert "does not exist" in run(
        "predict", str(trained), str(tmp_path / "no.csv"), "--out", str(out), "--overwrite", code=2
    )
    assert "does not exist" in run(
        "predict", str(tmp_path), str(bad), "--out", str(out), "--overwrite", code=2
    )
    (tmp_path / "model.pt").write_bytes(b"damaged")
    assert "no model that dpoptim train wrote" in run(
        "predict", str(tmp_path), str(bad), "--out", str(out), "--overwrite", code=2
    )
    assert out.read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.csv",
        "b.csv",
        "model.pt",
        "p.csv",
    ]


def test_columns_come_along_beside_the_predictions(trained: Path, tmp_path: Path) -> None:
    """As they are in the file, also where the model learnt from them; in the order asked for."""
    rows = records(7, 3)
    table = str(write_table(tmp_path / "t.csv", rows))
    out, plain = tmp_path / "p.csv", tmp_path / "plain.csv"
    run("predict", str(trained), table, "--out", str(plain))
    keep = ("--id", "visit_id", "--id", "age", "--id", "patient")
    run("predict", str(trained), table, "--out", str(out), *keep)
    with out.open(newline="") as file, plain.open(newline="") as without:
        found, expected = list(csv.reader(file)), list(csv.reader(without))
    assert [line[3:] for line in found] == expected
    places = [COLUMNS.index(name) for name in ("visit_id", "age", "patient")]
    assert found[0][:3] == ["visit_id", "age", "patient"]
    assert [line[:3] for line in found[1:]] == [[row[place] for place in places] for row in rows]
    for more, said in (
        (("--id", "nobody", "--overwrite"), "has no column 'nobody'"),
        (("--id", "age", "--id", "age", "--overwrite"), "two columns of one name"),
        ((), "exists; name another file, or allow --overwrite"),
    ):
        said_so = run("predict", str(trained), table, "--out", str(out), *more, code=2)
        assert said in " ".join(said_so.split())
    with out.open(newline="") as file:
        assert list(csv.reader(file)) == found, "as it was"


def test_predictions_do_not_replace_records_or_model(tmp_path: Path) -> None:
    """Nor by another path to the same file; before a model is looked at."""
    table = write_table(tmp_path / "t.csv", records(5, 0))
    (tmp_path / "link.csv").symlink_to(table)
    before = table.read_bytes()
    for out in (table, tmp_path / "link.csv"):
        with pytest.raises(ValueError, match="would replace the records to predict"):
            predict_file(tmp_path / "run", table, out)
    assert table.read_bytes() == before
    (tmp_path / "model.pt").touch()
    with pytest.raises(ValueError, match="would replace the model"):
        predict_file(tmp_path, table, tmp_path / "model.pt")
    for out in (tmp_path, tmp_path / "none" / "p.csv"):
        with pytest.raises(ValueError, match="a file's name, in a folder that is there"):
            predict_file(tmp_path, table, out)


def test_a_number_is_predicted_in_its_units(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 10, 2000)
    path = tmp_path / "t.csv"
    path.write_text("x,price\n" + "".join(f"{a:.3f},{1000 * a + 500:.1f}\n" for a in x))
    text = run(
        *(
            "train",
            "--data",
            str(path),
            "--target",
            "price",
            "--task",
            "regression",
            "--data-is-public",
        ),
        *("--epsilon", "4", "--delta", "1e-5", "--n", "1600", "--out", str(tmp_path / "run")),
    )
    assert "R2, private" in text
    assert run(
        "predict",
        str(tmp_path / "run"),
        str(path),
        "--out",
        str(tmp_path / "p.csv"),
        "--data-is-public",
    )
    predicted = np.array([float(line) for line in (tmp_path / "p.csv").read_text().split()[1:]])
    assert np.abs(predicted - (1000 * x + 500)).mean() < 1000
    assert load_model(tmp_path / "run").target_bounds is not None
    refused = run(
        "train",
        "--data",
        str(path),
        "--target",
        "price",
        "--task",
        "regression",
        "--delta",
        "1e-5",
        code=2,
    )
    assert "--target-bounds is missing" in refused


def test_the_npz_that_everybody_has(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (300, 8, 8), dtype=np.uint8)
    labels = (images[:, :, :4].mean((1, 2)) > images[:, :, 4:].mean((1, 2))).astype(np.uint8)
    np.savez(
        tmp_path / "mnist.npz",
        x_train=images[:250],
        y_train=labels[:250],
        x_test=images[250:],
        y_test=labels[250:],
    )
    text = run(
        *(
            "train",
            "--data",
            str(tmp_path / "mnist.npz"),
            "--data-is-public",
            "--epsilon",
            "8",
            "--delta",
            "1e-4",
        ),
        *("--epochs", "2", "--out", str(tmp_path / "run"), "--model", "cnn"),
    )
    assert "accuracy, private" in text
    run(
        "predict",
        str(tmp_path / "run"),
        str(tmp_path / "mnist.npz"),
        "--out",
        str(tmp_path / "p.csv"),
    )
    assert len((tmp_path / "p.csv").read_text().splitlines()) == 51  # of x_test
    np.savez(tmp_path / "other.npz", x=np.zeros((3, 9, 9), np.uint8))
    text = run(
        "predict",
        str(tmp_path / "run"),
        str(tmp_path / "other.npz"),
        "--out",
        str(tmp_path / "q.csv"),
        code=2,
    )
    assert "records have shape (9, 9)" in text


def test_solvers_protect_persons_too(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SCHEMA)
    path = write_table(tmp_path / "t.csv", records(400, 1))
    common = ["train", "--data", str(path), "--schema", str(tmp_path / "s.toml"), "--delta", "1e-4"]
    out = tmp_path / "run"
    solver = ["--method", "noisy-gd", "--set", "steps=5", "--out", str(out)]
    assert "per person" in run(*common, *solver, "--records-per-person", "3")
    certificate = json.loads((out / "certificate.json").read_text())
    assert certificate["guarantee"]["unit"] == "person"
    assert "at most 3 of them" in str(certificate["basis"]["enforced"])
    assert certificate["plan"]["method"]["options"] == {"steps": 5}
    run("verify", str(out))
    assert "no setting 'rounds'; it has l2, steps" in run(
        *common, "--method", "noisy-gd", "--set", "rounds=5", code=2
    )
    assert "predicts numbers" in run(*common, "--method", "sufficient-statistics", code=2)
    assert "not what the schema says" in run(*common, "--person-column", "visit_id", code=2)
    assert "does not fit the target" in run(*common, "--task", "regression", code=2)


@pytest.mark.set_aside("dp-sgd")
@pytest.mark.parametrize("method", ["dp-sgd", "momentum-gd"])
def test_weights_of_classes_are_public_and_count(method: str, tmp_path: Path) -> None:
    """A rare class is found more often at the same guarantee, which says whose word the weights
    are; they are written down with the run.
    """
    draws = np.random.default_rng(1)
    y = draws.random(3000) < 0.1
    rows = (f"{a:.3f},{'a=1' if ill else 'b'}\n" for a, ill in zip(draws.normal(y), y, strict=True))
    data, schema = tmp_path / "t.csv", tmp_path / "s.toml"
    data.write_text("x,y\n" + "".join(rows))
    schema.write_text(
        '[columns.x]\nkind = "number"\nbounds = [-4, 5]\n'
        '[columns.y]\nkind = "target"\nclasses = ["a=1", "b"]\n'
    )
    common = ["train", "--data", str(data), "--schema", str(schema), "--delta", "1e-5"]
    found, promises = [], []
    for weights in ([], ["--class-weight", "a=1=30", "--class-weight", "b=1.5"]):
        out = tmp_path / f"run{len(weights)}"
        predicted = out.with_suffix(".csv")
        run(*common, "--method", method, *weights, "--out", str(out), "--noise-seed", "1")
        run("predict", str(out), str(data), "--out", str(predicted))
        with predicted.open(newline="") as file:
            found.append(np.mean([row["prediction"] == "a=1" for row in csv.DictReader(file)]))
        promises.append(json.loads((out / "certificate.json").read_text()))
        assert ("weights of the classes are public" in str(promises[-1]["basis"])) == bool(weights)
        assert ("b 0.05" in (out / "report.html").read_text()) == bool(weights)
    assert found[1] > found[0] + 0.1
    assert promises[0]["guarantee"] == promises[1]["guarantee"]
    assert promises[1]["training"]["class weights"] == "a=1 1, b 0.05 (public)"
    for wrong, said in (("c=1", "The classes are a=1, b"), ("b", "CLASS=WEIGHT such as yes=5")):
        assert said in run(*common, "--class-weight", wrong, code=2)
    schema.write_text(
        '[columns.y]\nkind = "category"\ncategories = ["a=1", "b"]\n'
        '[columns.x]\nkind = "target"\nbounds = [-4, 5]\n'
    )
    assert "this target is a number" in run(*common, "--class-weight", "b=1", code=2)


def test_sums_predict_numbers(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    x = draws.uniform(-1, 1, (2_000, 2))
    lines = [f"{a},{b},{2 * a - b},{i // 2}" for i, (a, b) in enumerate(x.tolist())]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,y,owner", *lines]) + "\n")
    given = ["--target", "y", "--task", "regression", "--target-bounds=-3,3", "--no-normalise"]
    text = run(
        *("train", "--data", str(tmp_path / "t.csv"), "--data-is-public", "--no-compare"),
        *(*given, "--person-column", "owner", "--delta", "1e-4"),
        *("--method", "sufficient-statistics", "--out", str(tmp_path / "run")),
    )
    assert "per person" in text
    assert float(re.findall(r"R2, private\s+(\S+)", text)[0]) > 0.9


def test_what_a_schema_drops_or_does_not_match_is_said(tmp_path: Path) -> None:
    """A dropped column may be a person's; "yes" for "Y" made a column of nothing, in silence."""
    data, schema, out = tmp_path / "t.csv", tmp_path / "s.toml", tmp_path / "run"
    rows = (f"{i // 3},{i},{'yes' if i % 2 else 'no'},{i % 2}" for i in range(600))
    data.write_text("\n".join(["patient,visit_id,smoker,y", *rows]) + "\n")
    columns = {
        "patient": 'kind = "drop"',
        "visit_id": 'kind = "drop"',
        "smoker": 'kind = "category"\ncategories = ["Y", "N"]',
        "y": 'kind = "target"\nclasses = ["0", "1"]',
    }

    def write() -> None:
        entries = (f"[columns.{name}]\n{entry}\n" for name, entry in columns.items())
        schema.write_text("".join(entries))

    write()
    assert "read off the records" not in run("schema", "check", schema)
    said = "Note: column 'smoker': no record has one of its categories"
    checked = run("schema", "check", schema, "--data", data)
    assert "is read off the records: it is private" in checked
    assert said in checked
    common = ["train", "--data", data, "--schema", schema, "--epsilon", "1", "--delta", "1e-5"]
    trained = run(*common, "--out", out, "--noise-seed", "1")
    assert said not in trained  # which a record would decide, and nobody paid for
    assert said in run("predict", out, data, "--out", tmp_path / "p.csv")
    dropped = "no dropped column says which person's a record is (dropped: patient, visit_id)"
    assert dropped in str(json.loads((out / "certificate.json").read_text())["basis"])
    run("verify", out)
    columns |= {"patient": 'kind = "person"', "smoker": columns["smoker"].replace("Y", "yes")}
    write()
    assert said not in run("schema", "check", schema, "--data", data)
    out = tmp_path / "persons"
    run(*common, "--out", out, "--noise-seed", "1")
    assert "no dropped column" not in (out / "certificate.json").read_text()
