"""A schema says what is public about a table, is complete or refused, and encodes each record by
itself.
"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpoptim.data import Column, Schema, load_table, parse_schema, read_schema
from dpoptim.data.encoding import encode_table
from dpoptim.data.schema_files import draft, from_public_table, to_toml
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
        (NUMBER + '[columns.y]\nkind = "target"', "needs either classes"),
        (NUMBER + '[columns.y]\nkind = "target"\nclasses = ["one"]', "needs either classes"),
        (NUMBER + '[columns.p]\nkind = "person"\n[columns.q]\nkind = "person"', "p and q are both"),
        (NUMBER + "surplus = 3\n", "not 'surplus'"),
        ('scaling = "z-score"\n' + NUMBER, "scaling must be one of"),
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
        )
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
    with pytest.raises(ValueError, match="'age' has no bounds"):
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
