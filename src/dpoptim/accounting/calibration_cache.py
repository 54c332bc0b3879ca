"""Calibrated noise multipliers on disk, one small JSON file for each set of arguments.

The files hold public numbers only. Reading and writing never raise: without a cache, calibration
is merely slower. What is read is a proposal and nothing more; the caller evaluates it again before
using it.
"""

import contextlib
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read(key: Mapping[str, Any]) -> float | None:
    """The noise multiplier stored under `key`; None if there is none that makes sense."""
    try:
        data = json.loads(_path(key).read_text(encoding="utf-8"))
        value = data["noise_multiplier"] if data["key"] == dict(key) else None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None
    return value if isinstance(value, float) and 0 < value < math.inf else None


def write(key: Mapping[str, Any], noise_multiplier: float) -> None:
    """Store a noise multiplier, whole or not at all; nothing where the directory is read-only."""
    with contextlib.suppress(OSError, RuntimeError):
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"key": dict(key), "noise_multiplier": noise_multiplier}, file)
            os.replace(temporary, path)  # two processes that calibrate the same thing both succeed
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def _path(key: Mapping[str, Any]) -> Path:
    if chosen := os.environ.get("DPOPTIM_CACHE_DIR"):
        directory = Path(chosen)
    elif base := os.environ.get("XDG_CACHE_HOME"):
        directory = Path(base) / "dpoptim"
    else:
        directory = Path.home() / ".cache" / "dpoptim"  # RuntimeError where there is no home
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
    return directory / f"calibration-{digest[:32]}.json"
