"""Checkpoints of private runs: one file that brings back the model, the optimizers and all privacy state. **Secret.**

Who is in the batches drawn ahead, the order of fixed batches, error feedback and correlated noise are kept as they are:
whoever reads them can undo a part of the run's protection. Keys are not kept: noise and coins after a resume are fresh.

The file is a line with the format and a checksum, then what `torch.save` writes.
"""

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dpoptim.accounting.ledger import Ledger
from dpoptim.files import write_atomically
from dpoptim.gradients.engine import Engine
from dpoptim.plan import Plan

MARK = b"dpoptim checkpoint 1, secret, sha256 "


def write_checkpoint(path: Path, contents: dict[str, Any]) -> None:
    """Write ``contents`` (tensors, numbers, text, and nests of them) to a file that its owner alone may read.

    Raises:
        ValueError: what would be written could not be read back.
        OSError: see `write_atomically`; or ``path`` is there and no checkpoint.
    """
    if path.exists() and not is_checkpoint(path):
        raise FileExistsError(f"{path} is there and is no checkpoint; it stays as it is. Fix: choose another path.")
    buffer = io.BytesIO()
    torch.save(contents, buffer)
    body = buffer.getvalue()
    try:
        torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).split("Please file")[0].splitlines()[-1].strip()
        raise ValueError(
            f"the state dict of the model or an optimizer holds what cannot be read back without running code: {reason} "
            "Fix: plain Python numbers and tensors (float(x) instead of a numpy number, say)."
        ) from None
    write_atomically(path, MARK + hashlib.sha256(body).hexdigest().encode() + b"\n" + body, secret=True)


def is_checkpoint(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MARK)) == MARK


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What `write_checkpoint` was given. Reading runs no code from the file.

    Raises:
        FileNotFoundError: there is no such file. ValueError: it is no checkpoint of a private run, or was changed.
    """
    if not path.is_file():
        raise FileNotFoundError(f"resume: there is no checkpoint at {path}. Fix: give what private.save(path) wrote.")
    head, _, body = path.read_bytes().partition(b"\n")
    if not head.startswith(MARK):
        raise ValueError(f"resume: {path} is no checkpoint of this version. Fix: give what private.save(path) wrote.")
    if head[len(MARK) :] != hashlib.sha256(body).hexdigest().encode():
        raise ValueError(f"resume: {path} is damaged: its checksum is wrong. Fix: an earlier checkpoint, or a new run.")
    contents: dict[str, Any] = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    return contents


def identity_of(plan: Plan, engine: Engine, optimizers: Sequence[torch.optim.Optimizer], records: int) -> dict[str, Any]:
    """What must be the same for a run to go on."""
    names = {id(p): name for name, p in zip(engine.names, engine.parameters, strict=True)}
    return {
        "plan": plan.to_json(),
        "parameters": [(name, list(p.shape), str(p.dtype)) for name, p in engine.model.named_parameters()],
        "optimizers": [
            (type(optimizer).__name__, [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups])
            for optimizer in optimizers
        ],
        "records": records,
        "loss_reduction": engine.reduction,
    }


def refuse_other_training(checkpoint: dict[str, Any], ours: dict[str, Any], ledger: Ledger) -> None:
    """A run goes on only as what it was: the same plan, parameters, optimizers, number of records, and ledger.

    Raises:
        ValueError: naming what differs; nothing has been changed.
    """
    theirs = checkpoint["identity"]
    if Plan.from_json(theirs["plan"]) != Plan.from_json(ours["plan"]):
        raise ValueError(
            "resume: the checkpoint belongs to another plan. Fix: make the plan with the same settings, or load it with "
            "dpoptim.Plan.from_json."
        )
    if checkpoint["durable"] and checkpoint["gate"]["reservation"] not in {None, *(entry.id for entry in ledger.entries())}:
        raise ValueError("resume: the run was charged to a ledger on disk. Fix: attach(..., ledger=Ledger(path)).")
    fixes = {
        "parameters": "the same model, its parameters in the same order",
        "optimizers": "the same optimizers, in the same order, over the same parameters",
        "records": "the same data set",
        "loss_reduction": f"loss_reduction={theirs['loss_reduction']!r}",
    }
    for key, fix in fixes.items():
        if theirs[key] != ours[key]:
            raise ValueError(f"resume: the checkpoint was made with other {key}. Fix: attach {fix}.")
