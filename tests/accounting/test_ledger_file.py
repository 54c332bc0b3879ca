"""What happens to a ledger's file from outside: damage, other names, full disks, forks. Nothing is
silent.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import dp_accounting as dp
import pytest

from dpoptim.accounting import ledger_store
from dpoptim.accounting.ledger import BudgetExceeded, Ledger
from dpoptim.accounting.ledger_schema import Entry, Head
from dpoptim.errors import LedgerError
from forked import needs_fork
from torture.targets import read_ledger

AR = "add-or-remove-one"


def reserve(ledger: Ledger, noise: float = 20.0, label: str = "run") -> str:
    return ledger.reserve(dp.GaussianDpEvent(noise), neighboring=AR, label=label).id


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cells.ledger"


@pytest.fixture
def filled(path: Path) -> Path:
    ledger = Ledger(path, epsilon=8, delta=1e-6)
    first = reserve(ledger, 11.0, "first")
    ledger.begin_releases(first, 10, resumed=0)
    ledger.note_checkpoint(first, 5, "ab" * 32, resumed=0, begun=5)
    ledger.resume(first, dp.GaussianDpEvent(11.0), released=5)
    ledger.commit(ledger.entries()[0])
    for number in range(20):
        reserve(ledger, 12.0 + number, f"run {number}")
    return path


def test_no_flipped_byte_changes_what_is_read(filled: Path) -> None:
    """300 flips: each is refused in one line, or changes nothing."""
    good, right = filled.read_bytes(), read_ledger(filled)
    chance = random.Random(1)
    refused: list[str] = []
    for _ in range(300):
        place = chance.randrange(len(good))
        filled.write_bytes(
            good[:place] + bytes([good[place] ^ (1 << chance.randrange(8))]) + good[place + 1 :]
        )
        try:
            assert read_ledger(filled) == right
        except LedgerError as error:
            refused.append(str(error))
        Path(f"{filled}-journal").unlink(missing_ok=True)
    assert len(refused) > 75
    # one line, with the fix
    assert [text for text in refused if "\n" in text or "; " not in text] == []


def test_entries_that_vanish_are_missed(filled: Path) -> None:
    """By a tool that knows no triggers: the last entry, one in the middle, or all."""
    good = filled.read_bytes()
    for statement in (
        "DELETE FROM entry WHERE number = 25",
        "DELETE FROM entry WHERE number = 7",
        "DELETE FROM entry",
        "UPDATE entry SET body = replace(body, '12.0', '92.0')",
        "UPDATE settings SET epsilon = 80",
    ):
        filled.write_bytes(good)
        with closing(sqlite3.connect(filled)) as connection, connection:
            triggers = connection.execute(
                "SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"
            ).fetchall()
            for name, _ in triggers:
                connection.execute(f"DROP TRIGGER {name}")
            connection.execute(statement)
            for _, text in triggers:
                connection.execute(text)
        with pytest.raises(LedgerError, match="damaged"):
            Ledger(filled)


def test_dropped_triggers_are_missed(filled: Path) -> None:
    with closing(sqlite3.connect(filled)) as connection:
        connection.execute("DROP TRIGGER entry_stays")
    with pytest.raises(LedgerError, match="triggers were changed"):
        Ledger(filled)


def test_an_older_copy_is_noticed_by_whoever_saw_the_newer(filled: Path) -> None:
    ledger = Ledger(filled)
    older = filled.read_bytes()
    reserve(ledger, 40.0)
    digest = ledger.digest
    filled.write_bytes(older)
    with pytest.raises(LedgerError, match="older copy; put the newer one back"):
        ledger.entries()
    again = Ledger(filled)  # the file by itself is a whole ledger
    again.verify()
    with pytest.raises(LedgerError, match="older copy"):
        again.verify(digest=digest)
    reserve(again, 41.0)
    with pytest.raises(LedgerError, match="damaged"):
        reserve(ledger)


def test_verify_follows_the_budget(filled: Path) -> None:
    ledger = Ledger(filled)
    digest = ledger.digest
    reserve(ledger, 50.0)
    assert ledger.verify(digest=digest) == 26
    entry = ledger_store.Entry(
        "reserved", "x", "t", "too much", '{"noise_multiplier": 0.1, "type": "Gaussian"}'
    )
    with ledger._store._lock:
        assert ledger._store.append([entry], after=ledger._store.read(ledger._store.start())[1])
    with pytest.raises(BudgetExceeded):
        ledger.verify()


@needs_fork
def test_a_fork_cannot_reserve_in_memory() -> None:
    """Two workers once spent 3.95 of 3."""
    ledger = Ledger(epsilon=3, delta=1e-6)
    reserve(ledger)
    child = os.fork()
    if child == 0:
        try:
            reserve(ledger)
        except LedgerError as error:
            os._exit(7 if "belongs to the process" in str(error) else 8)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    reserve(ledger)
    assert len(ledger.entries()) == 2


def test_a_second_name_is_refused(filled: Path) -> None:
    other = filled.with_name("other")
    os.link(filled, other)
    for name in (filled, other):
        with pytest.raises(LedgerError, match="hard link.*Remove the other name"):
            Ledger(name)
    other.unlink()
    assert len(Ledger(filled).entries()) == 21


def test_a_name_left_by_a_killed_creation_is_removed(filled: Path) -> None:
    draft = filled.with_name(f".dpoptim-{'0' * 16}.tmp")
    os.link(filled, draft)
    assert len(Ledger(filled).entries()) == 21
    assert not draft.exists()


def test_a_journal_that_is_lost_loses_no_entry(filled: Path) -> None:
    """Killed in mid-transaction; then the file beside it is removed, or the ledger renamed without
    it.
    """
    before, refused = read_ledger(filled), ""
    for repeat in range(10):
        child = os.fork()
        if child == 0:
            with closing(sqlite3.connect(filled, isolation_level=None)) as connection:
                # pages reach the file before the commit
                connection.execute("PRAGMA cache_size = 1")
                connection.execute("BEGIN IMMEDIATE")
                for number in range(2 + 20 * repeat):
                    entry = (26 + number, "reserved", str(number), "t", "l" * 1000, "{}", "d")
                    connection.execute("INSERT INTO entry VALUES (?, ?, ?, ?, ?, ?, ?)", entry)
                    connection.execute("UPDATE head SET count = count + 1")
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        Path(f"{filled}-journal").unlink(missing_ok=True)
        try:
            assert read_ledger(filled) == before
        except LedgerError as error:
            refused = str(error)
            break  # half a transaction is in the file: seen, and not taken for a ledger
    assert refused == "" or "damaged" in refused


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """A disk that is full: no file grows beyond ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize("kilobytes", range(0, 36, 4))
def test_a_full_disk_grants_nothing_and_damages_nothing(path: Path, kilobytes: int) -> None:
    granted: list[str] = []
    refused = ""
    with largest_file(1024 * kilobytes):
        try:
            ledger = Ledger(path, epsilon=8, delta=1e-6)
            for number in range(60):
                granted.append(reserve(ledger, 60.0, f"run {number} " * 20))
        except LedgerError as error:
            refused = str(error)
    assert "free some space" in refused or "disk" in refused
    assert len(granted) < 60
    assert os.listdir(path.parent) in ([path.name], [])
    again = Ledger(path)
    assert [entry.id for entry in again.entries()] == granted
    again.verify()
    reserve(again, 60.0)


def test_ten_thousand_entries_are_quick() -> None:
    """Seconds would be the sum of all charges, computed anew at each reservation."""
    ledger = Ledger(epsilon=20, delta=1e-6)
    for number in range(300):
        reserve(ledger, 1000.0 + number)
    charged: list[object] = []
    budget = ledger.budget
    assert budget is not None
    original = type(budget).charge

    def counted(self: object, *args: object) -> object:
        charged.append(args)
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(budget), "charge", counted)
        reserve(ledger, 2000.0)
        assert len(charged) == 2  # of the one before and the new one, out of 301


def test_a_ledger_names_what_was_reserved_through_it(path: Path) -> None:
    """The newest entry of the file may be a concurrent run's."""
    ours, theirs = Ledger(path), Ledger(path)
    mine = reserve(ours)
    reserve(theirs)
    assert ours.made == [mine]
    assert ours.entries()[-1].id != mine


def test_a_charge_and_the_checkpoints_before_it_are_written_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped between the two, neither is there: a charge that no checkpoint could take up."""
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    event = dp.GaussianDpEvent(20.0)
    run, digests = ledger.new_id(), ["a" * 64, "b" * 64]
    stated = {"neighboring": "add-or-remove-one", "label": "run", "run": run}
    original, done = Entry.after, []

    def stopped(entry: Entry, head: Head) -> Head:
        done.append(entry.kind)
        if len(done) == 2:
            raise KeyboardInterrupt
        return original(entry, head)

    with monkeypatch.context() as broken:
        broken.setattr(Entry, "after", stopped)
        with pytest.raises(KeyboardInterrupt):
            ledger.reserve(event, **stated, checkpoints=digests)
    assert len(done) == 2
    assert not Ledger(path).entries()
    assert ledger.reserve(event, **stated, checkpoints=digests).id == run
    other = Ledger(path)
    assert all(other.knows_checkpoint(run, 0, digest) for digest in digests)
    assert not other.knows_checkpoint(run, 1, digests[0])
    other.verify()
    with pytest.raises(LedgerError, match="charged already"):
        other.reserve(event, **stated)
    assert len(other.entries()) == 1


@pytest.mark.parametrize("wrong", [{"run": "mine"}, {"checkpoints": ["a" * 63 + " "]}])
def test_ids_and_digests_that_no_ledger_could_read_are_refused(wrong: dict[str, Any]) -> None:
    ledger = Ledger()
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected text in the form"):
        ledger.reserve(
            dp.GaussianDpEvent(20.0),
            neighboring="add-or-remove-one",
            label="run",
            **wrong,
        )
    assert not ledger.entries()
