"""Parts of a checkpoint that were changed, or that another save wrote: to be refused."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from dpoptim.training.checkpoints.rank_files import Place, file_of, with_parts

KEY = bytes(range(32))
PLACE, ENTRIES = "['memory']", 64  # error feedback, say, whose bound a forged one would not keep


def checkpoint_parts() -> str:
    """Forge a part as others do that can write files: sealed, too, where bytes are those of a save.

    The part of an earlier save of the same run is sealed with the same key, so only the digest in
    the checkpoint tells them apart.
    """
    found = []
    with TemporaryDirectory() as folder:
        for kept, key in (("plain", None), ("sealed", KEY)):
            path = Path(folder) / kept
            earlier, later = (saved(path, float(save), key) for save in (1, 2))
            file = path.with_name(later["files"][0])
            whole, before = file.read_bytes(), path.with_name(earlier["files"][0]).read_bytes()
            if taken_up(path, later, key) != 2.0:
                found.append(f"lost a {kept} part")
            for what, forged in {
                "changed": whole[:-1] + bytes([whole[-1] ^ 1]),
                "earlier": before,
            }.items():
                file.write_bytes(forged)
                if taken_up(path, later, key) is not None:
                    found.append(f"took up a {kept} part that was {what}")
    return f"refuted: {'; '.join(found)}" if found else ""


def saved(path: Path, value: float, key: bytes | None) -> dict[str, Any]:
    """Write a part as a rank does; returns what the checkpoint says of it."""
    name = f"{path.name}.{value:.0f}.part"
    places: list[Place] = []
    part = file_of([torch.full((ENTRIES,), value)], key, places)
    path.with_name(name).write_bytes(b"".join(part))
    boxes = [[[0], [ENTRIES], 0, places[0]]]
    return {"files": [name], "tensors": {PLACE: [[ENTRIES], torch.float32, boxes]}}


def taken_up(path: Path, parts: dict[str, Any], key: bytes | None) -> float | None:
    """The first entry that a run would go on with; None where it is refused."""
    memory = with_parts({"memory": None, "parts": parts}, path, key)["memory"]
    try:
        return float(memory.whole()[0])
    except ValueError:
        return None
