"""The package as it is installed: digests by which two installations are compared."""

import hashlib
from functools import cache
from pathlib import Path

from dpoptim.runtime.compiled import LIBRARY

SOURCES, COMPILED = "dpoptim SHA-256", "dpoptim compiled SHA-256"  # as a run's versions name them
ENDINGS = (".py", ".pyi", ".c", ".h")


@cache
def digests() -> dict[str, str]:
    """SHA-256 of the package's sources, alike wherever it is installed; and of what was compiled.

    Of the files as they are when it is first asked; `folder_digest` says of what.
    """
    folder = Path(__file__).parent
    found = {SOURCES: folder_digest(folder)}
    if LIBRARY.is_file():
        found[COMPILED] = hashlib.sha256(LIBRARY.read_bytes()).hexdigest()
    return found


def folder_digest(folder: Path) -> str:
    """SHA-256 of the list of sources in a folder, as ``sha256sum`` writes it in order of names."""
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.suffix in ENDINGS and path.is_file()
    )
    whole = hashlib.sha256()
    for name in names:
        own = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        whole.update(f"{own}  {name}\n".encode())
    return whole.hexdigest()
