"""Files are there whole or not at all: no half reports, and a failure loses nothing."""

import contextlib
import errno
import os
import re
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

try:
    import fcntl

    LOCKS = True
except (
    ModuleNotFoundError
):  # Windows; there a file that is open cannot be deleted, which serves as well
    LOCKS = False

_FIXES = {
    errno.ENOSPC: "free some disk space, or choose a folder on another disk",
    errno.EDQUOT: "free some of your disk quota, or choose a folder on another disk",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or choose a folder on another disk",
    errno.EACCES: "choose a folder that you may write to, or change its permissions",
    errno.EPERM: "choose a folder that you may write to, or change its permissions",
    errno.EROFS: "choose a folder on a disk that is not read-only",
    errno.ENOENT: "create the folder first, or choose one that exists",
    errno.ENOTDIR: "choose a path whose parent is a folder",
    errno.EISDIR: "give the path of a file; this one is a folder",
    errno.EINVAL: "give the path of an ordinary file",
    errno.ENAMETOOLONG: "choose a shorter file name",
}
_TEMPORARY = re.compile(r"\.dpoptim-[0-9a-f]{16}\.tmp")
TURN = 600.0  # seconds
_swept: set[Path] = set()  # folders that this process has cleaned up
_sweeping = threading.Lock()


def write_atomically(
    path: Path, content: bytes | str | Iterable[bytes | memoryview], *, secret: bool = False
) -> None:
    """Make ``content`` (text as UTF-8) the whole content of the file ``path``, or change nothing.

    Bytes may come piece by piece.

    The bytes go to a new file beside it, are forced to the disk, and take the name in one move. An
    existing file's permissions are kept, from the first byte on, and a symbolic link still points
    where it did. ``secret``: nobody but the owner may ever read or write it, whatever was allowed
    before. What killed processes left beside it is removed.

    Raises:
        OSError: (PermissionError, FileNotFoundError, ... by its errno) naming the path and the
            fix. What was at ``path`` before is untouched then, and nothing is left beside it.
    """
    target = Path(os.path.realpath(path))
    # A file name on Linux can hold what UTF-8 cannot; a finished run is not to be lost over a
    # name.
    whole = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    data = [whole] if isinstance(whole, bytes) else whole
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        kept = mode_of(target)
        with written_beside(target, data, private=secret or kept is not None) as temporary:
            if kept is not None and not secret:
                os.chmod(temporary, kept)
            os.replace(temporary, target)
    except OSError as error:
        raise _explained(error, path) from error


def make_folder(path: Path) -> None:
    """Make a folder and those that it is in; harmless where it is there.

    Raises:
        OSError: naming the path and the fix.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _explained(error, path) from error


def create_whole(path: Path, data: bytes) -> bool:
    """Make a new file of this content, on disk when this returns; False if ``path`` is there.

    Raises:
        OSError: as the system says it. Nothing is left then.
    """
    with written_beside(path, [data], private=False) as temporary:
        try:
            os.link(temporary, path)  # unlike a rename, a link never replaces what is there
        except FileExistsError:
            return False
    sync_folder(path.parent)  # the new name itself must survive a power cut
    return True


@contextlib.contextmanager
def written_beside(
    target: Path, data: Iterable[bytes | memoryview], *, private: bool
) -> Iterator[Path]:
    """A new file with this content in the folder of ``target``, for the time of the ``with``."""
    temporary, handle = begin_beside(target, private=private)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(data)
            file.flush()
            os.fsync(file.fileno())
            if LOCKS:
                yield temporary
        if not LOCKS:
            yield temporary
    finally:  # an interrupt must not leave litter either
        with contextlib.suppress(OSError):
            temporary.unlink()


def begin_beside(target: Path, *, private: bool) -> tuple[Path, int]:
    """Make a new, empty file in the folder of ``target``; returns its path and its handle.

    It is locked while the handle is open, so that other processes can tell litter from work.
    """
    remove_litter(target.parent)
    while True:
        # A short name of its own: beside a name as long as the system allows, a suffix has no
        # room.
        temporary = target.with_name(f".dpoptim-{unused_name()}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        # os.open, so that the umask decides about permissions; tempfile makes files only for us.
        handle = os.open(temporary, flags, 0o600 if private else 0o666)
        if _lock(handle) and temporary.exists():  # else somebody took it for litter just now
            return temporary, handle
        os.close(handle)


@contextlib.contextmanager
def turn_in(folder: Path) -> Iterator[None]:
    """Wait for whoever else replaces several files of a folder together, and let others wait.

    On a file system without locks nobody waits, nor for a folder that cannot be read; writing there
    says why.

    Raises:
        OSError: somebody has had the turn for `TURN` seconds.
    """
    handle = None
    if LOCKS:
        with contextlib.suppress(OSError):
            handle = os.open(folder, os.O_RDONLY)
    try:
        end = time.monotonic() + TURN
        while handle is not None and not _lock(handle):
            if time.monotonic() > end:
                raise OSError(
                    errno.EAGAIN,
                    f"cannot write to {folder}: another process has been saving there for "
                    f"{TURN:.0f} s. What was there before is unchanged. Fix: a folder for each "
                    "run, or end that process.",
                )
            time.sleep(0.01)
        yield
    finally:
        if handle is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # a child forked meanwhile has it open, too
            os.close(handle)


def unused_name() -> str:
    """16 digits that no other file was named by."""
    return secrets.token_hex(8)


def remove_litter(folder: Path) -> None:
    """Remove what killed processes left of unfinished files in ``folder``; once in a process."""
    with _sweeping:
        if folder in _swept:
            return
        _swept.add(folder)
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if _TEMPORARY.fullmatch(name):
                _remove_if_abandoned(folder / name)


def mode_of(target: Path) -> int | None:
    """Permissions of a regular file; None if there is nothing.

    Raises:
        OSError: it is a device, say, which must not be replaced by a file.
    """
    try:
        found = target.stat()
    except FileNotFoundError:
        return None
    if not target.is_file():
        raise OSError(errno.EINVAL, "not a regular file")
    return found.st_mode & 0o7777


def sync_folder(folder: Path) -> None:
    """Force a folder's names to the disk, where the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _lock(handle: int) -> bool:
    """Take a lock that ends with the process; False if somebody holds it."""
    if not LOCKS:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: nobody can clean up there
        return True
    return True


def _remove_if_abandoned(temporary: Path) -> None:
    with contextlib.suppress(OSError):
        if not LOCKS:
            temporary.unlink()
            return
        handle = os.open(temporary, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temporary.unlink()
        finally:
            os.close(handle)


def _explained(error: OSError, path: Path) -> OSError:
    reason = error.strerror or str(error) or type(error).__name__
    fix = _FIXES.get(error.errno or 0, "check the disk, or choose another folder")
    message = f"cannot write {path}: {reason}. What was there before is unchanged. Fix: {fix}."
    # With a number OSError makes its subclass (PermissionError, ...), so callers can tell the
    # cases apart.
    return OSError(error.errno, message) if error.errno is not None else OSError(message)
