"""Checkpoints of private runs: one file that brings back the model, the optimizers and all privacy state. **Secret.**

Who is in the batches drawn ahead, the order of fixed batches, error feedback and correlated noise are kept as they are:
whoever reads them can undo a part of the run's protection. Keys are not kept: noise and coins after a resume are fresh.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from dpoptim.files import write_atomically

FORMAT = "dpoptim checkpoint 1, secret"
KEYS = {"format", "plan", "steps_done", "durable", "model", "optimizers", "queue", "side", "choice", "gate"}


def write_checkpoint(path: Path, contents: dict[str, Any]) -> None:
    """Write all entries of `KEYS` but the format; readable by its owner alone. OSError as for `write_atomically`."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **contents}, buffer)
    write_atomically(path, buffer.getvalue(), secret=True)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What `write_checkpoint` was given. Reading runs no code from the file.

    Raises:
        FileNotFoundError: there is no such file. ValueError: it is no checkpoint of a private run.
    """
    if not path.is_file():
        raise FileNotFoundError(f"resume: there is no checkpoint at {path}. Fix: give what private.save(path) wrote.")
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise ValueError(f"resume: {path} is damaged, or no checkpoint: {error}") from None
    if not isinstance(contents, dict) or contents.get("format") != FORMAT or contents.keys() != KEYS:
        raise ValueError(
            f"resume: {path} is no checkpoint that this version reads. Fix: give what private.save(path) wrote."
        )
    return contents
