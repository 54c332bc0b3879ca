"""Text files in other encodings than UTF-8: read as their schema says, or their first bytes."""

import codecs
import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpoptim.commands.schema import new_schema
from dpoptim.data import load_table, parse_schema, read_schema, schema_without_file
from dpoptim.data.public_schemas import from_public_table
from dpoptim.data.schema_files import draft, to_toml
from dpoptim.data.table_files import column_names, read_columns

TEXT = "größe;straße\n1,5;Köln\n2,5;Łódź\n1,5;Köln\n"
WESTERN = TEXT.replace("Łódź", "Málaga")
SCHEMA = """
decimal = ","
[columns."größe"]
kind = "number"
bounds = [0, 3]
[columns."straße"]
kind = "target"
classes = ["Köln", "Málaga", "Łódź"]
"""


def written(path: Path, text: str, encoding: str) -> Path:
    data = text.encode(encoding)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("latin-1", WESTERN),
        ("cp1252", WESTERN),
        ("ISO-8859-15", WESTERN),
        ("cp1250", TEXT.replace("Málaga", "")),
        ("utf-16-le", TEXT),
        ("utf-16-be", TEXT),
        ("gb18030", TEXT),
    ],
)
def test_a_named_encoding(encoding: str, text: str, name: str, tmp_path: Path) -> None:
    path = written(tmp_path / name, text, encoding)
    data = load_table(path, parse_schema(f'encoding = "{encoding}"{SCHEMA}'))
    told = load_table(written(tmp_path / "u.csv", text, "utf-8"), parse_schema(SCHEMA))
    np.testing.assert_array_equal(data.x, told.x)
    np.testing.assert_array_equal(data.y, told.y)
    with pytest.raises(ValueError, match=r"Fix:.* encoding = ") as refused:
        load_table(path, parse_schema(SCHEMA))
    assert not any(word in str(refused.value) for word in ("Köln", "gr", "0x", "position"))


@pytest.mark.parametrize("declared", ["", 'encoding = "latin-1"', 'encoding = "utf-16-be"'])
@pytest.mark.parametrize(
    ("mark", "encoding"),
    [
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
        (codecs.BOM_UTF32_BE, "utf-32-be"),
    ],
)
def test_a_mark_is_read_by_itself(
    mark: bytes, encoding: str, declared: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(mark + TEXT.encode(encoding))
    assert [name for name, _ in column_names(path)] == ["größe", "straße"]
    assert load_table(path, parse_schema(declared + SCHEMA)).y.tolist() == [0, 2, 0]


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252", "utf-16-le"])
def test_what_does_not_decode_is_not_shown_nor_where(encoding: str, tmp_path: Path) -> None:
    """The same words whichever record it is in; and nothing beyond the header is looked at."""
    bad = {"utf-8": b"\xff", "cp1252": b"\x81", "utf-16-le": b"\x00\xd8"}[encoding]
    path, said = tmp_path / "t.csv", set()
    for row in (1, 2, 3000):
        coded = [f"{line}\n".encode(encoding) for line in ["a;secret", *(["1;x"] * 4000)]]
        coded[row] = "1;hidden".encode(encoding) + bad + "\n".encode(encoding)
        path.write_bytes(b"".join(coded))
        assert [name for name, _ in column_names(path, encoding)] == ["a", "secret"]
        assert draft(path, encoding=encoding).count("[columns.") == 2
        with pytest.raises(ValueError, match=r"is not .* text\. Fix: encoding = ") as refused:
            list(read_columns(path, None, encoding))
        assert refused.value.__suppress_context__
        said.add(str(refused.value).replace(str(path), ""))
    (only,) = said
    assert not any(part in only for part in ("hidden", "0x", "81", "position", "line", "record"))


def test_what_does_not_decode_in_the_header(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", WESTERN, "latin-1")
    for read in (column_names, draft):
        with pytest.raises(ValueError, match="is not UTF-8 text. Fix: encoding"):
            read(path)


@pytest.mark.parametrize(
    "name", ["latin-2000", "", "rot13", "base64", "iso2022_jp", "utf-7", "hz", "unicode_escape", 8]
)
def test_encodings_that_are_none_or_let_records_change_others(name: object) -> None:
    """In those that shift, a record that shifts and not back changes all that follow it."""
    entry = f"encoding = {name!r}\n"
    with pytest.raises(ValueError, match="schema: encoding must be the name of an encoding"):
        parse_schema(entry + SCHEMA)


def test_the_schema_command(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", WESTERN, "cp1252")
    common: dict[str, object] = {
        "target": "straße",
        "person": None,
        "regression": False,
        "said": {},
    }
    for public in (False, True):
        file, _ = new_schema(
            path, public=public, encoding="cp1252", out=None, overwrite=True, **common
        )
        assert '\nencoding = "cp1252"\n' in file.read_text("utf-8")
    schema = read_schema(file)
    assert (
        parse_schema(to_toml(schema))
        == schema
        == from_public_table(path, target="straße", encoding="cp1252")
    )
    assert load_table(path, schema).y.tolist() == [0, 1, 0]
    with pytest.raises(ValueError, match="--encoding must be"):
        new_schema(path, public=False, encoding="cp0", out=None, overwrite=True, **common)


def test_without_a_schema(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", WESTERN.replace(",", "."), "latin-1")
    for scaling in ("bounds", "unit-norm"):
        schema = schema_without_file(
            path, "straße", public=True, scaling=scaling, encoding="latin-1"
        )
        assert load_table(path, schema).class_names == ("Köln", "Málaga")
    with pytest.raises(ValueError, match="^encoding must be the name"):
        schema_without_file(path, "straße", public=True, encoding="cp0")


def test_a_schema_with_a_mark(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_bytes(codecs.BOM_UTF8 + SCHEMA.encode())
    assert read_schema(path) == parse_schema(SCHEMA)


@given(
    values=st.lists(st.text(st.characters(codec="cp1252", exclude_characters="\r\n\x00"))),
    encoding=st.sampled_from(["cp1252", "utf-16", "utf-8-sig", "utf-32"]),
)
def test_any_text_is_read_as_in_utf_8(
    values: list[str], encoding: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    quoted = ['"' + value.replace('"', '""') + '"' for value in values]
    text = "\n".join(['"a","b"', *(f"{value},{value}" for value in quoted)]) + "\n"
    found = []
    for each in (encoding, "utf-8"):
        path = written(folder / f"{each}.csv", text, each)
        found.append([tuple(chunk.columns["b"]) for chunk in read_columns(path, None, each)])
    assert found[0] == found[1]
    assert sum(map(len, found[0])) == len(values)
