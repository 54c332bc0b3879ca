"""From a table to predictions on new rows by the command line, protecting persons with several
rows each at epsilon 2 for everything; and scikit-learn without privacy on the same rows.
"""

import csv
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

SCHEMA = """
[columns.visit]
kind = "drop"

[columns.patient]
kind = "person"

[columns.age]
kind = "number"
bounds = [18, 95]

[columns.pressure]
kind = "number"
bounds = [80, 220]
fill = 130

[columns.smoker]
kind = "category"
categories = ["no", "yes"]

[columns.outcome]
kind = "target"
classes = ["healthy", "ill"]
"""


def write_visits(path: Path, people: int, seed: int) -> None:
    """Made-up visits, one to three of each person."""
    draw = random.Random(seed)
    rows = []
    for person in range(people):
        age, smoker = draw.uniform(20, 90), draw.random() < 0.3
        for _ in range(draw.randint(1, 3)):
            pressure = draw.gauss(130, 17)
            ill = draw.gauss((age - 55) / 15 + (pressure - 130) / 12 + smoker, 1) > 0.5
            gap = "" if draw.random() < 0.1 else f"{pressure:.0f}"
            row = [
                len(rows),
                f"P{person}",
                f"{age:.0f}",
                gap,
                "yes" if smoker else "no",
                "ill" if ill else "healthy",
            ]
            rows.append(row)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["visit", "patient", "age", "pressure", "smoker", "outcome"])
        writer.writerows(rows)


def without_privacy(old: Path, new: Path) -> float:
    """The share of new visits that scikit-learn predicts right, from the same columns."""

    def read(path: Path) -> tuple[list[list[object]], list[str]]:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        numbers = [[float(row[name] or "nan") for name in ("age", "pressure")] for row in rows]
        features = [[*two, row["smoker"]] for two, row in zip(numbers, rows, strict=True)]
        return features, [row["outcome"] for row in rows]

    numbers = make_pipeline(SimpleImputer(add_indicator=True), StandardScaler())
    columns = ColumnTransformer([("numbers", numbers, [0, 1]), ("smoker", OneHotEncoder(), [2])])
    model = make_pipeline(columns, LogisticRegression()).fit(*read(old))
    return float(model.score(*read(new)))


def dpoptim(*arguments: str) -> None:
    print("$ dpoptim", *arguments)
    subprocess.run([sys.executable, "-m", "dpoptim", *arguments], check=True)


def main() -> float:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        old, new, schema, run = (
            str(folder / part) for part in ("old.csv", "new.csv", "schema.toml", "run")
        )
        write_visits(Path(old), 4_000, seed=0)
        write_visits(Path(new), 500, seed=1)
        dpoptim(
            "schema",
            "new",
            old,
            "--target",
            "outcome",
            "--person-column",
            "patient",
            "--out",
            schema,
        )
        # its owner fills in what is publicly known: bounds, categories, classes
        Path(schema).write_text(SCHEMA)
        dpoptim(
            "train",
            "--data",
            old,
            "--schema",
            schema,
            "--n",
            "4000",
            "--epsilon",
            "2",
            "--delta",
            "1e-6",
            "--out",
            run,
        )
        dpoptim("predict", run, new, "--out", str(folder / "predicted.csv"))
        with (
            Path(new).open(newline="") as file,
            (folder / "predicted.csv").open(newline="") as predictions,
        ):
            pairs = list(zip(csv.DictReader(file), csv.DictReader(predictions), strict=True))
        plain = without_privacy(Path(old), Path(new))
    right = sum(a["outcome"] == b["prediction"] for a, b in pairs) / len(pairs)
    print(f"{right:.1%} of the new visits are predicted right; {plain:.1%} without privacy")
    return right


if __name__ == "__main__":
    main()
