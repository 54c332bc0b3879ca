"""A checkpoint's files of several processes, each with its part of a model none has whole.

Beside the checkpoint, which names them and their SHA-256, lies one file of each rank, as secret and
with the same seal. They have names of their own in every save, and are all on the disk before the
checkpoint is replaced; what the one before needs is removed after that. So a save that is
interrupted anywhere, on any rank, loses nothing saved before.

Not by `torch.distributed.checkpoint`: it replaces its files one after the other, cannot seal them,
and reads its metadata by ``pickle.load``, which runs whatever the file says. Reading these runs no
code.
"""

import hashlib
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpoptim.accounting.ledger import LedgerError
from dpoptim.distributed.ranks import Ranks
from dpoptim.distributed.stored import Read, stored
from dpoptim.errors import PrivacyError, RankError
from dpoptim.files import unused_name, write_atomically
from dpoptim.printable import printable
from dpoptim.training.checkpoint import opened, sealed, write_checkpoint

PURPOSE = b"dpoptim part of a checkpoint"


def save_with_parts(
    path: Path,
    contents: dict[str, Any],
    parts: Sequence[Tensor],
    *,
    key: bytes | None,
    announce: Callable[[str], None],
    ranks: Ranks,
) -> None:
    """`write_checkpoint` with what this rank has in parts, after which only its files are left."""
    path = Path(os.path.realpath(path))  # the file itself, where this is a link
    files = write_rank_files(path, parts, key, ranks)
    try:
        write_checkpoint(
            path, contents | {"files": files}, key=key, announce=announce, on_first=ranks.from_first
        )
    except (OSError, ValueError, PrivacyError, LedgerError):  # it is not there on any rank
        remove_rank_files(path, [each["file"] for each in files])
        raise
    remove_other_rank_files(path, files)


def write_rank_files(
    path: Path, parts: Sequence[Tensor], key: bytes | None, ranks: Ranks
) -> list[dict[str, str]]:
    """Write this rank's parts beside the checkpoint at ``path``; all ranks together.

    Returns:
        of each rank, the name of its file and the file's SHA-256; empty where nothing is in parts.

    Raises:
        OSError: this rank's file cannot be written. RankError: another's. No file is left then.
    """
    if not ranks.most(len(parts)):
        return []
    token = ranks.from_first(unused_name)
    own = path.with_name(f"{path.name}.{token}.{ranks.rank}-of-{ranks.size}.part")
    failure: Exception | None = None
    entry = {"file": own.name}
    try:
        buffer = io.BytesIO()
        torch.save([part.contiguous().clone() for part in parts], buffer)
        body = buffer.getvalue() if key is None else sealed(buffer.getvalue(), key, PURPOSE)
        entry["sha256"] = hashlib.sha256(body).hexdigest()
        write_atomically(own, body, secret=True)
    except Exception as error:
        failure = error
    everyone = ranks.gathered(entry | ({} if failure is None else {"failed": ""}))
    failed = [str(rank) for rank, each in enumerate(everyone) if "failed" in each]
    if failed:
        remove_rank_files(path, [own.name])
        raise failure or RankError(
            f"private.save: rank {', '.join(failed)} could not write its file, and says why "
            "itself. What was saved before is unchanged."
        )
    return everyone


def remove_rank_files(path: Path, names: Sequence[str]) -> None:
    for name in names:
        with suppress(OSError):
            path.with_name(name).unlink()


def remove_other_rank_files(path: Path, needed: Sequence[Mapping[str, str]]) -> None:
    """Remove files of earlier saves to ``path``, replaced or never finished."""
    kept = {each["file"] for each in needed}
    ours = re.compile(re.escape(path.name) + r"\.[0-9a-f]{16}\.\d+-of-\d+\.part")
    with suppress(OSError):
        names = [name for name in os.listdir(path.parent) if ours.fullmatch(name)]
        remove_rank_files(path, [name for name in names if name not in kept])


def with_parts(contents: dict[str, Any], path: Path, key: bytes | None) -> dict[str, Any]:
    """A checkpoint's contents, `Stored` for tensors in ranks' files, read when asked for."""
    folder = Path(os.path.realpath(path)).parent
    return dict(stored(contents, reader(contents["files"], folder, key)))


def reader(files: Sequence[Mapping[str, str]], folder: Path, key: bytes | None) -> Read:
    """A reader of ranks' files: each is looked through once, then mapped if not sealed."""
    found: dict[int, list[Tensor]] = {}

    def read(rank: int, number: int) -> Tensor:
        if rank not in found:
            found[rank] = parts_of(folder / files[rank]["file"], files[rank]["sha256"], key)
        return found[rank][number]

    return read


def parts_of(path: Path, digest: str, key: bytes | None) -> list[Tensor]:
    """Parts that a rank wrote. Runs no code from the file.

    Raises:
        FileNotFoundError, ValueError: it is not there, or is another one.
    """
    name = printable(str(path))
    if not path.is_file():
        raise FileNotFoundError(
            f"resume: {name} is missing, which has a rank's part of the checkpoint. Fix: keep all "
            "files of a checkpoint together, on storage that every rank can read."
        )
    with path.open("rb") as file:
        right = hashlib.file_digest(file, "sha256").hexdigest() == digest
    if not right:
        raise ValueError(
            f"resume: {name} is damaged: its checksum is not what the checkpoint says. Fix: an "
            "earlier checkpoint, or a new run."
        )
    source: Any = path if key is None else io.BytesIO(opened(path.read_bytes(), key, PURPOSE, name))
    parts: list[Tensor] = torch.load(
        source, map_location="cpu", weights_only=True, mmap=key is None
    )
    return parts
