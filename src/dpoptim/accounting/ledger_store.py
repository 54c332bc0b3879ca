"""The ledger's file: an append-only SQLite database whose entries survive a crash.

A connection lives as long as one operation. So nothing stays open between reservations, a fork or
a second thread carries no handle along, and a file that was deleted or replaced in the meantime is
noticed instead of written to in vain.

The journal is SQLite's rollback journal: outside a transaction the one file holds everything, so
it can be copied, and losing a file beside it loses nothing. (A write-ahead log holds what was
promised in a second file; with connections this short it was also slower: 24 against 20 ms a
reservation on a disk, 0.18 against 0.11 ms in memory.) ``synchronous = EXTRA``, so that not even a
power cut takes an acknowledged entry back.

A new ledger is linked into place when it is complete. Hence a file at the ledger's path is never
half made, and an empty or damaged one is always an error, never a fresh budget.
"""

import errno
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any, Self

from dpoptim.accounting.ledger_failures import BUSY_SECONDS, advice_on, reason_of
from dpoptim.accounting.ledger_schema import (
    APPLICATION_ID,
    SCHEMA_VERSION,
    Entry,
    Head,
    expected_schema,
    first_digest,
    initialise,
    new_file,
    stored_schema,
)
from dpoptim.accounting.ledger_settings import Settings
from dpoptim.errors import LedgerError
from dpoptim.files import create_whole

_MAGIC, _ROLLBACK_JOURNAL = b"SQLite format 3\0", b"\x01\x01"  # bytes 0 to 15, and 18 and 19
# What reading a damaged file may raise below sqlite3 and above it.
_FAILURES = (
    sqlite3.Error,
    OSError,
    ValueError,
    TypeError,
    OverflowError,
    RecursionError,
    MemoryError,
)


class LedgerStore:
    """Entries on disk or, without a path, in memory. Every method raises LedgerError alone.

    Args:
        path: the database, or None.
        settings: written if the path does not exist yet; an existing ledger keeps its own.
    """

    path: Path | None
    settings: Settings
    _memory: sqlite3.Connection | None
    _seen: Head | None  # before it was pickled

    def __init__(self, path: Path | None, settings: Settings) -> None:
        self._start(path)
        if path is None:
            self._memory = sqlite3.connect(
                ":memory:", isolation_level=None, check_same_thread=False
            )
            weakref.finalize(self, self._memory.close)  # a forgotten close() is no ResourceWarning
            initialise(self._memory, settings)
            self.settings = settings
            return
        with self._failures():
            if not path.parent.is_dir():
                raise FileNotFoundError(f"there is no directory {path.parent}")
            if not path.exists():
                _create(path, settings)
            if path.stat().st_size == 0:
                raise sqlite3.DatabaseError("file is empty")
        self.settings = self._identify(path)

    def _start(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._memory, self._seen, self._identified = None, None, True

    @classmethod
    def unpickled(cls, path: Path, settings: Sequence[Any], head: Sequence[Any]) -> Self:
        """The store of a file that is looked at when it is first read, and is never made."""
        store = cls.__new__(cls)
        store._start(path)
        store.settings, store._seen, store._identified = Settings(*settings), Head(*head), False
        return store

    def pickled(self, head: Head) -> tuple[Path | None, Sequence[Any], Sequence[Any]]:
        """Arguments of `unpickled`: the file must go on from where it was read to."""
        seen = head if self._seen is None or head.count > self._seen.count else self._seen
        return self.path, astuple(self.settings), astuple(seen)

    def close(self) -> None:
        """Forgets a ledger in memory; one on disk has nothing open."""
        if self._memory is not None:
            self._memory.close()

    def start(self) -> Head:
        """The head before the first entry."""
        return Head(0, first_digest(self.settings))

    def read(self, known: Head) -> tuple[list[Entry], Head]:
        """The entries after `known`, oldest first, and the head now; their chain is verified.

        LedgerError if what was known is not there any more, or an entry is missing or changed.
        """
        if not self._identified:  # of a file that was unpickled
            self.identify()
            self._identified = True
        with self._connection() as connection:
            connection.execute("BEGIN")  # one moment for all that is read
            try:
                return self._read(connection, known)
            finally:
                connection.execute("ROLLBACK")

    def append(self, entries: Sequence[Entry], *, after: Head) -> bool:
        """Writes all entries durably if the ledger's head is `after`; else False, none written.

        So whoever decided on an older view decides again: two processes cannot both take what is
        left.
        """
        with self._connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                if _read_head(connection) != after:
                    connection.execute("ROLLBACK")
                    return False
                head = after
                for entry in entries:
                    head = entry.after(head)
                    values = (head.count, *(getattr(entry, field.name) for field in fields(entry)))
                    insert = "INSERT INTO entry VALUES (?, ?, ?, ?, ?, ?, ?)"
                    connection.execute(insert, (*values, head.digest))
                    update = "UPDATE head SET count = ?, digest = ?"
                    connection.execute(update, (head.count, head.digest))
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        return True

    def identify(self) -> None:
        """Checks the whole file again, as when it was opened."""
        if self.path is not None and self._identify(self.path) != self.settings:
            raise self._replaced()

    def _read(self, connection: sqlite3.Connection, known: Head) -> tuple[list[Entry], Head]:
        now, found = _read_head(connection), []
        at, seen = known, self._seen or known
        columns = ", ".join(field.name for field in fields(Entry))
        query = f"SELECT number, digest, {columns} FROM entry WHERE number > ? ORDER BY number"
        for number, digest, *values in connection.execute(query, (known.count,)):
            if not all(isinstance(value, str) for value in values):
                raise sqlite3.DatabaseError("file is malformed: a column has another type")
            entry = Entry(*values)
            at = entry.after(at)
            if (number, digest) != (at.count, at.digest):
                raise sqlite3.DatabaseError(
                    f"file is malformed: entry {at.count} was changed or is missing"
                )
            if number == seen.count and digest != seen.digest:
                raise sqlite3.DatabaseError(
                    "file is an older copy that went on: other entries were written in the place "
                    "of those that were read here"
                )
            found.append(entry)
        held = max(known.count, seen.count)
        if now.count < held:
            raise sqlite3.DatabaseError(
                f"file holds {now.count} entries and held {held}: it is an older copy"
            )
        if at != now:
            raise sqlite3.DatabaseError(
                f"file is malformed: it holds other entries than the {now.count} recorded"
            )
        return found, now

    def _identify(self, path: Path) -> Settings:
        """Return the settings of a whole ledger of a known version that we may write."""
        with self._failures():
            with path.open("rb") as file:
                header = file.read(20)
            if header[:16] == _MAGIC and header[18:20] != _ROLLBACK_JOURNAL:
                raise sqlite3.DatabaseError(
                    "file is malformed: it is not kept by a rollback journal"
                )
        with self._connection(verify=False) as connection:
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            if application != APPLICATION_ID:
                raise sqlite3.DatabaseError("file is not a database of this kind")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version != SCHEMA_VERSION:
                raise LedgerError(
                    f"{self.path}: ledger format {version}, this dpoptim reads format "
                    f"{SCHEMA_VERSION}; use the version that wrote it (the file was not touched)"
                )
            if [row[0] for row in connection.execute("PRAGMA integrity_check")] != ["ok"]:
                raise sqlite3.DatabaseError("file is malformed")
            if stored_schema(connection) != expected_schema():
                raise sqlite3.DatabaseError(
                    "file is malformed: its tables or triggers were changed"
                )
            # a file that cannot be written must be known before a run
            connection.execute("BEGIN IMMEDIATE")
            try:
                settings = _read_settings(connection)
                self._read(connection, Head(0, first_digest(settings)))
                return settings
            finally:
                connection.execute("ROLLBACK")

    def _forked(self) -> bool:
        return os.getpid() != self._process

    @contextmanager
    def _connection(self, *, verify: bool = True) -> Iterator[sqlite3.Connection]:
        with self._lock, self._failures():
            if self._memory is not None and self._forked():
                raise LedgerError(
                    "the ledger in memory belongs to the process that made it: what a forked one "
                    "reserves, the first would never see. Fix: Ledger(path), or reserve in the "
                    "first process."
                )
            kept = nullcontext(self._memory) if self._memory else closing(_connect(self.path))
            with kept as connection:
                # nobody puts another one in the place of what is in this process' memory
                verify = verify and self._memory is None
                if verify and _read_settings(connection) != self.settings:
                    raise self._replaced()
                yield connection

    def _replaced(self) -> LedgerError:
        return LedgerError(
            f"{self.path}: another ledger has taken this file's place; put the first back"
        )

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Every failure of SQLite or the file system as a LedgerError that says what to do."""
        try:
            yield
        except LedgerError:
            raise
        except _FAILURES as error:
            where = "the ledger in memory" if self.path is None else str(self.path)
            raise LedgerError(f"{where}: {reason_of(error)}; {advice_on(error)}") from error


def _connect(path: Path | None) -> sqlite3.Connection:
    """An existing file, never created here."""
    if path is None:
        raise sqlite3.ProgrammingError("closed")
    _refuse_other_names(path)
    uri = f"{path.absolute().as_uri()}?mode=rw"
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        connection.execute("PRAGMA synchronous = EXTRA")
    except BaseException:
        connection.close()
        raise
    return connection


def _refuse_other_names(path: Path) -> None:
    """Refuse a file with two names: it has two journals, and a crash's is found under one."""
    found = path.stat()
    if found.st_nlink < 2:
        return
    # a process died, or is about to remove it itself
    for draft in path.parent.glob(".dpoptim-*.tmp"):
        with suppress(FileNotFoundError):
            if draft.stat().st_ino == found.st_ino:
                draft.unlink()
    if path.stat().st_nlink > 1:
        raise OSError(errno.EMLINK, "the file has another name (a hard link)")


def _create(path: Path, settings: Settings) -> None:
    """A complete ledger appears at `path` at once, or (if somebody was faster) theirs stays."""
    leftovers = [path.with_name(path.name + end) for end in ("-wal", "-journal")]
    if any(file.exists() for file in leftovers):
        # somebody has just made it, and uses it: its name was there before its journal
        if path.exists():
            return
        raise sqlite3.DatabaseError("file is missing but its -wal or -journal file is there")
    create_whole(path, new_file(settings))


def _read_head(connection: sqlite3.Connection) -> Head:
    row = connection.execute("SELECT count, digest FROM head").fetchone()
    if row is None or not isinstance(row[0], int) or not isinstance(row[1], str):
        raise sqlite3.DatabaseError("file is malformed: no head")
    return Head(*row)


def _read_settings(connection: sqlite3.Connection) -> Settings:
    columns = ", ".join(field.name for field in fields(Settings))
    row: tuple[Any, ...] | None = connection.execute(f"SELECT {columns} FROM settings").fetchone()
    if row is None:
        raise sqlite3.DatabaseError("file is malformed: no settings")
    numbers = {"epsilon", "delta", "renyi_order"}
    for field, value in zip(fields(Settings), row, strict=True):
        right = (
            value is None or isinstance(value, float)
            if field.name in numbers
            else isinstance(value, str)
        )
        if not right:
            raise sqlite3.DatabaseError(f"file is malformed: its {field.name} is of another type")
    return Settings(*row)
