"""A disk that is full after so many bytes, at every 4 KiB: nothing is granted that is not kept,
and nothing is damaged.
"""

import os
import random
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dp_accounting
import torch

from dpoptim import Ledger
from dpoptim.errors import LedgerError
from dpoptim.files import write_atomically
from dpoptim.training.checkpoints.checkpoint import read_checkpoint, write_checkpoint
from torture.outcomes import Outcomes

AR = "add-or-remove-one"


@contextmanager
def small_disk(folder: Path, kibibytes: int) -> Iterator[Path]:
    """A folder with so much room: a file system of its own where that may be mounted, else a limit
    on each file.
    """
    place = folder / f"disk-{kibibytes}"
    place.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={kibibytes}k", "none", str(place)]
    if kibibytes and _quietly("mount", *options):
        try:
            yield place
        finally:
            _quietly("umount", str(place))
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024 * kibibytes, before[1]))
    try:
        yield place
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def trial(folder: Path, *, seed: int, up_to: int) -> Outcomes:
    """Ledger, checkpoint and report on disks of 0, 4, ... `up_to` KiB."""
    outcomes = Outcomes("full disks")
    for kibibytes in range(0, up_to + 1, 4):
        with small_disk(folder, kibibytes) as place:
            ledger_on(place, outcomes, random.Random(f"{seed} {kibibytes}"))
        with small_disk(folder, 10_000 + kibibytes) as place:
            files_on(place, outcomes, kibibytes)
    return outcomes


def ledger_on(place: Path, outcomes: Outcomes, chance: random.Random) -> None:
    """Reserve until the disk is full; then what was granted is there, and the file is whole."""
    path, granted = place / "ledger", []

    def reserve() -> str:
        ledger = Ledger(path, epsilon=8, delta=1e-6)
        for _ in range(2000):
            label = "x" * chance.randrange(1, 200)
            granted.append(
                ledger.reserve(
                    dp_accounting.GaussianDpEvent(2000.0), neighboring=AR, label=label
                ).id
            )
        return "had room"

    outcomes.attempt(reserve, f"reserving in {place.name}")
    names = sorted(os.listdir(place))
    if names not in ([], ["ledger"]):
        outcomes.add("left behind", wrong=f"{place.name}: {names}")
    if not path.exists():
        if granted:
            outcomes.add("ledgers lost", wrong=place.name)
        return
    try:
        kept = [entry.id for entry in Ledger(path).entries()]
    except LedgerError as error:
        outcomes.add("ledgers damaged", wrong=f"{place.name}: {error}")
        return
    if kept == granted:
        outcomes.add("ledgers kept")
    else:
        outcomes.add(
            "ledgers changed", wrong=f"{place.name}: {len(granted)} granted, {len(kept)} kept"
        )


def files_on(place: Path, outcomes: Outcomes, kibibytes: int) -> None:
    """A checkpoint and a text that are there and do not fit again: what was there stays."""
    contents: dict[str, Any] = {
        "identity": {}, "durable": False, "caveats": {}, "steps_done": 0, "unfinished": None,
        "model": {"w": torch.zeros(1000)}, "optimizers": [], "queue": {}, "streams": [],
        "iterates": {}, "memory": {}, "clip_norm": {}, "noise": {},
        "gate": {"released": 0, "reservation": None, "correlated": None},
        "parts": {"files": [], "tensors": {}},
    }  # fmt: skip
    checkpoint, text = place / "run.secret", place / "report.html"
    write_checkpoint(checkpoint, contents, announce=lambda digest: None)
    write_atomically(text, "old")
    contents["model"] = {"w": torch.zeros(1_000_000)}
    with nearly_full(kibibytes):
        for name, work in (
            (
                "checkpoint",
                lambda: write_checkpoint(checkpoint, contents, announce=lambda digest: None),
            ),
            ("report", lambda: write_atomically(text, "new " * 1_000_000)),
        ):
            outcomes.attempt(lambda work=work: work() or "had room", f"{name} in {place.name}")  # type: ignore[misc]
    if text.read_text() != "old" or len(read_checkpoint(checkpoint)[0]["model"]["w"]) != 1000:
        outcomes.add("files changed", wrong=place.name)
    if sorted(os.listdir(place)) != ["report.html", "run.secret"]:
        outcomes.add("left behind", wrong=f"{place.name}: {sorted(os.listdir(place))}")


@contextmanager
def nearly_full(kibibytes: int) -> Iterator[None]:
    """No file grows beyond so much."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024 * kibibytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def _quietly(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
