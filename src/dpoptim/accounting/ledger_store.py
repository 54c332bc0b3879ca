"""The ledger's file: an append-only SQLite database whose reservations survive a crash.

A connection lives as long as one operation. So nothing stays open between reservations, a fork or a
second thread carries no handle along, and a file that was deleted or replaced in the meantime is
noticed instead of written to in vain.

A new ledger is built under another name and linked into place when it is complete. Hence a file at
the ledger's path is never half made, and an empty or damaged one is always an error, never a fresh
budget.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import uuid
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import astuple, dataclass
from pathlib import Path

from dpoptim.accounting.ledger_settings import LedgerError, Settings

__all__ = ["LedgerStore", "Row"]

APPLICATION_ID = 0x64706F70  # "dpop": marks the file as ours in SQLite's header
SCHEMA_VERSION = 1
BUSY_SECONDS = 30.0

# Triggers rather than good intentions: no statement can lower what is reserved.
_SCHEMA = f"""
CREATE TABLE settings (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    ledger TEXT NOT NULL, created TEXT NOT NULL, dataset TEXT NOT NULL, neighboring TEXT NOT NULL,
    epsilon REAL, delta REAL, filter TEXT NOT NULL, renyi_order REAL
);
CREATE TABLE reservation (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE, time TEXT NOT NULL, label TEXT NOT NULL, event TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'committed')),
    resumed INTEGER NOT NULL DEFAULT 0
);
CREATE TRIGGER settings_stay BEFORE UPDATE ON settings BEGIN SELECT RAISE(ABORT, 'fixed'); END;
CREATE TRIGGER settings_kept BEFORE DELETE ON settings BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER reservation_kept BEFORE DELETE ON reservation BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER reservation_stays BEFORE UPDATE ON reservation
WHEN NEW.number != OLD.number OR NEW.id != OLD.id OR NEW.time != OLD.time OR NEW.label != OLD.label
    OR NEW.event != OLD.event OR NEW.resumed < OLD.resumed OR OLD.state = 'committed'
BEGIN SELECT RAISE(ABORT, 'append-only'); END;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""


@dataclass(frozen=True)
class Row:
    """One reservation as stored."""

    id: str
    time: str
    label: str
    event: str  # JSON
    state: str = "open"
    resumed: int = 0


class LedgerStore:
    """Rows on disk (or, without a path, in memory). Every method raises LedgerError and nothing else.

    Args:
        path: the database, or None.
        settings: written if the path does not exist yet; an existing ledger keeps its own.
    """

    def __init__(self, path: Path | None, settings: Settings) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._memory: sqlite3.Connection | None = None
        if path is None:
            self._memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            weakref.finalize(self, self._memory.close)  # a forgotten close() is no ResourceWarning
            _initialise(self._memory, settings)
            self.settings = settings
            return
        with self._failures():
            if not path.parent.is_dir():
                raise FileNotFoundError(f"there is no directory {path.parent}")
            if not path.exists():
                _create(path, settings)
            if path.stat().st_size == 0:
                raise sqlite3.DatabaseError("file is empty")
        self.settings = self._identify()

    def close(self) -> None:
        """Forgets a ledger in memory; one on disk has nothing open."""
        if self._memory is not None:
            self._memory.close()

    def rows(self) -> list[Row]:
        """All reservations, oldest first."""
        with self._connection() as connection:
            query = "SELECT id, time, label, event, state, resumed FROM reservation ORDER BY number"
            return [Row(*row) for row in connection.execute(query)]

    def append(self, row: Row, *, after: int) -> bool:
        """Writes `row` durably if the ledger holds exactly `after` reservations; else False, nothing written.

        So whoever decided on an older view decides again: two processes cannot both take what is left.
        """
        with self._transaction() as connection:
            (count,) = connection.execute("SELECT COUNT(*) FROM reservation").fetchone()
            if count != after:
                return False
            connection.execute(
                "INSERT INTO reservation (id, time, label, event, state, resumed) VALUES (?, ?, ?, ?, ?, ?)",
                astuple(row),
            )
        return True

    def mark_committed(self, identity: str) -> bool:
        """Open to committed; True if the reservation exists (marking twice is harmless)."""
        with self._transaction() as connection:
            connection.execute("UPDATE reservation SET state = 'committed' WHERE id = ? AND state = 'open'", (identity,))
            query = "SELECT COUNT(*) FROM reservation WHERE id = ?"
            return bool(connection.execute(query, (identity,)).fetchone()[0])

    def mark_resumed(self, identity: str) -> bool:
        """Counts one more resumption of an open reservation; False if there is no such open one."""
        with self._transaction() as connection:
            update = "UPDATE reservation SET resumed = resumed + 1 WHERE id = ? AND state = 'open'"
            return connection.execute(update, (identity,)).rowcount == 1

    def _identify(self) -> Settings:
        """Checks that the file is a whole ledger of a known version that we may write; its settings."""
        with self._connection(verify=False) as connection:
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            if application != APPLICATION_ID:
                raise sqlite3.DatabaseError("file is not a database of this kind")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version != SCHEMA_VERSION:
                raise LedgerError(
                    f"{self.path}: ledger format {version}, this dpoptim reads format {SCHEMA_VERSION}; "
                    "upgrade dpoptim (the file was not touched)"
                )
            if [row[0] for row in connection.execute("PRAGMA integrity_check")] != ["ok"]:
                raise sqlite3.DatabaseError("file is malformed")
            connection.execute("BEGIN IMMEDIATE")  # a file that cannot be written must be known before a run
            connection.execute("ROLLBACK")
            return _read_settings(connection)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing, one writer at a time; on disk before it returns."""
        with self._connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _connection(self, *, verify: bool = True) -> Iterator[sqlite3.Connection]:
        with self._lock, self._failures():
            kept = nullcontext(self._memory) if self._memory else closing(_connect(self.path))
            with kept as connection:
                if verify and _read_settings(connection) != self.settings:
                    raise LedgerError(f"{self.path}: another ledger has taken this file's place; put the first back")
                yield connection

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Every failure of SQLite or the file system as a LedgerError that says what to do."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            where = "the ledger in memory" if self.path is None else str(self.path)
            raise LedgerError(f"{where}: {error}; {_advice(error)}") from error


def _connect(path: Path | None) -> sqlite3.Connection:
    """An existing file, never created here."""
    if path is None:
        raise sqlite3.ProgrammingError("closed")
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        connection.execute("PRAGMA synchronous = FULL")
    except BaseException:
        connection.close()
        raise
    return connection


def _initialise(connection: sqlite3.Connection, settings: Settings) -> None:
    connection.executescript("BEGIN;" + _SCHEMA)
    connection.execute("INSERT INTO settings VALUES (1, ?, ?, ?, ?, ?, ?, ?, ?)", astuple(settings))
    connection.execute("COMMIT")


def _create(path: Path, settings: Settings) -> None:
    """A complete ledger appears at `path` at once, or (if somebody was faster) theirs stays."""
    leftovers = [path.with_name(path.name + end) for end in ("-wal", "-journal")]
    if any(file.exists() for file in leftovers):
        if path.exists():  # somebody has just made it, and uses it: its name was there before its journal
            return
        raise sqlite3.DatabaseError("file is missing but its -wal or -journal file is there")
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)  # less the umask, as for any file
    os.close(descriptor)
    try:
        with closing(_connect(draft)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            _initialise(connection, settings)
        try:
            os.link(draft, path)  # unlike a rename, a link never replaces what is there
        except FileExistsError:
            return
    finally:
        for file in (draft, draft.with_name(draft.name + "-wal"), draft.with_name(draft.name + "-shm")):
            file.unlink(missing_ok=True)
    if os.name == "posix":  # the new name itself must survive a power cut
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _read_settings(connection: sqlite3.Connection) -> Settings:
    query = "SELECT ledger, created, dataset, neighboring, epsilon, delta, filter, renyi_order FROM settings"
    row = connection.execute(query).fetchone()
    if row is None:
        raise sqlite3.DatabaseError("file is malformed: no settings")
    return Settings(*row)


def _advice(error: Exception) -> str:
    """The mended situation for a failure; by text, since SQLite's codes do not reach every exception."""
    text = str(error).lower()
    advice = {
        "full": "free some space and try again; nothing was reserved",
        "readonly": "give this user write access to the file and its directory",
        "locked": f"another process held it for {BUSY_SECONDS:g} s; try again when that one is done",
        "empty": "restore it from a backup; if it never was a ledger, delete it",
        "of this kind": "it belongs to something else and was not touched; choose another path",
        "not a database": "it is no ledger and was not touched; choose another path, or restore a backup",
        "malformed": "it is damaged and was not touched; restore it from a backup",
        "no such table": "it is damaged and was not touched; restore it from a backup",
        "-wal": "put the ledger file back beside it: together they hold the reservations",
        "closed": "open the ledger again",
    }
    for sign, fix in advice.items():
        if sign in text:
            return fix
    if isinstance(error, OSError) and error.errno in (errno.EPERM, errno.ENOTSUP, errno.EXDEV):
        return "the file system has no hard links; put the ledger on a local disk"
    return "give the path of a file, in an existing directory that this user may write to"
