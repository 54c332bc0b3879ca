"""Replay audit: the same seeded program on neighbouring data, all that is uncharged compared.

A program with fixed seeds is a function of its data. Whatever it returns, prints, logs, warns,
writes or raises besides the released (noisy) values must not depend on the data at all, so on D
and on D' it must be identical, bit by bit: there is no tolerance and no probability of a false
alarm. Times are not compared.
"""

import contextlib
import io
import logging
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Data = TypeVar("Data")


@dataclass(frozen=True)
class Observation:
    """All that a run let its surroundings see."""

    returned: Any
    printed: str
    warned: tuple[str, ...]
    logged: tuple[str, ...]
    raised: str
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class ReplayResult:
    """Where two runs differed: names as ``returned['steps']``, ``printed``; empty is good."""

    differences: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """``"refuted"`` if anything uncharged depended on the data, else ``"consistent"``."""
        return "refuted" if self.differences else "consistent"

    def __str__(self) -> str:
        return f"{self.verdict}: " + (
            f"depends on the data: {', '.join(self.differences)}" if self.differences else "equal"
        )


def audit_replay(
    run: Callable[[Data], Any],
    first: Data,
    second: Data,
    *,
    charged: tuple[str, ...] = (),
    seed: int = 0,
) -> ReplayResult:
    """Run ``run(first)`` and ``run(second)`` from the same seeds, in empty folders, and compare.

    Args:
        run: a seeded program (pass ``noise_seed`` to ``attach``). It returns what its caller would
            see: numbers, texts, tensors, arrays, dataclasses, and containers of these. Relative
            paths that it writes are compared too.
        first, second: neighbouring data sets.
        charged: keys of a returned mapping that hold released values, which the ledger pays for.
        seed: of Python's, NumPy's and torch's global generators.

    Returns:
        the finding, with a verdict.
    """
    a, b = observe(run, first, seed=seed), observe(run, second, seed=seed)
    found: list[str] = []
    for field in fields(Observation):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if field.name == "returned" and isinstance(left, Mapping) and isinstance(right, Mapping):
            left, right = (
                {k: v for k, v in side.items() if k not in charged} for side in (left, right)
            )
        found += differences(field.name, left, right)
    return ReplayResult(tuple(found))


def observe(run: Callable[[Data], Any], data: Data, *, seed: int = 0) -> Observation:
    """Run a program from fixed global seeds in an empty folder and note what it lets be seen."""
    printed, handler = io.StringIO(), _Keeper()
    returned, raised = None, ""
    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.chdir(folder),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            warnings.catch_warnings(record=True) as warned,
        ):
            warnings.simplefilter("always")
            try:
                returned = run(data)
            except Exception as error:  # whatever the program raises is something that it shows
                raised = f"{type(error).__name__}: {error}"
            files = {
                os.fspath(path.relative_to(folder)): path.read_bytes()
                for path in Path(folder).rglob("*")
                if path.is_file()
            }
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.random.set_rng_state(states[2])
    texts = tuple(f"{w.category.__name__}: {w.message}" for w in warned)
    return Observation(returned, printed.getvalue(), texts, tuple(handler.lines), raised, files)


def differences(name: str, a: Any, b: Any) -> list[str]:
    """Names of parts in which two values differ, bit by bit (NaN equals NaN)."""
    if type(a) is not type(b):
        return [name]
    if is_dataclass(a) and not isinstance(a, type):
        a, b = asdict(a), asdict(b)
    elif isinstance(a, list | tuple):
        a, b = dict(enumerate(a)), dict(enumerate(b))
    if isinstance(a, Mapping):
        if list(a) != list(b):
            return [f"keys of {name}"]
        return [found for key in a for found in differences(f"{name}[{key!r}]", a[key], b[key])]
    return [] if _identical(a, b) else [name]


def _identical(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        a, b = a.detach().cpu().contiguous().numpy(), b.detach().cpu().contiguous().numpy()
    elif isinstance(a, float):
        a, b = np.float64(a), np.float64(b)
    if isinstance(a, np.ndarray | np.generic):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return bool(a == b)


class _Keeper(logging.Handler):
    """Keeps the text of every log record."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.name}: {record.getMessage()}")
