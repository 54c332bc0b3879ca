"""The files that a run writes and reads again."""

import hashlib
import io
from pathlib import Path
from typing import Any

import dp_accounting
import torch

from dpoptim import DPSGD, Ledger, Plan
from dpoptim.runs.certificate import write_certificate
from dpoptim.runs.verify import verify_run
from dpoptim.training.checkpoints.checkpoint import PLAIN, read_checkpoint, write_checkpoint
from finished_run import small_run
from torture.mutations import Target, register

AR = "add-or-remove-one"


def make_ledger(folder: Path) -> Path:
    path = folder / "cells.ledger"
    ledger = Ledger(path, epsilon=8, delta=1e-6)
    for number in range(12):
        event = dp_accounting.GaussianDpEvent(14.0 + number)
        made = ledger.reserve(event, neighboring=AR, label=f"run {number}")
        ledger.begin_releases(made.id, 10, resumed=0)
        if number % 2:
            ledger.commit(made)
    return path


def read_ledger(path: Path) -> Any:
    ledger = Ledger(path)
    return (
        ledger.dataset,
        ledger.neighboring,
        ledger.budget,
        ledger.entries(),
        str(ledger.remaining()),
    )


def make_plan(folder: Path) -> Path:
    plan = DPSGD(clip_norm=1.5, clipping="automatic").plan(
        n=5000, batch_size=100, steps=300, noise_multiplier=1.1, delta=1e-5
    )
    (folder / "plan.json").write_text(plan.to_json())
    return folder / "plan.json"


def read_plan(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError("it is no text, which whoever opens it is told by Python") from error
    return Plan.from_json(text)


def make_certificate(folder: Path) -> Path:
    result = small_run()
    (folder / "plan.json").write_text(result.plan.to_json())
    write_certificate(folder / "certificate.json", result)
    return folder / "certificate.json"


def read_certificate(path: Path) -> Any:
    return verify_run(path.parent).certificate


def make_checkpoint(folder: Path) -> Path:
    path = folder / "run.secret"
    contents = {
        "identity": {"plan": "none"},
        "durable": True,
        "caveats": {"seeded": False},
        "steps_done": 5,
        "unfinished": None,
        "model": {"weight": torch.arange(2000.0)},
        "optimizers": [{"lr": 0.1}],
        "queue": {},
        "streams": [],
        "iterates": {},
        "memory": {},
        "clip_norm": {},
        "noise": {},
        "gate": {"released": 5, "reservation": "r", "correlated": None},
        "parts": {"files": [], "tensors": {}},
    }
    write_checkpoint(path, contents, announce=lambda digest: None)
    return path


def read_it(path: Path) -> Any:
    contents, _ = read_checkpoint(path)
    buffer = io.BytesIO()
    torch.save(contents, buffer)
    return buffer.getvalue()


def with_its_checksum(content: bytes) -> bytes:
    """A checkpoint that was changed by somebody who knows how it is written."""
    body = content.partition(b"\n")[2]
    return PLAIN + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


register("ledger", Target(make_ledger, read_ledger))
register("plan", Target(make_plan, read_plan))
register("certificate", Target(make_certificate, read_certificate))
register("checkpoint", Target(make_checkpoint, read_it))
register(
    "checkpoint with its checksum",
    Target(make_checkpoint, read_it, faithful=False, mend=with_its_checksum),
)
