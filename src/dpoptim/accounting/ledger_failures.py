"""Failures of a ledger's file, and what to do about each."""

import errno
import sqlite3

from dpoptim.printable import printable

BUSY_SECONDS = 30.0
LONGEST_REASON = 200


def reason_of(error: BaseException) -> str:
    if isinstance(error, (sqlite3.Error, OSError)):
        return printable(str(error))[:LONGEST_REASON]  # SQLite may quote what it could not read
    return f"file is malformed ({type(error).__name__})"


def advice_on(error: BaseException) -> str:
    """Return how to mend a failure, by its text: SQLite's codes do not reach every exception."""
    text = reason_of(error).lower()
    advice = {
        "hard link": "a crash is mended under one name alone. Remove the other name; for a "
        "backup, copy the file",
        "full": "free some space and try again; nothing was reserved",
        "no space": "free some space and try again; nothing was reserved",
        "too large": "free some space and try again; nothing was reserved",
        "readonly": "give this user write access to the file and its directory",
        "locked": f"another process held it for {BUSY_SECONDS:g} s; try again when that one is "
        "done",
        "empty": "restore it from a backup; if it never was a ledger, delete it",
        "of this kind": "it belongs to something else and was not touched; choose another path",
        "older copy": "put the newer one back, which knows what was spent since",
        "not a database": "it is no ledger and was not touched; choose another path, or restore "
        "a backup",
        "could not decode": "it is damaged and was not touched; restore it from a backup",
        "malformed": "it is damaged and was not touched; restore it from a backup",
        "no such table": "it is damaged and was not touched; restore it from a backup",
        "no such file": "put it back, or name its new place: Ledger(path), "
        "set_params(ledger=Ledger(path))",
        "-wal": "put the ledger file back beside it: together they hold the reservations",
        "closed": "open the ledger again",
    }
    for sign, fix in advice.items():
        if sign in text:
            return fix
    if isinstance(error, OSError) and error.errno in (errno.EPERM, errno.ENOTSUP, errno.EXDEV):
        return "the file system has no hard links; put the ledger on a local disk"
    return "give the path of a file, in an existing directory that this user may write to"
