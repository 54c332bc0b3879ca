"""One entry of a schema for columns that differ by a number."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpoptim.data import load_table, parse_schema
from dpoptim.data.column_names import FEWEST, names_of, runs_of
from dpoptim.data.schema_files import draft, to_toml

PIXELS = (
    '[columns."pixel_{0..299}"]\nkind = "number"\nbounds = [0, 255]\n'
    '[columns.pixel_7]\nkind = "drop"\n'
    '[columns.y]\nkind = "target"\nclasses = ["0", "1"]\n'
)


def test_three_hundred_columns_are_one_entry(tmp_path: Path) -> None:
    schema = parse_schema(PIXELS)
    names = [f"pixel_{i}" for i in range(300)]
    assert [column.name for column in schema.columns] == [*names, "y"]
    assert schema.width == 299, "one has an entry of its own"
    assert parse_schema(to_toml(schema)) == schema
    path = tmp_path / "t.csv"
    path.write_text(",".join([*names, "y"]) + "\n" + ",".join([*map(str, range(300)), "1"]))
    x = load_table(path, schema).x
    kept = np.array([i for i in range(300) if i != 7])
    np.testing.assert_allclose(x[0], np.minimum(kept, 255) / 127.5 - 1, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("a{8..11}b", ["a8b", "a9b", "a10b", "a11b"]),
        ("a{008..011}", ["a008", "a009", "a010", "a011"]),
        ("{3..3}", ["3"]),
        ("a{1..}", ["a{1..}"]),
        ("a{1,2}", ["a{1,2}"]),
        ("plain", ["plain"]),
    ],
)
def test_what_a_range_stands_for(name: str, names: list[str]) -> None:
    assert names_of(name) == names


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[columns."a{3..1}"]\nkind = "drop"\n', "lowest number first"),
        ('[columns."a{0..100000}"]\nkind = "drop"\n', "at most 100,000"),
        (
            '[columns."a{0..3}"]\nkind = "drop"\n[columns."a{3..5}"]\nkind = "drop"\n',
            "'a3' is in 'a{0..3}' and in 'a{3..5}'",
        ),
        ('[columns."a{0..3}"]\nkind = "target"\nclasses = ["x", "z"]\n', "both of kind 'target'"),
    ],
)
def test_ranges_that_are_none_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_schema(text)


@given(st.lists(st.sampled_from("ab") | st.integers(0, 12).map(lambda n: f"x{n}"), unique=True))
def test_a_draft_has_all_columns_in_order(names: list[str]) -> None:
    runs = list(runs_of([(name, None) for name in names]))
    assert [name for run, _, _ in runs for name in names_of(run)] == names
    assert all(count == len(names_of(run)) for run, count, _ in runs)
    assert all(count == 1 or count >= FEWEST for _, count, _ in runs)


def test_drafts_write_columns_alike_as_a_range(tmp_path: Path) -> None:
    """But neither the target, persons and identifiers among them, nor columns of another type."""
    path = tmp_path / "t.csv"
    names = ["id", *(f"p{i:02}" for i in range(8, 14)), "q0", "q1", "who", "y"]
    path.write_text(",".join(names) + "\n")
    text = draft(path, target="y", person="who")
    assert '[columns."p{08..13}"]\nkind = "FILL-IN"' in text
    assert "[columns.q0]" in text
    assert "[columns.q1]" in text
    text = draft(path, target="p10", person="who")
    assert [line for line in text.splitlines() if line.startswith("[columns.p")] == [
        f"[columns.p{i:02}]" for i in range(8, 14)
    ], "no four are left side by side"
