"""A checkpoint's files of several processes: `torch.distributed.checkpoint` with our storage.

PyTorch plans: which rank writes which box of which tensor (one that all have whole, once; none is
gathered), and, when resuming, which boxes of the files make up those of other processes. The
storage is ours, for the one that PyTorch brings cannot seal, replaces its files one after the
other, and reads its metadata by ``pickle.load``, which runs whatever the file says.

Each rank writes one file beside the checkpoint, as secret and with the same seal. The checkpoint
has the metadata: where each box lies, and its SHA-256. Files have names of their own in every save,
and are all on the disk before the checkpoint is replaced; what the one before needs is removed
after that. So a save that is interrupted anywhere, on any rank, loses nothing saved before.
"""

import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpoptim.distributed.agreement import bytes_of
from dpoptim.distributed.ranks import Ranks
from dpoptim.errors import LedgerError, PrivacyError, RankError
from dpoptim.files import turn_in, unused_name, write_atomically
from dpoptim.gradients.accumulation.boxes import Boxes, Stored, box_of, changed, is_large
from dpoptim.printable import printable
from dpoptim.training.checkpoints.checkpoint import SEAL_BYTES, opened, sealed, write_checkpoint

PURPOSE = b"dpoptim part of a checkpoint"
SAME = ("['model']", "['optimizers']", "['unfinished']")  # entries that ranks have alike
PIECE = 1 << 26  # bytes that are sealed at a time
ALIGNED = 64  # bytes: where a box begins
Place = tuple[int, int, str]  # first byte in a file, number of bytes, SHA-256
Buffer = bytes | memoryview


def save_with_parts(
    path: Path,
    contents: dict[str, Any],
    *,
    key: bytes | None,
    announce: Callable[[str], None],
    ranks: Ranks,
) -> None:
    """`write_checkpoint` of contents with `Boxes`; of several ranks, each writes its share of them.

    One process writes one file. Runs that save to one path take turns. Raises as
    `write_checkpoint`, and RankError where another rank could not write its file, or would write it
    elsewhere; no file of this save is left then.
    """
    ranks.agree({"path in private.save": os.path.abspath(path)})
    path = Path(os.path.realpath(path))  # the file itself, where this is a link
    with turn_in(path.parent) if ranks.rank == 0 else nullcontext():
        replace_checkpoint(path, contents, key, announce, ranks)


def replace_checkpoint(
    path: Path,
    contents: dict[str, Any],
    key: bytes | None,
    announce: Callable[[str], None],
    ranks: Ranks,
) -> None:
    """See `save_with_parts`; nobody else may do so meanwhile, who would remove files of this."""
    parts: dict[str, Any] = {"files": [], "tensors": {}}
    if ranks.size == 1:
        contents = changed(contents, lambda _, value: in_one_piece(value))
    else:
        found: dict[str, Boxes] = {}
        contents = changed(contents, partial(taken_out, found))
        parts = write_rank_files(path, found, key, ranks)
    try:
        write_checkpoint(
            path, contents | {"parts": parts}, key=key, announce=announce, on_first=ranks.from_first
        )
    except RankError:  # it may be there: whoever was lost may have been lost after that
        raise
    except (OSError, ValueError, PrivacyError, LedgerError):  # it is not there on any rank
        remove_rank_files(path, parts["files"])
        raise
    remove_other_rank_files(path, parts["files"])


def in_one_piece(value: Any) -> Any:
    """The whole tensor, which is what one process has of it."""
    if not isinstance(value, Boxes):
        return value
    return value.parts[0][1] if value.parts else torch.empty(value.shape, dtype=value.dtype)


def taken_out(found: dict[str, Boxes], key: str, value: Any) -> Any:
    """Move what is worth it to ``found``; nothing is left in its place."""
    if is_large(value) and key.startswith(SAME):
        value = Boxes.whole(value.detach())
    if not isinstance(value, Boxes):
        return value
    found[key] = value
    return None


def write_rank_files(
    path: Path, found: Mapping[str, Boxes], key: bytes | None, ranks: Ranks
) -> dict[str, Any]:
    """Write this rank's share of the boxes beside the checkpoint at ``path``; all ranks together.

    Returns:
        the names of all files, and of each tensor where its boxes lie, which rank 0 alone knows.

    Raises:
        OSError: this rank's file cannot be written. RankError: another's. No file is left then.
    """
    from dpoptim.distributed.checkpoint_planner import save_boxes  # slow to import

    token = ranks.from_first(unused_name)
    names = [f"{path.name}.{token}.{rank}-of-{ranks.size}.part" for rank in range(ranks.size)]
    own = path.with_name(names[ranks.rank])

    def write(boxes: Iterator[Tensor]) -> list[Place]:
        places: list[Place] = []
        write_atomically(own, file_of(boxes, key, places), secret=True)
        return places

    failure, failed, table = ranks.together("saving", partial(save_boxes, found, write))
    if failed:
        remove_rank_files(path, [own.name])
        raise failure or RankError(
            f"private.save: rank {', '.join(map(str, failed))} could not write its file, and says "
            "why itself. What was saved before is unchanged."
        )
    tensors = {
        name: [list(boxes.shape), boxes.dtype, table.get(name, [])] for name, boxes in found.items()
    }
    return {"files": names, "tensors": tensors}


def file_of(boxes: Iterable[Tensor], key: bytes | None, places: list[Place]) -> Iterator[Buffer]:
    """The bytes of a rank's file, box by box; ``places`` is told where each box lies."""
    end = 0
    for box in boxes:
        yield bytes(-end % ALIGNED)
        start = end = end + -end % ALIGNED
        digest = sha256()
        for piece in pieces_of(box, key):
            digest.update(piece)
            yield piece
            end += len(piece)
        places.append((start, end - start, digest.hexdigest()))


def pieces_of(box: Tensor, key: bytes | None) -> Iterator[Buffer]:
    data = bytes_of(box)
    if key is None:
        yield data
        return
    for start in range(0, len(data), PIECE):
        yield sealed(data[start : start + PIECE], key, PURPOSE)


def remove_rank_files(path: Path, names: Sequence[str]) -> None:
    for name in names:
        with suppress(OSError):
            path.with_name(name).unlink()


def remove_other_rank_files(path: Path, needed: Sequence[str]) -> None:
    """Remove files of earlier saves to ``path``, replaced or never finished."""
    ours = re.compile(re.escape(path.name) + r"\.[0-9a-f]{16}\.\d+-of-\d+\.part")
    with suppress(OSError):
        names = [name for name in os.listdir(path.parent) if ours.fullmatch(name)]
        remove_rank_files(path, [name for name in names if name not in needed])


# ---- reading ------------------------------------------------------------------------------------


def with_parts(contents: dict[str, Any], path: Path, key: bytes | None) -> dict[str, Any]:
    """A checkpoint's contents, `Stored` for tensors in ranks' files, read when asked for."""
    files, tensors = contents["parts"]["files"], contents["parts"]["tensors"]
    folder = Path(os.path.realpath(path)).parent
    opened = [RankFile(folder / name, key) for name in files]

    def found(place: str, value: Any) -> Any:
        if place not in tensors:
            return value
        shape, dtype, boxes = tensors[place]
        return Stored(tuple(shape), dtype, partial(read_boxes, opened, boxes))

    return dict(changed(contents, found))


def read_boxes(files: Sequence["RankFile"], stored: Sequence[Any], boxes: Boxes) -> None:
    """Fill boxes of a tensor from those in the ranks' files."""
    from dpoptim.distributed.checkpoint_planner import plan_reads  # slow to import

    chunks = [(tuple(offsets), tuple(sizes)) for offsets, sizes, *_ in stored]
    for number, wanted in plan_reads(boxes, chunks).items():
        _, sizes, rank, place = stored[number]
        box = files[rank].box(place, boxes.dtype, sizes)
        for offsets, into in wanted:
            into.copy_(box_of(box, offsets, tuple(into.shape)))


class RankFile:
    """A file that a rank wrote; it runs no code. Mapped while it is read from."""

    def __init__(self, path: Path, key: bytes | None) -> None:
        self._path, self._key = path, key
        self._name = printable(str(path))

    @cached_property
    def _bytes(self) -> memoryview:
        if not self._path.is_file():
            raise FileNotFoundError(
                f"resume: {self._name} is missing, which has a rank's part of the checkpoint. Fix: "
                "keep all files of a checkpoint together, on storage that every rank can read."
            )
        if not self._path.stat().st_size:  # which cannot be mapped
            return memoryview(b"")
        with self._path.open("rb") as file:
            # a copy on write: tensors want memory that they could write to
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))

    def box(self, place: Place, dtype: torch.dtype, sizes: Sequence[int]) -> Tensor:
        """The box that lies at this place.

        Raises:
            FileNotFoundError, ValueError: the file is not there, or is another one.
        """
        start, length, digest = place
        data = self._bytes[start : start + length]
        if sha256(data).hexdigest() != digest:
            raise ValueError(
                f"resume: {self._name} is damaged: its checksum is not what the checkpoint says. "
                "Fix: an earlier checkpoint, or a new run."
            )
        if self._key is not None:
            each = PIECE + SEAL_BYTES
            pieces = (bytes(data[at : at + each]) for at in range(0, length, each))
            data = memoryview(
                bytearray().join(opened(piece, self._key, PURPOSE, self._name) for piece in pieces)
            )
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(*sizes)
