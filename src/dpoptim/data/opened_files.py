"""Files of users opened: gzipped or not, damaged, and of text in whichever encoding.

Text is in UTF-8, in the encoding that a file's first bytes mark, or in a named one.
"""

import codecs
import gzip
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

GZIP_ENDING = ".gz"


@contextmanager
def decoding(path: Path, what: str, fix: str) -> Iterator[None]:
    """Turn every failure of a decoder into a ValueError with the file, its kind and the fix.

    A decoder meets bytes that nobody foresaw, so no list of its exceptions is complete: of 1,000
    flips in a .npz, 795 ended in six kinds. Only calls of a decoder belong inside; a mistake of
    our own must not be blamed on the file.

    Args:
        what: what the file should be, such as ``"a .npz archive"``.

    Raises:
        ValueError: the decoder failed. Its own message is left out: it may quote the data.
        OSError: the file cannot be opened (absent, no permission): as it is.
    """
    try:
        yield
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except Exception as error:
        kind = type(error).__name__
        raise ValueError(f"{path} is not {what}, or is damaged ({kind}). Fix: {fix}.") from None


def open_decompressed(path: Path) -> IO[bytes]:
    """The file's bytes, decompressed where its name ends in .gz."""
    if path.suffix.lower() == GZIP_ENDING:
        return cast(IO[bytes], gzip.open(path, "rb"))
    return path.open("rb")


def kind_of(path: Path) -> str:
    """The ending that tells the format, in lower case: ``.csv`` for ``table.CSV.gz``."""
    return without_gzip(path).suffix.lower()


def name_of(path: Path) -> str:
    """The file's name without endings: ``table`` for ``table.csv`` and ``table.csv.gz``."""
    return without_gzip(path).stem


def without_gzip(path: Path) -> Path:
    return path.with_suffix("") if path.suffix.lower() == GZIP_ENDING else path


UTF8 = "utf-8"
# the longer ones first: that of UTF-32 begins with that of UTF-16
MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# in which a record may change how all that follow are read, or end a line
STATEFUL = ("iso2022", "hz", "utf_7", "idna", "punycode", "unicode_escape", "raw_unicode_escape")
UNREAD = "dpoptim.unread"  # a handler of errors beyond what is looked at
IN_PLACE = "\udcff"  # stands for bytes that do not decode

codecs.register_error(UNREAD, lambda error: (IN_PLACE, error.end))  # type: ignore[attr-defined]


def known_encoding(given: object, where: str) -> str:
    """The name of an encoding as Python and pandas have it, such as ``"cp1252"``.

    Raises:
        ValueError: there is none of this name, or it is one in which a record may change how
            others are read.
    """
    try:
        assert isinstance(given, str)
        "a".encode(given)  # what Python does not take for an encoding of text is none
        name = codecs.lookup(given).name.replace("-", "_")
    except (AssertionError, LookupError, ValueError):
        name = None
    if name is None or name.startswith(STATEFUL):
        raise ValueError(
            f'{where} must be the name of an encoding, such as "latin-1", "cp1252" or '
            f'"utf-16-le", whose lines do not depend on each other, got {given!r}.'
        )
    return str(given)


def open_text(path: Path, encoding: str, *, first_line_only: bool = False) -> io.TextIOWrapper:
    """The file as text, decompressed where its name ends in .gz; a mark at its beginning decides.

    Args:
        first_line_only: what does not decode is `IN_PLACE`, since bytes are decoded in blocks, and
            what follows the first line must not be looked at.
    """
    with open_decompressed(path) as file:
        begins = file.read(4)
    marked = next((name for mark, name in MARKS.items() if begins.startswith(mark)), encoding)
    errors = UNREAD if first_line_only else "strict"
    return io.TextIOWrapper(open_decompressed(path), encoding=marked, errors=errors, newline="")


def undecodable_error(path: Path, encoding: str) -> ValueError:
    """The error of a file that is not written so; nothing of it is quoted."""
    what = "UTF-8" if encoding.startswith(UTF8) else encoding
    return ValueError(
        f'{path} is not {what} text. Fix: encoding = "cp1252" (or "latin-1", "utf-16-le", ...), as '
        "it was written, above all columns of its schema (dpoptim schema new --encoding ...); or "
        "save it as UTF-8."
    )
