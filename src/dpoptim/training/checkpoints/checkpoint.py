"""Checkpoints of private runs: one file with the model, the optimizers and all privacy state.

**Secret**: who is in the batches drawn ahead, the order of fixed batches, error feedback and
correlated noise are kept as they are; whoever reads them can undo a part of the run's protection.
Keys are not kept: noise and coins after a resume are fresh (but for a run with a ``noise_seed``,
which goes on in its streams).

**Trusted**: whoever can change it can change model and error feedback. The ledger that the run is
charged to is told the SHA-256 of each checkpoint before it is written, and takes up no other. In
memory a ledger ends with its process; there only a key protects: a sealed checkpoint (AES-256 in
Galois/counter mode) can be read and made by those alone who have it.

The file is a line with the format and a checksum, then what `torch.save` writes, sealed or not.
"""

import hashlib
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from dpoptim.accounting.ledger import Ledger
from dpoptim.files import remove_litter, write_atomically
from dpoptim.gradients.engine import Engine
from dpoptim.plan import Plan
from dpoptim.plan.plan import same_plan
from dpoptim.plan.text import differing_entries
from dpoptim.printable import printable
from dpoptim.training.batches.privacy_units import Units

MARK = b"dpoptim checkpoint 7, secret, "
PLAIN, SEALED = MARK + b"sha256 ", MARK + b"sealed, sha256 "
KEY_BYTES, NONCE_BYTES = 32, 12
SEAL_BYTES = NONCE_BYTES + 16  # by which what is sealed is longer: its tag, too
ENTRIES = {
    "identity": dict,
    "durable": bool,
    "caveats": dict,
    "steps_done": int,
    "unfinished": object,
    "model": dict,
    "optimizers": list,
    "queue": dict,
    "streams": list,
    "iterates": dict,
    "memory": dict,
    "clip_norm": dict,
    "noise": dict,
    "gate": dict,
    "parts": dict,
}


def write_checkpoint(
    path: Path,
    contents: dict[str, Any],
    *,
    key: bytes | None = None,
    announce: Callable[[str], None],
    on_first: Callable[[Callable[[], Any]], Any] = lambda ask: ask(),
) -> None:
    """Write ``contents`` (nests of tensors, numbers, text) to a file that only its owner may read.

    Args:
        key: 32 bytes that seal it.
        announce: called with the SHA-256 of what follows the first line, before the file is there.
        on_first: where several processes call this together: does something in the one that has
            the file.

    Raises:
        ValueError: what would be written could not be read back, or the key has another length.
        OSError: see `write_atomically`; or ``path`` is there and no checkpoint.
    """
    file: list[bytes | memoryview] = []

    def encode() -> str:
        pieces, digest = encoded(path, contents, key)
        file.extend(pieces)
        return digest

    announce(on_first(encode))
    on_first(lambda: write_atomically(path, file, secret=True))


def encoded(
    path: Path, contents: dict[str, Any], key: bytes | None
) -> tuple[list[bytes | memoryview], str]:
    """The file for ``path``, in pieces, and its SHA-256; errors as for `write_checkpoint`."""
    if path.exists() and not is_checkpoint(path):
        raise FileExistsError(
            f"{printable(str(path))} is there and is no checkpoint; it stays as it is. Fix: choose "
            "another path."
        )
    buffer = io.BytesIO()
    torch.save(contents, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).split("Please file")[0].splitlines()[-1].strip()
        raise ValueError(
            "the state dict of the model or an optimizer holds what cannot be read back without "
            f"running code: {reason} Fix: plain Python numbers and tensors (float(x) instead of a "
            "numpy number, say)."
        ) from None
    mark = PLAIN if key is None else SEALED
    plain = buffer.getbuffer()
    body = plain if key is None else sealed(plain, key, SEALED)
    digest = hashlib.sha256(body).hexdigest()
    return [mark + digest.encode() + b"\n", body], digest


def is_checkpoint(path: Path) -> bool:
    """Whether a file begins as one; older formats count, for whoever replaces them."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(64).startswith(b"dpoptim checkpoint ")


def read_checkpoint(path: Path, *, key: bytes | None = None) -> tuple[dict[str, Any], str]:
    """Read what `write_checkpoint` was given, and its SHA-256. Reading runs no code from the file.

    Args:
        key: what sealed it; with a key, a file that is not sealed is refused.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no checkpoint of a private run, was changed, or was sealed with another
            key.
    """
    name = printable(str(path))
    if not path.is_file():
        raise FileNotFoundError(
            f"resume: there is no checkpoint at {name}. Fix: give what private.save(path) wrote."
        )
    remove_litter(Path(os.path.realpath(path)).parent)
    with path.open("rb") as file:
        head, body = file.readline().rstrip(b"\n"), file.read()
    mark = SEALED if head.startswith(SEALED) else PLAIN
    if not head.startswith(mark):
        raise ValueError(
            f"resume: {name} is no checkpoint of this version. Fix: give what private.save(path) "
            "wrote."
        )
    digest = hashlib.sha256(body).hexdigest()
    if head[len(mark) :] != digest.encode():
        raise ValueError(
            f"resume: {name} is damaged: its checksum is wrong. Fix: an earlier checkpoint, or a "
            "new run."
        )
    if (mark == SEALED) != (key is not None):
        fix = (
            "give no checkpoint_key"
            if key is not None
            else "give the checkpoint_key that it was saved with"
        )
        raise ValueError(
            f"resume: {name} is {'not ' * (mark == PLAIN)}sealed with a key. Fix: {fix}."
        )
    if key is not None:
        body = opened(body, key, SEALED, name)
    return checked(body, name), digest


def checkpoint_to_resume(
    path: str | Path | None, key: bytes | None
) -> tuple[dict[str, Any] | None, str]:
    """As `read_checkpoint`; nothing without a path."""
    return (None, "") if path is None else read_checkpoint(Path(path), key=key)


def checked(body: bytes, name: str) -> dict[str, Any]:
    """The entries of a checkpoint, each of its type. ValueError if it has others."""
    try:
        contents: Any = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises whatever the bytes lead it to
        raise ValueError(
            f"resume: {name} holds no checkpoint ({type(error).__name__}). Fix: give what "
            "private.save(path) wrote."
        ) from None
    right = (
        isinstance(contents, dict)
        and contents.keys() == ENTRIES.keys()
        and all(isinstance(contents[entry], kind) for entry, kind in ENTRIES.items())
        and contents["gate"].keys() == {"released", "reservation", "correlated"}
        and contents["gate"]["released"] == contents["steps_done"]
    )
    if not right:
        raise ValueError(
            f"resume: {name} holds no checkpoint: other entries than a run has. Fix: give what "
            "private.save(path) wrote."
        )
    return dict(contents)


def sealed(body: bytes | memoryview, key: bytes, purpose: bytes) -> bytes:
    """The body, sealed for one purpose; `opened` opens it."""
    nonce = os.urandom(NONCE_BYTES)
    return nonce + cipher(key).encrypt(nonce, body, purpose)


def opened(body: bytes, key: bytes, purpose: bytes, name: str) -> bytes:
    """Open what was `sealed`. ValueError, naming the file, if not by this key, for this purpose."""
    try:
        return cipher(key).decrypt(body[:NONCE_BYTES], body[NONCE_BYTES:], purpose)
    except InvalidTag:
        raise ValueError(
            f"resume: {name} was sealed with another key, or changed. Fix: give the "
            "checkpoint_key of its run."
        ) from None


def cipher(key: bytes) -> AESGCM:
    """The cipher that seals and opens. ValueError for a key that is not 32 bytes."""
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise ValueError(
            f"checkpoint_key must be {KEY_BYTES} bytes, such as os.urandom({KEY_BYTES})."
        )
    return AESGCM(key)


def identity_of(
    plan: Plan,
    engine: Engine,
    optimizers: Sequence[torch.optim.Optimizer],
    units: Units,
    count: int,
) -> dict[str, Any]:
    """Identity of a run that may go on; ``count``: of the units in all processes."""
    names = {id(p): name for name, p in zip(engine.names, engine.parameters, strict=True)}
    return {
        "plan": plan.to_json(),
        "parameters": [
            (name, list(p.shape), str(p.dtype)) for name, p in engine.model.named_parameters()
        ],
        "optimizers": [
            (
                type(optimizer).__name__,
                [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups],
            )
            for optimizer in optimizers
        ],
        "records": [count, units.name, units.rows.per_record, units.rows.reduction],
        "loss_reduction": engine.reduction,
        "isolation": engine.isolation.tier,  # may change, but to one of the same reduction
    }


def refuse_other_training(checkpoint: dict[str, Any], ours: dict[str, Any], ledger: Ledger) -> None:
    """Refuse to go on as another run: other plan, parameters, optimizers, records or ledger.

    Raises:
        ValueError: naming what differs; nothing has been changed.
    """
    theirs = checkpoint["identity"]
    if not same_plan(theirs["plan"], ours["plan"]):
        raise ValueError(
            "resume: the checkpoint belongs to another plan: "
            f"{differing_entries(theirs['plan'], ours['plan'])}. Fix: make the plan with the same "
            "settings, or load it with dpoptim.Plan.from_json. Other settings are another run, on "
            "a charge of its own, which may begin with this one's weights: without resume."
        )
    run, known = checkpoint["gate"]["reservation"], {entry.id for entry in ledger.entries()}
    # before its first step a run may not be charged yet; on disk it then will be
    elsewhere = run not in {None, *known} and (checkpoint["steps_done"] > 0 or not ledger.durable)
    if checkpoint["durable"] and elsewhere:
        where = "another ledger than the given one" if ledger.durable else "a ledger on disk"
        raise ValueError(
            f"resume: the run was charged to {where}. Fix: attach(..., ledger=Ledger(path)) with "
            "the path of the ledger that the run began on."
        )
    fixes = {
        "parameters": "the same model, its parameters in the same order",
        "optimizers": "the same optimizers, in the same order, over the same parameters",
        "records": "the same data set, with the same persons and rows_per_record",
        "places of records": "the same records in the same order (a seeded shuffle or split), and "
        "the same persons",
        "iterates": "the same projection and random_iterate",
        "loss_reduction": f"loss_reduction={theirs['loss_reduction']!r}",
    }
    if theirs["isolation"] != ours["isolation"]:  # chosen for a loss, and taken to resume without
        way = f"the same loss=, or isolation={theirs['isolation']!r}"
        fixes["loss_reduction"] = f"{way}, the way in which the run kept records apart"
    for key, fix in fixes.items():
        if theirs[key] != ours[key]:
            raise ValueError(
                f"resume: the checkpoint was made with other {key}. Fix: attach {fix}."
            )
