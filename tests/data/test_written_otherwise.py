"""Dates and numbers that a file writes in another way than ISO 8601 and Python, as a schema says:
read right, or refused without their value. What a table that is public leaves open is not guessed.
"""

from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpoptim.data import Column, Schema, load_table, parse_schema, schema_without_file
from dpoptim.data.encoding import encode_table, unmatched_columns
from dpoptim.data.numbers import MARKS, as_numbers, day_text, places_among
from dpoptim.data.public_schemas import from_public_table
from dpoptim.data.schema_files import draft, to_toml

DATE = '[columns.d]\nkind = "date"\nbounds = [2020-01-01, 2020-01-11]\n'
NUMBER = '[columns.a]\nkind = "number"\nbounds = [0, 2000]\n'


def encoded(tmp_path: Path, text: str, schema: str) -> list[float]:
    path = tmp_path / "t.csv"
    path.write_text(text)
    parts = [part.x for part in encode_table(path, parse_schema(schema), labels=False)]
    found: list[float] = np.concatenate(parts)[:, 0].tolist()
    return found


@pytest.mark.parametrize(
    ("format", "rows"),
    [
        ("%d.%m.%Y", ["01.01.2020", "11.1.2020", " 06.01.2020", "NA", "31.12.2024"]),
        ("%m/%d/%Y", ["01/01/2020", "1/11/2020", "01/06/2020", "", "12/31/2024"]),
        ("%d.%m.%y", ["01.01.20", "11.01.20", "06.01.20", "null", "31.12.24"]),
        ("%Y%m%d", ["20200101", "20200111", "20200106", "nan", "20241231"]),
        ("%d %b %Y", ["01 Jan 2020", "11 jan 2020", "06 Jan 2020", "?", "31 Dec 2024"]),
    ],
)
def test_dates_are_read_as_the_schema_says(format: str, rows: list[str], tmp_path: Path) -> None:
    schema = DATE + f'format = "{format}"\n'
    assert encoded(tmp_path, "\n".join(["d;b", *(f"{row};x" for row in rows)]), schema) == (
        pytest.approx([-1, 1, 0, 0, 1])
    )


def test_times_and_offsets(tmp_path: Path) -> None:
    schema = DATE + 'format = "%d.%m.%Y %H:%M"\n'
    assert encoded(tmp_path, "d\n03.01.2020 12:00\n", schema) == pytest.approx([-0.5])
    schema = DATE + 'format = "%d.%m.%Y %H:%M %z"\n'
    assert encoded(tmp_path, "d\n04.01.2020 01:00 +0100\n", schema) == pytest.approx([-0.4])


@pytest.mark.parametrize("value", ["2020-01-05", "13/31/2020", "31.02.2020", "17"])
def test_dates_in_another_way_are_refused_without_their_value(value: str, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"record 2: .* not a date written '%d\.%m\.%Y'"
    ) as refused:
        encoded(tmp_path, f"d\n01.01.2020\n{value}\n", DATE + 'format = "%d.%m.%Y"\n')
    assert value not in str(refused.value).replace(str(tmp_path), "").replace("2024-12-31", "")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ('format = "%d.%m"', "2020-01-01 cannot be written and read back"),
        ('format = "%m/%Y"', "2020-01-11 cannot be written and read back"),
        ('format = "dd.mm.yyyy"', "datetime.strptime"),
        ("format = 5", "format must be text"),
        ('format = "%d.%m.%y"\nbounds = [1920-01-01, 2020-01-01]', "1969 to 2068"),
    ],
)
def test_formats_that_lose_the_day_are_refused(entry: str, said: str) -> None:
    own = "bounds" in entry
    head = '[columns.d]\nkind = "date"\n' if own else DATE
    with pytest.raises(ValueError, match=said):
        parse_schema(f"{head}{entry}\n")


def test_only_dates_have_a_format() -> None:
    with pytest.raises(ValueError, match="not 'format'"):
        parse_schema(NUMBER + 'format = "%d.%m.%Y"\n')


def test_dates_in_columns_of_numbers(tmp_path: Path) -> None:
    """20241231 with a gap beside it is held as a float by files with types."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"d": pa.array([20200111, None, 20200101])}), path)
    schema = parse_schema(DATE + 'format = "%Y%m%d"\n')
    (part,) = encode_table(path, schema, labels=False)
    assert part.x[:, 0].tolist() == [1, 0, -1]


@pytest.mark.parametrize(
    ("decimal", "thousands", "rows"),
    [
        (",", ".", ["1.234,5", "-1.000", "999,5", "1e3", "0", "1.000.000", "NA"]),
        (".", ",", ["1,234.5", "-1,000", "999.5", "1e3", "0", "10,00,000", ""]),
        (".", " ", ["1 234.5", "-1\u00a0000", "999.5", "1e3", "0", "1\u202f000 000", "NA"]),
        (",", "'", ["1'234,5", "-1\u2019000", "999,5", "1e3", "0", "1'000'000", "?"]),
    ],
)
def test_marks_of_thousands(decimal: str, thousands: str, rows: list[str], tmp_path: Path) -> None:
    schema = f'decimal = "{decimal}"\nthousands = "{thousands}"\n{NUMBER}'
    found = encoded(tmp_path, "\n".join(["a\tb", *(f"{row}\tx" for row in rows)]), schema)
    assert found == pytest.approx([0.2345, -1, -0.0005, 0, -1, 1, 0], abs=1e-6)


@pytest.mark.parametrize(
    "value", ["1,23", "1,2345", "12,34", ",123", "1,234,5", "1.234,567", "1,,234"]
)
def test_a_decimal_comma_is_not_taken_for_thousands(value: str, tmp_path: Path) -> None:
    """Refused where taking the mark out would make a number a hundred times too large."""
    with pytest.raises(
        ValueError, match="record 1: .*decimal point and ',' between thousands"
    ) as no:
        encoded(tmp_path, f"a;b\n{value};x\n", f'thousands = ","\n{NUMBER}')
    assert value not in str(no.value).replace(str(tmp_path), "")


@pytest.mark.parametrize(("written", "unit"), [("3.000,0", ""), ("3.000,0 €", 'unit = "€"\n')])
def test_targets_have_marks_and_units_too(written: str, unit: str, tmp_path: Path) -> None:
    target = f'[columns.y]\nkind = "target"\nbounds = [0, 4000]\n{unit}'
    path = tmp_path / "y.csv"
    path.write_text(f"a;y\n1;{written}\n")
    schema = parse_schema(f'decimal = ","\nthousands = "."\n{NUMBER}{target}')
    (part,) = encode_table(path, schema, labels=True)
    assert part.y is not None
    assert part.y.tolist() == [0.5]


@pytest.mark.parametrize(
    ("unit", "rows"),
    [
        ("$", ["$1,234.50", "-$1,000", "$ 999.5", "1000 $", "$-5", "NA", "500"]),
        ("€", ["1,234.50\u00a0€", "-€1,000", "999.5€", "€1000", "- 5 €", "", "500"]),
        # a unit that could be a part of numbers takes nothing away from one
        ("5", ["1,234.50", "-1,000", "999.5", "1000", "-5", "?", "500"]),
    ],
)
def test_units_may_stand_beside_numbers(unit: str, rows: list[str], tmp_path: Path) -> None:
    column = f'{NUMBER}unit = "{unit}"\n'
    text = "\n".join(["a;b", *(f"{row};x" for row in rows)])
    assert encoded(tmp_path, text, f'thousands = ","\n{column}') == pytest.approx(
        [0.2345, -1, -0.0005, 0, -1, 0, -0.5], abs=1e-6
    )


@pytest.mark.parametrize("value", ["€5", "$", "$$5", "$5$", "-$-5", "$1,23", "$1.2.3", "$NA"])
def test_what_is_no_number_with_a_unit_is_refused_without_its_value(
    value: str, tmp_path: Path
) -> None:
    schema = f'thousands = ","\n{NUMBER}unit = "$"\n'
    with pytest.raises(ValueError, match="record 2: .*not a number") as no:
        encoded(tmp_path, f"a;b\n$7;x\n{value};x\n", schema)
    said = str(no.value).replace(str(tmp_path), "").replace('unit = "$" where', "")
    assert value == "$" or value not in said
    with pytest.raises(ValueError, match=r'unit = "\$" where a number is written \$5'):
        encoded(tmp_path, "a;b\n$7;x\n", NUMBER)


@given(st.integers(-(10**12), 10**12), st.integers(0, 99), st.sampled_from(sorted(MARKS)))
def test_grouped_numbers_are_the_numbers(whole: int, cents: int, thousands: str) -> None:
    decimal = "," if thousands == "." else "."
    text = f"{whole:,}".replace(",", thousands) + f"{decimal}{cents:02d}"
    numbers, bad = as_numbers([text], decimal, thousands)
    assert bad is None
    assert numbers.tolist() == [float(f"{whole}.{cents:02d}")]


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ('decimal = ","\nthousands = ","\n', "decimal and thousands are both ','"),
        ('thousands = "."\n', r"decimal and thousands are both '\.'"),
        ('thousands = "_"\n', "thousands must be one of '', "),
        ("thousands = [1]\n", "thousands must be one of"),
        ('thousand = ","\n', "unknown entry 'thousand'; known are scaling, decimal, thousands"),
    ],
)
def test_marks_that_contradict_each_other_are_refused(head: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_schema(head + NUMBER)


@given(st.sampled_from([".", " ", "'"]), st.sampled_from(["%d.%m.%Y", "%m/%d/%y", '%d. "%b" %Y']))
def test_what_is_written_is_read_back(thousands: str, format: str) -> None:
    first = float((date(2001, 2, 3) - date(1970, 1, 1)) / timedelta(days=1))
    schema = Schema(
        (Column("d", "date", bounds=(first, first + 9), format=format),),
        decimal=",",
        thousands=thousands,  # type: ignore[arg-type]
    )
    assert parse_schema(to_toml(schema)) == schema


COLUMN_OF_ITS_OWN = (
    'decimal = ","\nthousands = "."\n'
    '[columns.a]\nkind = "number"\nbounds = [0, 2000]\n'
    '[columns.b]\nkind = "number"\nbounds = [0, 2000]\ndecimal = "."\nthousands = ","\n'
    '[columns.c]\nkind = "number"\nbounds = [0, 2000]\ndecimal = "."\nthousands = ""\n'
    '[columns.y]\nkind = "target"\nbounds = [0, 2000]\ndecimal = "."\nthousands = "\'"\n'
)


def test_a_column_may_be_written_otherwise_than_the_others(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a;b;c;y\n1.500,5;1,500.5;1500.5;1'500.5\n0,5;0.5;0.5;0.5\n")
    schema = parse_schema(COLUMN_OF_ITS_OWN)
    (part,) = encode_table(path, schema, labels=True)
    assert part.y is not None
    every = np.column_stack([part.x, part.y])
    np.testing.assert_allclose(every[0], 1500.5 / 1000 - 1, rtol=1e-6)
    np.testing.assert_allclose(every[1], 0.5 / 1000 - 1, rtol=1e-6)
    assert parse_schema(to_toml(schema)) == schema
    path.write_text("a;b;c;y\n1,5;1,5;1;1\n")
    with pytest.raises(ValueError, match=r"'b' is not a number \(with a decimal point and ','"):
        list(encode_table(path, schema, labels=True))


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ('decimal = ";"', r"column 'a': decimal must be one of '\.', ','"),
        ('thousands = "."', r"column 'a': decimal and thousands are both '\.'.*Fix"),
        ("decimal = 1", "column 'a': decimal must be one of"),
    ],
)
def test_marks_of_a_column_that_make_no_sense_are_refused(entry: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_schema(NUMBER + entry)
    with pytest.raises(ValueError, match="a date takes .*; not 'decimal'"):
        parse_schema(DATE + 'decimal = ","')


def found(tmp_path: Path, *values: str, target: bool = False) -> Column:
    """A public column as it is drafted, in a table whose other numbers have a point."""
    path = tmp_path / "t.csv"
    path.write_text("a;b;y\n" + "".join(f"{v};{i}.5;{i}\n" for i, v in enumerate(values)))
    name = "a" if target else "y"
    schema = from_public_table(path, target=name, regression=True)
    assert parse_schema(to_toml(schema)) == schema
    load_table(path, schema, public=True)
    return schema.columns[0]


@pytest.mark.parametrize(
    ("values", "bounds", "decimal", "thousands", "unit"),
    [
        (("$5.00", "-$1,234.50", "$7"), (-1234.5, 7), None, ",", "$"),
        (("12 %", "3.5 %", "NA"), (3.5, 12), None, None, "%"),
        (("70 kg", "65kg"), (65, 70), None, None, "kg"),
        (("USD 7", "USD 9"), (7, 9), None, None, "USD"),
        (("1.234,50 €", "2,5 €"), (2.5, 1234.5), ",", ".", "€"),
        (("1,234", "12,500"), (1234, 12500), None, ",", None),
        (("0,125", "1,250"), (0.125, 1.25), ",", None, None),
        (("1'000", "2'500.5"), (1000, 2500.5), None, "'", None),
    ],
)
@pytest.mark.parametrize("target", [False, True])
def test_a_public_table_says_how_its_numbers_are_written(
    values: tuple[str, ...],
    bounds: tuple[float, float],
    decimal: str | None,
    thousands: str | None,
    unit: str | None,
    target: bool,
    tmp_path: Path,
) -> None:
    if target:
        values = tuple(value for value in values if value != "NA")
    column = found(tmp_path, *values, target=target)
    assert column.kind == ("target" if target else "number")
    assert (column.bounds, column.unit) == (bounds, unit)
    assert (column.decimal, column.thousands) == (decimal, thousands)


@pytest.mark.parametrize(
    ("rows", "decimal", "highest"),
    [
        # a comma in a file of commas is one of thousands: 1,234 was read as 1.234
        (('1,"1,234"', "2,950", '3,"12,500"'), ".", 12500),
        # what other columns say: it was 1.234 beside 1,5
        (("1,5;1.234", "2,5;2.500", "3,5;12.000"), ",", 12000),
        (("1.5\t1,234", "2.5\t2,500", "3.5\t12,000"), ".", 12000),
        (("1;1,234", "2;2,500", "3;12,125"), ",", 12.125),
        (("1;1.234", "2;2.500", "3;12.125"), ".", 12.125),
        (("1,5;52.520", "2,5;2.5", "3,5;12.125"), ".", 52.52),
    ],
)
def test_what_may_be_thousands_or_a_fraction_is_read_as_other_columns_are_written(
    rows: tuple[str, ...], decimal: str, highest: float, tmp_path: Path
) -> None:
    path = tmp_path / "t.csv"
    between = next(each for each in ";\t," if each in rows[0])
    lines = [f"a{between}b{between}y", *(f"{row}{between}{i % 2}" for i, row in enumerate(rows))]
    path.write_text("\n".join(lines))
    schema = from_public_table(path, target="y")
    assert schema.decimal == decimal
    bounds = schema.columns[1].bounds
    assert bounds is not None
    assert bounds[1] == highest


@pytest.mark.parametrize(
    ("values", "format", "last"),
    [
        (("31.12.2024", "01.02.2024"), "%d.%m.%Y", "2025-01-01"),
        (("12/31/2024", "01/02/2024", ""), "%m/%d/%Y", "2025-01-01"),
        (("31/12/2024", "01/02/2024"), "%d/%m/%Y", "2025-01-01"),
        (("2024/12/31", "2024/02/01"), "%Y/%m/%d", "2025-01-01"),
        (("2024-12-31", "2024-02-01"), None, "2025-01-01"),
    ],
)
def test_a_public_table_says_how_its_dates_are_written(
    values: tuple[str, ...], format: str | None, last: str, tmp_path: Path
) -> None:
    column = found(tmp_path, *values)
    assert (column.kind, column.format) == ("date", format)
    assert column.bounds is not None
    assert day_text(column.bounds[1]) == last


@pytest.mark.parametrize(
    "values",
    [
        ("01/02/2024", "03/04/2024"),
        ("A1", "A2", "A3"),
        ("5 kg", "7 lb"),
        ("1-2", "3-4"),
        ("5 K", "800"),  # were 5 and 800
        ("5%", "0.07"),
        ("(5)", "800"),  # was an error without words
    ],
)
def test_what_could_be_read_in_two_ways_or_is_no_number_is_not_guessed(
    values: tuple[str, ...], tmp_path: Path
) -> None:
    column = found(tmp_path, *values)
    assert column.kind == "category"
    assert set(column.categories) == set(values)


def test_a_draft_says_where_to_write_it(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    for separator, mark in ((",", ","), (";", ".")):
        path.write_text(f"a{separator}y\n")
        text = draft(path, target="y")
        assert f'# thousands = "{mark}"' in text
        assert 'format = "%d.%m.%Y"' in text


def test_booleans_are_one_however_they_are_written(tmp_path: Path) -> None:
    """pandas writes True where a schema lists "true": no category matched, and nothing was said."""
    path = tmp_path / "a.csv"
    path.write_text("smoker,y\nTrue,TRUE\nfalse,False\nTRUE,true\n ,FALSE\n")
    schema = parse_schema(
        '[columns.smoker]\nkind = "category"\ncategories = ["true", "false"]\n'
        '[columns.y]\nkind = "target"\nclasses = ["False", "True"]'
    )
    (found,) = encode_table(path, schema, labels=True)
    assert found.x.tolist() == [[1, 0], [0, 1], [1, 0], [0, 0]]
    assert found.y is not None
    assert found.y.tolist() == [1, 0, 1, 0]
    assert places_among(["True", "true"], ["true", "True"]).tolist() == [1, 0]


def test_a_gap_in_the_target_is_called_one(tmp_path: Path) -> None:
    """It said "a label outside the declared classes"."""
    path = tmp_path / "a.csv"
    path.write_text("x,y\n1,no\n2,\n")
    schema = parse_schema(
        '[columns.x]\nkind = "number"\nbounds = [0, 2]\n'
        '[columns.y]\nkind = "target"\nclasses = ["no", "yes"]'
    )
    with pytest.raises(ValueError, match="record 2 has no value of the target 'y'; drop"):
        list(encode_table(path, schema, labels=True))


def test_columns_without_any_of_their_categories_are_found(tmp_path: Path) -> None:
    path, other = tmp_path / "a.csv", tmp_path / "b.csv"
    path.write_text("a,b,x\nyes,u,1\nno,v,1\n")
    other.write_text("a,b,x\n")
    schema = parse_schema(
        '[columns.a]\nkind = "category"\ncategories = ["Y", "N"]\n'
        '[columns.b]\nkind = "category"\ncategories = ["v", "w"]\n'
        '[columns.x]\nkind = "number"\nbounds = [0, 2]'
    )
    assert unmatched_columns(path, schema) == ("a",)
    assert unmatched_columns(other, schema) == ()


def test_numbers_without_a_schema_lead_to_one(tmp_path: Path) -> None:
    """A customer's number "00969-X" led to decimal marks."""
    path = tmp_path / "churn.csv"
    path.write_text("customer,y\n00969-X,no\n")
    schema = schema_without_file(path, "y", classes=("no", "yes"))
    with pytest.raises(ValueError, match=r"'customer' is not a number, .* schema new ") as no:
        list(encode_table(path, schema, labels=True))
    assert "decimal" not in str(no.value)
