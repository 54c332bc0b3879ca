"""Files are there whole or not at all: a reader never finds half a report, and a failure loses nothing."""

import contextlib
import errno
import os
import secrets
from pathlib import Path

_FIXES = {
    errno.ENOSPC: "free some disk space, or choose a folder on another disk",
    errno.EDQUOT: "free some of your disk quota, or choose a folder on another disk",
    errno.EACCES: "choose a folder that you may write to, or change its permissions",
    errno.EPERM: "choose a folder that you may write to, or change its permissions",
    errno.EROFS: "choose a folder on a disk that is not read-only",
    errno.ENOENT: "create the folder first, or choose one that exists",
    errno.ENOTDIR: "choose a path whose parent is a folder",
    errno.EISDIR: "give the path of a file; this one is a folder",
    errno.EINVAL: "give the path of an ordinary file",
    errno.ENAMETOOLONG: "choose a shorter file name",
}


def write_atomically(path: Path, content: bytes | str, *, secret: bool = False) -> None:
    """Make ``content`` (text as UTF-8) the whole content of the file ``path``, or change nothing.

    The bytes go to a new file beside it, are forced to the disk, and take the name in one move. An existing
    file's permissions are kept, and a symbolic link still points where it did. ``secret``: nobody but the owner may
    read or write it, whatever was allowed before.

    Raises:
        OSError: (PermissionError, FileNotFoundError, ... by its errno) naming the path and the fix.
            What was at ``path`` before is untouched then, and nothing is left beside it.
    """
    # A file name on Linux can hold what UTF-8 cannot; a finished run is not to be lost over a name.
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    # A short name of its own: beside a name as long as the system allows, there is no room for a suffix.
    temporary = target.with_name(f".dpoptim-{secrets.token_hex(8)}.tmp")
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if target.exists() and not target.is_file():  # a device, say, which must not be replaced by a file
            raise OSError(errno.EINVAL, "not a regular file")
        # os.open, so that the process's umask decides about permissions; tempfile makes files only for us.
        handle = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600 if secret else 0o666
        )
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if not secret:
            with contextlib.suppress(FileNotFoundError):
                os.chmod(temporary, target.stat().st_mode & 0o7777)
        os.replace(temporary, target)
    except BaseException as error:  # an interrupt must not leave litter either
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise _explained(error, path) from error
        raise


def _explained(error: OSError, path: Path) -> OSError:
    reason = error.strerror or str(error) or type(error).__name__
    fix = _FIXES.get(error.errno or 0, "check the disk, or choose another folder")
    message = f"cannot write {path}: {reason}. What was there before is unchanged. Fix: {fix}."
    # With a number OSError makes its subclass (PermissionError, ...), so callers can tell the cases apart.
    return OSError(error.errno, message) if error.errno is not None else OSError(message)
