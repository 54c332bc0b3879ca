"""Calls of Triton's kernels: tables that they read, devices that they run on, and their trial."""

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

KEPT_NUMBERS = 1 << 18  # of all tables of a captured graph: 2 MiB
KINDS = ("cuda", "xpu")  # of device that Triton compiles for; ROCm's are "cuda", too


def tried_on(
    device: torch.device, dtype: torch.dtype, agrees: Callable[[], bool], formed: str
) -> bool:
    """Whether Triton is there, compiles kernels for a device, and they compute what they should.

    Of a device for which it fails a warning tells.

    Args:
        agrees: calls them, and compares.
        formed: what they form, for that.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        right = agrees()
        reason = "they compute something else"
    except torch.OutOfMemoryError:
        raise  # says nothing of what the device can do
    except Exception as error:  # compilers and drivers raise their own kinds
        right, reason = False, f"{type(error).__name__}: {str(error)[:300]}"
    if not right:
        warnings.warn(
            f"{formed} on {device} are formed by PyTorch's operations, which takes longer: "
            f"Triton's kernels failed there for {dtype} ({reason}).",
            RuntimeWarning,
            stacklevel=3,
        )
    return right


class KeptTables:
    """Memory of the host that a captured graph reads tables from, whenever it is replayed.

    It is there before the capture, which allows no allocation.
    """

    def __init__(self) -> None:
        self._room = torch.empty(KEPT_NUMBERS, dtype=torch.int64, pin_memory=True)
        self._used = 0

    def keep(self, table: Tensor) -> Tensor:
        start = self._used
        self._used += table.numel()
        if self._used > KEPT_NUMBERS:
            raise RuntimeError("there is no room for the tables of a captured pass.")
        return self._room[start : self._used].view(table.shape).copy_(table)


_keeping: list[KeptTables] = []  # not a context variable: autograd has threads of its own


@contextmanager
def keeping_tables() -> Iterator[KeptTables]:
    """Have `upload` keep its tables meanwhile, for as long as what is yielded is held."""
    _keeping.append(tables := KeptTables())
    try:
        yield tables
    finally:
        _keeping.remove(tables)


def upload(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """A table of whole numbers on a device: int64; nothing waits for it."""
    table = torch.from_numpy(np.array(rows, dtype=np.int64))
    if device.type != "cuda":
        return table.to(device)
    pinned = _keeping[-1].keep(table) if _keeping else table.pin_memory()
    return pinned.to(device, non_blocking=True)


@lru_cache(maxsize=1024)
def owners(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Which layer each tile or block belongs to, where layers have so many: int32."""
    return torch.from_numpy(np.repeat(np.arange(len(counts), dtype=np.int32), counts)).to(device)


def firsts(counts: Sequence[int]) -> list[int]:
    """Where each layer's tiles or blocks begin."""
    return [0, *np.cumsum(counts)[:-1].tolist()] if len(counts) else []


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """A kernel runs on the current device, whatever its tensors lie on."""
    return torch.get_device_module(x.device).device(x.device)
