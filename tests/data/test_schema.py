"""A schema says what is public about a table, is complete or refused, and encodes each record by
itself.
"""

import re
from datetime import date, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpoptim.data import Column, Schema, load_table, parse_schema, read_schema
from dpoptim.data.encoding import encode_table
from dpoptim.data.public_schemas import from_public_table
from dpoptim.data.schema_files import draft, to_toml
from patients import COLUMNS, SCHEMA, records, write_table

NUMBER = '[columns.a]\nkind = "number"\nbounds = [0, 10]\n'


def encoded(tmp_path: Path, text: str, schema: str, name: str = "t.csv") -> np.ndarray:  # type: ignore[type-arg]
    path = tmp_path / name
    path.write_text(text)
    return np.concatenate(
        [part.x for part in encode_table(path, parse_schema(schema), labels=False)]
    )


def test_numbers_are_scaled_by_bounds_and_gaps_are_filled(tmp_path: Path) -> None:
    schema = NUMBER + '[columns.b]\nkind = "number"\nbounds = [-1, 3]\nfill = 3\n'
    x = encoded(tmp_path, "b,ignored,a\n1,x,0\nNA,,10\n-7,y,999\n3,z,\n", schema)
    assert x.tolist() == [[-1, 0, 0], [1, 1, 1], [1, -1, 0], [0, 1, 0]]


def test_decimal_commas(tmp_path: Path) -> None:
    """In features and targets; a point is then no part of a number, thousands least of all."""
    comma = 'decimal = ","\n' + NUMBER
    assert encoded(tmp_path, "b;a\nx;2,5\nx; 1e1\nx;NA\n", comma).tolist() == [[-0.5], [1], [0]]
    target = '[columns.y]\nkind = "target"\nbounds = [0, 4]\n'
    path = tmp_path / "y.csv"
    path.write_text('a,y\n"1,0","3,0"\n')
    (part,) = encode_table(path, parse_schema(comma + target), labels=True)
    assert part.y is not None
    assert part.y.tolist() == [0.5]
    with pytest.raises(
        ValueError, match=r"decimal comma and no mark of thousands.*decimal = \"\.\""
    ):
        encoded(tmp_path, "b;a\nx;1.234,5\n", comma)
    with pytest.raises(
        ValueError, match=r"decimal point and no mark of thousands.*decimal = \",\""
    ):
        encoded(tmp_path, "b;a\nx;2,5\n", NUMBER)
    path.write_text("a;b;y\n0,5;1;no\n2,5;2;yes\n")
    assert '# decimal = ","' in draft(path, target="y")
    found = from_public_table(path, target="y")
    assert (found.decimal, found.features[0].bounds) == (",", (0.5, 2.5))
    path.write_text("a,b,y\n0.5,1,no\n2.5,2,yes\n")
    assert "decimal" not in draft(path, target="y")
    assert from_public_table(path, target="y").decimal == "."


def test_categories_are_one_feature_each_and_others_none(tmp_path: Path) -> None:
    schema = '[columns.c]\nkind = "category"\ncategories = ["u", "v", 3]\n'
    x = encoded(tmp_path, 'c\nv\n u \n3\nnew\n""\n', schema)
    assert x.tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0]]


def test_the_bound_on_rows_holds(tmp_path: Path) -> None:
    path = write_table(tmp_path / "p.csv", records(300, 0))
    schema = parse_schema(SCHEMA)
    (part,) = encode_table(path, schema, labels=False)
    assert schema.row_norm is not None
    assert part.x.shape == (300, schema.width)
    assert np.linalg.norm(part.x, axis=1).max() <= schema.row_norm


def test_a_record_is_encoded_by_itself_and_by_column_name(tmp_path: Path) -> None:
    rows, schema = records(200, 0), parse_schema(SCHEMA)
    (whole,) = encode_table(write_table(tmp_path / "a.csv", rows), schema, labels=False)
    (tail,) = encode_table(
        write_table(tmp_path / "b.csv", rows[150:], COLUMNS[::-1]), schema, labels=False
    )
    assert np.array_equal(whole.x[150:], tail.x)


def test_scaling_record_by_record(tmp_path: Path) -> None:
    schema = 'scaling = "unit-norm"\n[columns.a]\nkind = "number"\n[columns.b]\nkind = "number"\n'
    assert encoded(tmp_path, "a,b\n3,4\n0,0\n", schema).tolist() == [
        [np.float32(0.6), np.float32(0.8)],
        [0, 0],
    ]
    with pytest.raises(ValueError, match="record 2 has a feature that is NaN or infinite"):
        encoded(tmp_path, "a,b\n3,4\n1,\n", schema)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("columns = 3", "a table"),
        ("[columns.a", "no TOML"),
        ("[columns]", "nothing to learn from"),
        ('[columns.a]\nkind = "numbre"', "'a': kind must be one of number"),
        ('[columns.a]\nkind = "number"', "'a' has no bounds"),
        ('[columns.a]\nkind = "number"\nbounds = ["FILL-IN", "FILL-IN"]', "'a' has no bounds"),
        ('[columns.a]\nkind = "number"\nbounds = [3, 3]', "the lower first"),
        ('[columns.a]\nkind = "number"\nbounds = [3, inf]', "finite"),
        ('[columns.a]\nkind = "number"\nbounds = [0, true]', "a bound must be a number"),
        ('[columns.a]\nkind = "number"\nbounds = [0, 1]\nfill = 2', "fill 2 is outside"),
        ('[columns.a]\nkind = "number"\nbounds = [0, 1]\ncategories = ["x"]', "not 'categories'"),
        ('[columns.a]\nkind = "category"', "list its categories"),
        ('[columns.a]\nkind = "category"\ncategories = ["x", "x"]', "twice"),
        ('[columns.a]\nkind = "category"\ncategories = ["FILL-IN"]', "fill in its categories"),
        ('[columns.a]\nkind = "category"\ncategories = [1.5]', "a list of texts"),
        (
            '[columns.a]\nkind = "number"\nbounds = ["FILL-IN", 3]\n'
            '[columns."b c"]\nkind = "category"\ncategories = ["FILL-IN"]',
            "2 columns are to be filled in: 'a', 'b c'",
        ),
        (NUMBER + '[columns.y]\nkind = "target"', "needs either classes"),
        (NUMBER + '[columns.y]\nkind = "target"\nclasses = ["one"]', "needs either classes"),
        (NUMBER + '[columns.p]\nkind = "person"\n[columns.q]\nkind = "person"', "p and q are both"),
        (NUMBER + "surplus = 3\n", "not 'surplus'"),
        ('scaling = "z-score"\n' + NUMBER, "scaling must be one of"),
        ('decimal = ";"\n' + NUMBER, "decimal must be one of '.', ','"),
        ("x = 1\n" + NUMBER, "unknown entry 'x'"),
    ],
)
def test_incomplete_schemas_are_refused(schema: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_schema(schema)


names = st.text(min_size=1, max_size=12).filter(
    lambda text: text.isprintable() and text.strip() == text
)
finite = st.floats(-1e6, 1e6)


@given(names, st.lists(names, min_size=2, max_size=4, unique=True), finite, st.floats(0.5, 1e6))
def test_what_is_written_is_read_back(
    name: str, texts: list[str], low: float, width: float
) -> None:
    if "FILL-IN" in texts or name in ("#c", "#y"):
        return
    schema = Schema(
        (
            Column(name, "number", bounds=(low, low + width), fill=low, unit="units"),
            Column("#c", "category", categories=tuple(texts)),
            Column("#y", "target", classes=tuple(texts)),
        ),
        decimal="," if low < 0 else ".",
    )
    assert parse_schema(to_toml(schema)) == schema


def test_a_draft_reads_no_value(tmp_path: Path) -> None:
    """Two tables with the same columns give the same draft, and a damaged one gives it as well."""
    a = write_table(tmp_path / "a.csv", records(50, 0))
    b = tmp_path / "b.csv"
    b.write_bytes(a.read_bytes().splitlines(keepends=True)[0] + b"1e400,\xff\xfe,not a number")
    drafts = [draft(path, target="outcome", person="patient") for path in (a, b)]
    assert drafts[0] == drafts[1]
    assert 'kind = "person"' in drafts[0]
    assert 'kind = "drop"  # by its name' in drafts[0]  # visit_id
    with pytest.raises(ValueError, match=r"columns are to be filled in: 'age', .*'outcome'\."):
        parse_schema(drafts[0])
    with pytest.raises(ValueError, match="no column 'nothing'"):
        draft(a, target="nothing")


def test_a_public_table_describes_itself(tmp_path: Path) -> None:
    path = write_table(tmp_path / "p.csv", records(500, 0))
    schema = from_public_table(path, target="outcome", person="patient")
    kinds = {column.name: column.kind for column in schema.columns}
    assert kinds["visit_id"] == "drop"
    assert (kinds["age"], kinds["region"], kinds["smoker"]) == ("number", "category", "category")
    assert {column.name for column in schema.columns if column.fill is not None} == {
        "income",
        "bmi",
    }
    assert parse_schema(to_toml(schema)) == schema
    data = load_table(path, schema, public=True)
    assert data.class_names == ("healthy", "ill")
    assert abs(data.x).max() <= 1
    assert data.units < len(data.x) == 500


def test_a_number_to_predict(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,y\n1,100\n2,50\n3,999\n")
    schema = parse_schema(NUMBER + '[columns.y]\nkind = "target"\nbounds = [0, 100]\n')
    data = load_table(path, schema)
    assert data.y.tolist() == [1, 0, 1]
    assert data.y.dtype == np.float32
    assert data.outputs == 1
    path.write_text("a,y\n1,\n")
    with pytest.raises(ValueError, match="record 1 has no value of the target 'y'"):
        load_table(path, schema)


def test_schema_files_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"s\.toml is not UTF-8"):
        read_schema(tmp_path / "s.toml")
    (tmp_path / "s.toml").write_text("columns = 1")
    with pytest.raises(ValueError, match=r"s\.toml: schema: "):
        read_schema(tmp_path / "s.toml")
    table = write_table(tmp_path / "t.csv", records(5, 0), COLUMNS[:-2])
    with pytest.raises(ValueError, match=r"t\.csv has no column 'smoker', 'outcome'"):
        load_table(table, parse_schema(SCHEMA))


def test_booleans_of_a_file_that_has_them_need_no_filling_in(tmp_path: Path) -> None:
    """Their two values are known by their type, without a look at one."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "t.parquet"
    columns = {"new": [True, None, False], "old": [True, True, True], "x": [0.0, 1.0, 2.0]}
    parquet.write_table(pa.table(columns), path)
    text = draft(path, target="old")
    assert text.count("FILL-IN") == 2  # the bounds of x
    schema = parse_schema(text.replace('["FILL-IN", "FILL-IN"]', "[0, 2]"))
    data = load_table(path, schema)
    assert data.class_names == ("False", "True")
    assert data.y.tolist() == [1, 1, 1]
    assert data.x[:, :2].tolist() == [[0, 1], [0, 0], [1, 0]]


DATE = '[columns.d]\nkind = "date"\nbounds = [2020-01-01, 2020-01-11]\n'


def test_dates_are_days_between_public_bounds(tmp_path: Path) -> None:
    """As in the file, or as times, with an offset moved to UTC; a gap is the middle, or filled."""
    rows = "2020-01-01\n2020-01-11\n 2020-01-06 \nNA\n1999-12-31\n9999-12-31T23:00\n"
    rows += "2020-01-03T12:00\n2020-01-04T01:00+01:00\n"
    expected = [-1, 1, 0, 0, -1, 1, -0.5, -0.4]
    assert encoded(tmp_path, "d\n" + rows, DATE)[:, 0] == pytest.approx(expected)
    x = encoded(tmp_path, "d\n2020-01-01\nNA\n", DATE + 'fill = "2020-01-11"\n')
    assert x.tolist() == [[-1, 0], [1, 1]]
    assert parse_schema(DATE + "fill = 2020-01-11").row_norm == 2**0.5
    days = encoded(tmp_path, "d\n2020-01-05\n1970-01-01\n", 'scaling = "none"\n' + DATE)
    assert days.tolist() == [[4], [0]]


@pytest.mark.parametrize("value", ["31.12.2020", "17", "0001-01-01T00:00+10:00"])
def test_other_dates_are_refused_without_their_value(tmp_path: Path, value: str) -> None:
    with pytest.raises(ValueError, match="record 2: column 'd' is not an ISO date") as refused:
        encoded(tmp_path, f"d\n2020-01-01\n{value}\n", DATE)
    assert value not in str(refused.value).replace(str(tmp_path), "")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("", r"no bounds.*\[2020-01-01, 2024-12-31\]"),
        ('bounds = ["FILL-IN", "FILL-IN"]', r"no bounds.*\[2020-01-01"),
        ("bounds = [0, 120]", "a bound must be a date such as 2024-12-31, got 0"),
        ('bounds = ["2020-01-01", "soon"]', "must be a date .* got 'soon'"),
        ("bounds = [2020-01-01T10:00:00, 2021-01-01]", "must be a date"),
        ("bounds = [2021-01-01, 2020-01-01]", "the lower first"),
        ("bounds = [2020-01-01, 2021-01-01]\nfill = 2022-01-01", "outside its bounds"),
        ('bounds = [2020-01-01, 2021-01-01]\nunit = "days"', "not 'unit'"),
    ],
)
def test_dates_without_bounds_are_refused(entry: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_schema(f'[columns.d]\nkind = "date"\n{entry}\n')
    with pytest.raises(ValueError, match="has no bounds"):
        Schema((Column("d", "date"),), scaling="none")


@given(st.integers(-700_000, 2_900_000), st.integers(1, 30_000))
def test_dates_that_are_written_are_read_back(first: int, days: int) -> None:
    low, high = float(first), float(first + days)
    schema = Schema((Column("d", "date", bounds=(low, high), fill=high),))
    assert parse_schema(to_toml(schema)) == schema


def test_a_public_table_describes_its_dates(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("d,y\n2020-01-05,a\n2020-01-01T09:00,b\n,a\n2020-01-09,a\n")
    column = from_public_table(path, target="y").columns[0]
    first = parse_schema(DATE).columns[0].bounds[0]  # type: ignore[index]
    assert (column.kind, column.bounds) == ("date", (first, first + 9))
    assert column.fill == first + 4


def test_a_draft_asks_whether_names_are_a_record(tmp_path: Path) -> None:
    """They go into the model, and a first line that is a record would, too."""
    for names, asked in (("age,24.1,ill", True), ("-3,a,b", True), ("0,1,2", False)):
        path = tmp_path / "t.csv"
        path.write_text(f"{names}\n1,2,3\n")
        assert ("Is the first line a record?" in draft(path)) == asked
        numbers = draft(path, said={"number": ["*"]})
        assert parse_schema(numbers.replace('"FILL-IN", "FILL-IN"', "0, 1")).width == 3


def test_a_draft_guesses_no_kind_and_takes_those_that_are_said(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("age,lab_a,lab_b,sex,day,visit_id,y\n")
    assert draft(path, target="y").count('kind = "FILL-IN"') == 5
    with pytest.raises(ValueError, match="6 columns are"):
        parse_schema(draft(path, target="y"))
    with pytest.raises(ValueError, match="kind must be one of number.*'FILL-IN'"):
        parse_schema('[columns.a]\nkind = "FILL-IN"')
    said = {"number": ["age,lab_*"], "category": ["sex"], "date": ["day"], "drop": ["visit_id"]}
    text = draft(path, target="y", said=said)
    assert re.findall(r'kind = "(.*)"', text.partition("[columns.")[2]) == [
        *("number", "number", "number", "category", "date", "drop", "target"),
    ]
    for kinds, why in (
        ({"number": ["weight"]}, "--number 'weight' fits no column; there are age"),
        ({"number": ["y"]}, "--number 'y' fits no column"),
        ({"number": ["lab_*"], "drop": ["lab_b"]}, "--drop and --number both name column 'lab_b'"),
    ):
        with pytest.raises(ValueError, match=re.escape(why)):
            draft(path, target="y", said=kinds)


def test_a_file_that_types_its_dates_drafts_them(tmp_path: Path) -> None:
    """By the type alone; and what is read off them is what text gives."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "t.parquet"
    days = [date(2020, 1, 6), None, date(2020, 1, 11)]
    times = pa.array([datetime(2020, 1, 6), None, datetime(2020, 1, 11)], pa.timestamp("ns", "UTC"))
    parquet.write_table(pa.table({"d": days, "t": times, "y": ["a", "b", "a"]}), path)
    text = draft(path, target="y")
    assert text.count('kind = "date"\nbounds = ["FILL-IN", "FILL-IN"]') == 2
    schema = parse_schema(DATE + DATE.replace("columns.d", "columns.t"))
    (part,) = encode_table(path, schema, labels=False)
    assert part.x.tolist() == [[0, 0], [0, 0], [1, 1]]


def test_whole_numbers_are_the_same_as_floats_or_integers(tmp_path: Path) -> None:
    """A column of whole numbers becomes one of floats where a value is missing; in whatever
    file, and whichever of both the schema names.
    """
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "t.parquet"
    columns = {"c": [1.0, 2.0, None, -10.0, 2.5], "y": [1.0, 0.0, 1.0, 1.0, 0.0]}
    parquet.write_table(pa.table(columns), path)
    csv = tmp_path / "t.csv"
    csv.write_text("c,y\n1.0,1.0\n2.00,0\n,1\n-10,1\n2.5,0\n")
    for named in ('["1", "2", "-10", "2.5"]', '["1.0", "2.0", "-10.0", "2.5"]'):
        text = f'[columns.c]\nkind = "category"\ncategories = {named}\n'
        text += '[columns.y]\nkind = "target"\nclasses = ["0", "1"]\n'
        for file in (path, csv):
            (part,) = encode_table(file, parse_schema(text), labels=True)
            hot = np.eye(4)[[0, 1, 0, 2, 3]]
            hot[2] = 0
            np.testing.assert_array_equal(part.x, hot)
            assert part.y is not None
            assert part.y.tolist() == [1, 0, 1, 1, 0]


def test_names_that_differ_as_text_are_told_apart(tmp_path: Path) -> None:
    column = '[columns.c]\nkind = "category"\ncategories = ["2", "2.0", "2.1", "x.0", "1.", ".0"]\n'
    x = encoded(tmp_path, "c\n2\n2.0\n2.00\n2.1\nx.0\nx\n1\n0\n", column)
    places = [row.nonzero()[0].tolist() for row in x]
    assert places == [[0], [1], [0], [2], [3], [], [], []]


def test_columns_that_may_be_persons_are_asked_about(tmp_path: Path) -> None:
    """A patient's number was dropped, or a category, and no draft said what it can be."""
    path = tmp_path / "t.csv"
    path.write_text("patient,customer_id,visit_id,age,y\n")
    text = draft(path, target="y")
    for name in ("patient", "customer_id"):
        assert f'[columns.{name}]\nkind = "FILL-IN"  # person, if it says whose row it is' in text
    assert '[columns.visit_id]\nkind = "drop"  # by its name, it identifies; person, if' in text
    named = draft(path, target="y", person="patient")
    assert '[columns.patient]\nkind = "person"\n' in named
    assert '[columns.customer_id]\nkind = "drop"' in named
