"""What stands for no value: never a number, and never a person who owns all rows without one."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpoptim.data import load_table, parse_schema
from dpoptim.data.encoding import encode_table
from dpoptim.data.schema_files import draft, to_toml

NUMBER = '[columns.a]\nkind = "number"\nbounds = [0, 10]\nfill = 0\n'
DATE = '[columns.d]\nkind = "date"\nbounds = [2020-01-01, 2020-01-11]\n'
PERSONS = '[columns.p]\nkind = "person"\n[columns.y]\nkind = "target"\nclasses = ["-9", "1"]\n'


def parquet(path: Path, columns: dict[str, Any]) -> Path:
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pa.table(columns), path)
    return path


def csv(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def features(path: Path, schema: str) -> list[list[float]]:
    parts = [part.x for part in encode_table(path, parse_schema(schema), labels=False)]
    found: list[list[float]] = np.concatenate(parts).tolist()
    return found


@pytest.mark.parametrize("nobody", ["", "NA", "NULL", "None", "nan", "<NA>", "#N/A"])
def test_rows_of_nobody_are_not_one_persons(nobody: str, tmp_path: Path) -> None:
    """Two people with a gap there would share a person, and each move two people's gradients."""
    path = csv(tmp_path / "t.csv", f"a,p,y\n1,Ann,1\n2,{nobody},1\n3,{nobody},1\n")
    with pytest.raises(ValueError, match=r"record 2 belongs to nobody: column 'p' .* Fix: give it"):
        load_table(path, parse_schema(NUMBER + PERSONS))


def test_people_may_be_called_null(tmp_path: Path) -> None:
    """Where the schema says so; an empty name is nobody's all the same."""
    named = parse_schema(NUMBER + PERSONS.replace('"person"', '"person"\nany_name = true'))
    assert parse_schema(to_toml(named)) == named
    path = csv(tmp_path / "t.csv", "a,p,y\n1,Null,1\n2,NA,1\n3,Null,1\n")
    persons = load_table(path, named).persons
    assert persons is not None
    assert persons.tolist() == [0, 1, 0]
    path = csv(tmp_path / "t.csv", "a,p,y\n1,Null,1\n2, ,1\n")
    with pytest.raises(ValueError, match="record 2 belongs to nobody"):
        load_table(path, named)
    with pytest.raises(ValueError, match="column 'p': any_name must be true or false, got 1"):
        parse_schema(NUMBER + PERSONS.replace('"person"', '"person"\nany_name = 1'))


@pytest.mark.parametrize("gap", [None, float("nan")])
def test_gaps_of_a_typed_file_are_nobody_whatever_people_are_called(
    gap: Any, tmp_path: Path
) -> None:
    named = parse_schema(NUMBER + PERSONS.replace('"person"', '"person"\nany_name = true'))
    for name in ("Ann", 7.0):
        columns = {"a": [1, 2], "p": [name, gap if name == 7.0 else None], "y": [1, 1]}
        path = parquet(tmp_path / "t.parquet", columns)
        with pytest.raises(ValueError, match="record 2 belongs to nobody"):
            load_table(path, named)


def test_gaps_among_numbered_persons_of_a_parquet_file(tmp_path: Path) -> None:
    for gap in (None, float("nan")):
        columns = {"a": [1, 2, 3], "p": [7.0, gap, gap], "y": [1, 1, 1]}
        path = parquet(tmp_path / "t.parquet", columns)
        with pytest.raises(ValueError, match="record 2 belongs to nobody"):
            load_table(path, parse_schema(NUMBER + PERSONS))


@pytest.mark.parametrize("word", ["<NA>", "#N/A", "n.a.", "NaT", "null"])
def test_words_that_programs_write_for_nothing(word: str, tmp_path: Path) -> None:
    path = csv(tmp_path / "t.csv", f"a,d\n{word},{word}\n10,2020-01-11\n")
    assert features(path, NUMBER + DATE) == [[-1, 1, 0], [1, 0, 1]]


MARKED = 'missing = ["-", -9, "1900-01-01"]\n' + NUMBER + DATE


def test_a_schema_says_what_else_stands_for_no_value(tmp_path: Path) -> None:
    """Where it did not, -9 was moved to the lowest value."""
    text = "a,d\n-,1900-01-01\n-9.0,-\n -9 ,2020-01-11\n10,2020-01-06\n"
    empty, last = [-1, 1, 0], [1, 0, 0]
    expected = [empty, empty, [-1, 1, 1], last]
    assert features(csv(tmp_path / "t.csv", text), MARKED) == expected
    days = np.array(["1900-01-01", "NaT", "2020-01-11", "2020-01-06"], dtype="datetime64[D]")
    path = parquet(tmp_path / "t.parquet", {"a": [None, -9, -9, 10], "d": days})
    assert features(path, MARKED) == expected


def test_a_column_has_its_own(tmp_path: Path) -> None:
    schema = MARKED + "[columns.b]\n" + NUMBER.split("\n", 1)[1] + "missing = [0]\n"
    path = csv(tmp_path / "t.csv", "a,b,d\n0,0,\n1,-9,\n")
    assert [row[-2:] for row in features(path, schema)] == [[-1, 1], [-1, 0]]
    none = MARKED + "[columns.b]\n" + NUMBER.split("\n", 1)[1] + "missing = []\n"
    for each in (schema, none):
        assert parse_schema(to_toml(parse_schema(each))) == parse_schema(each)


def test_it_goes_for_persons_and_targets_and_not_where_a_list_says_what_counts(
    tmp_path: Path,
) -> None:
    schema = 'missing = ["-9"]\n' + NUMBER + PERSONS
    path = csv(tmp_path / "t.csv", "a,p,y\n1,8,-9\n2,-9,1\n")
    with pytest.raises(ValueError, match="record 2 belongs to nobody"):
        load_table(path, parse_schema(schema))
    path = csv(tmp_path / "t.csv", "a,p,y\n1,8,-9\n2,9,1\n")
    assert load_table(path, parse_schema(schema)).y.tolist() == [0, 1]
    number = schema.replace('classes = ["-9", "1"]', "bounds = [-10, 10]")
    with pytest.raises(ValueError, match="record 1 has no value of the target 'y'"):
        load_table(path, parse_schema(number))


def test_kept_columns_are_as_they_are(tmp_path: Path) -> None:
    path = csv(tmp_path / "t.csv", "a,d\n-9,\n")
    (part,) = encode_table(path, parse_schema(MARKED), labels=False, keep=["a"])
    assert list(part.kept[0]) == ["-9"]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("missing = -9\n", r"schema: missing must be a list of texts"),
        ("missing = [-9.5]\n", r"schema: missing must be a list of texts"),
        ('missing = ["-", " -"]\n', r"schema: missing names a value twice"),
    ],
)
def test_bad_lists_are_refused_by_name(entry: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_schema(entry + NUMBER)
    with pytest.raises(ValueError, match=said.replace("schema: ", "schema: column 'a': ")):
        parse_schema(NUMBER + entry)


def test_a_draft_says_how(tmp_path: Path) -> None:
    text = draft(csv(tmp_path / "t.csv", "a\n1\n"))
    line = next(line for line in text.splitlines() if "missing" in line)
    assert parse_schema(line.removeprefix("# ") + "\n" + NUMBER).missing == ("-", "-999")


def test_decimals_of_a_typed_file_have_points_whatever_a_schema_says_of_texts(
    tmp_path: Path,
) -> None:
    """1.500 was read as 1500 where thousands have points."""
    prices = [Decimal("1.500"), None, Decimal("10.000")]
    path = parquet(tmp_path / "t.parquet", {"a": prices, "p": prices[:1] * 3, "y": ["1"] * 3})
    for marks in ("", 'decimal = ","\nthousands = "."\n'):
        schema = parse_schema(marks + NUMBER + PERSONS)
        np.testing.assert_allclose(load_table(path, schema).x, [[-0.7, 0], [-1, 1], [1, 0]])


def test_long_decimals_that_name_persons_keep_their_digits(tmp_path: Path) -> None:
    ids = [Decimal(12345678901234567890), Decimal(12345678901234567891)]
    path = parquet(tmp_path / "t.parquet", {"a": [1, 2], "p": ids, "y": ["1", "1"]})
    persons = load_table(path, parse_schema(NUMBER + PERSONS)).persons
    assert persons is not None
    assert persons.tolist() == [0, 1]
