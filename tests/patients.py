"""A made-up table as people have them: raw units, gaps, categories, identifiers, several rows a
person.
"""

import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

COLUMNS = ("visit_id", "patient", "age", "income", "bmi", "pressure", "region", "smoker", "outcome")
REGIONS = ("north", "south", "east", "west", "islands")
SCHEMA = """
[columns.visit_id]
kind = "drop"

[columns.patient]
kind = "person"

[columns.age]
kind = "number"
bounds = [18, 95]
unit = "years"

[columns.income]
kind = "number"
bounds = [0, 250000]
fill = 40000

[columns.bmi]
kind = "number"
bounds = [10, 60]
fill = 26

[columns.pressure]
kind = "number"
bounds = [80, 220]

[columns.region]
kind = "category"
categories = ["north", "south", "east", "west", "islands"]

[columns.smoker]
kind = "category"
categories = ["no", "yes"]

[columns.outcome]
kind = "target"
classes = ["healthy", "ill"]
"""


def records(rows: int, seed: int, *, rows_per_person: float = 4.0) -> list[list[str]]:
    """Rows of made-up visits; each patient has between one and ten or so of them."""
    rng = np.random.default_rng(seed)
    people = int(rows / rows_per_person)
    person = np.concatenate([np.arange(people), rng.integers(0, people, rows - people)])
    rng.shuffle(person)
    age_of, income_of = rng.uniform(18, 90, people), rng.lognormal(10.6, 0.6, people)
    region_of, smokes = rng.integers(0, 5, people), rng.random(people) < 0.3
    age = age_of[person] + rng.uniform(0, 2, rows)
    income = income_of[person] * rng.lognormal(0, 0.1, rows)
    bmi, pressure = rng.normal(26, 4.5, rows), rng.normal(130, 17, rows)
    score = (
        (age - 54) / 21
        + (bmi - 26) / 4.5 * 0.8
        + (pressure - 130) / 17 * 0.7
        + 1.1 * smokes[person]
    )
    score = (
        score
        - 0.9 * np.log(income / 40_000)
        + np.array([0.0, 0.5, -0.5, 0.2, -0.2])[region_of[person]]
    )
    ill = rng.random(rows) < 1 / (1 + np.exp(-0.9 * (score - 0.3)))
    gaps: NDArray[np.bool_] = rng.random((rows, 3)) < [0.1, 0.15, 0.05]
    return [
        [
            f"V{100_000 + i}",
            f"P{person[i]:05d}",
            f"{age[i]:.1f}",
            "" if gaps[i, 0] else f"{income[i]:.0f}",
            "NA" if gaps[i, 1] else f"{bmi[i]:.1f}",
            f"{pressure[i]:.0f}",
            REGIONS[region_of[person[i]]],
            "" if gaps[i, 2] else ("yes" if smokes[person[i]] else "no"),
            "ill" if ill[i] else "healthy",
        ]
        for i in range(rows)
    ]


def write_table(path: Path, rows: list[list[str]], columns: tuple[str, ...] = COLUMNS) -> Path:
    """A CSV file with the columns in this order."""
    places = [COLUMNS.index(name) for name in columns]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([row[place] for place in places] for row in rows)
    return path
