"""The tables of a ledger's file, and the digests by which a changed one is recognised.

Entries form a chain: the digest of each covers the digest of the one before, and the first one's
covers the settings. The head, a row of its own, holds their number and the last digest. So no byte
of what is recorded can change, and no entry vanish, without a disagreement.

The digests are not keyed: they show damage and careless hands. Somebody who rewrites the whole
chain is found by whoever wrote an earlier head down elsewhere (``dpoptim ledger --verify
--digest``).
"""

import hashlib
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from typing import Any

from dpoptim.accounting.ledger_settings import Settings

APPLICATION_ID = 0x64706F70  # "dpop": marks the file as ours in SQLite's header
SCHEMA_VERSION = 2

# Triggers against careless statements, REPLACE included; whoever drops them is left with the
# chain.
_SCHEMA = f"""
CREATE TABLE settings (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    ledger TEXT NOT NULL, created TEXT NOT NULL, dataset TEXT NOT NULL, neighboring TEXT NOT NULL,
    epsilon REAL, delta REAL, filter TEXT NOT NULL, renyi_order REAL
);
CREATE TABLE head (only INTEGER PRIMARY KEY CHECK (only = 1), count INTEGER NOT NULL, digest TEXT NOT NULL);
CREATE TABLE entry (
    number INTEGER PRIMARY KEY, kind TEXT NOT NULL, run TEXT NOT NULL, time TEXT NOT NULL,
    label TEXT NOT NULL, body TEXT NOT NULL, digest TEXT NOT NULL
);
CREATE TRIGGER settings_once BEFORE INSERT ON settings WHEN EXISTS (SELECT 1 FROM settings)
BEGIN SELECT RAISE(ABORT, 'fixed'); END;
CREATE TRIGGER settings_stay BEFORE UPDATE ON settings BEGIN SELECT RAISE(ABORT, 'fixed'); END;
CREATE TRIGGER settings_kept BEFORE DELETE ON settings BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER head_once BEFORE INSERT ON head WHEN EXISTS (SELECT 1 FROM head)
BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER head_grows BEFORE UPDATE ON head WHEN NEW.only != 1 OR NEW.count != OLD.count + 1
BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER head_kept BEFORE DELETE ON head BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER entry_once BEFORE INSERT ON entry
WHEN NEW.number IS NOT (SELECT count FROM head) + 1
BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER entry_stays BEFORE UPDATE ON entry BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER entry_kept BEFORE DELETE ON entry BEGIN SELECT RAISE(ABORT, 'append-only'); END;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""


@dataclass(frozen=True)
class Head:
    """How many entries there are, and the digest of the last (without any: of the settings)."""

    count: int
    digest: str


class Kind:
    """Kinds of entries about a run."""

    RESERVED = "reserved"  # body: the event, JSON
    UNIT = "unit"  # body: what the run protects each of, if not records: "person"
    BEGUN = "begun"  # body: a number of releases; no more than these have been begun
    SAVED = "saved"  # body: releases so far, releases begun, SHA-256 of the checkpoint
    RESUMED = "resumed"  # body: the releases of the checkpoint it goes on from
    COMMITTED = "committed"
    # body: releases made at most, and the event of these, JSON: all that a budget still counts
    ENDED = "ended"
    REENTERED = "reentered"  # by the process that had committed it; earlier checkpoints are void


@dataclass(frozen=True)
class Entry:
    """One line of the ledger; `run` is the id of its reservation."""

    kind: str
    run: str
    time: str
    label: str = ""
    body: str = ""

    def after(self, head: Head) -> Head:
        """The head once this entry follows."""
        parts = (head.digest, str(head.count + 1), *field_values(self))
        return Head(head.count + 1, _digest(parts))


def first_digest(settings: Settings) -> str:
    """Beginning of the chain."""
    return _digest(repr(value) for value in field_values(settings))


def new_file(settings: Settings) -> bytes:
    """A ledger without entries, as the bytes of an SQLite database with a rollback journal."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        initialise(connection, settings)
        return connection.serialize()
    finally:
        connection.close()


def initialise(connection: sqlite3.Connection, settings: Settings) -> None:
    """Make the tables in an empty database in memory."""
    connection.deserialize(_tables())
    connection.execute("BEGIN")
    connection.execute(
        "INSERT INTO settings VALUES (1, ?, ?, ?, ?, ?, ?, ?, ?)", field_values(settings)
    )
    connection.execute("INSERT INTO head VALUES (1, 0, ?)", (first_digest(settings),))
    connection.execute("COMMIT")


def field_values(record: Entry | Settings) -> tuple[Any, ...]:
    """The fields, in order; `dataclasses.astuple` copies each of them, too."""
    return tuple([getattr(record, name) for name in record.__dataclass_fields__])


def stored_schema(connection: sqlite3.Connection) -> set[tuple[Any, ...]]:
    """Tables and triggers of a database, as SQLite keeps them."""
    return set(connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master"))


@cache
def _tables() -> bytes:
    """A database with the tables and triggers, and nothing in them: making them takes a while."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.executescript("BEGIN;" + _SCHEMA + "COMMIT;")
        return connection.serialize()


@cache
def expected_schema() -> frozenset[tuple[Any, ...]]:
    """Tables and triggers of a whole ledger."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.deserialize(_tables())
        return frozenset(stored_schema(connection))


def _digest(parts: Iterable[str]) -> str:
    """SHA-256 over texts and their lengths."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode()
        total.update(len(data).to_bytes(8, "big") + data)
    return total.hexdigest()
