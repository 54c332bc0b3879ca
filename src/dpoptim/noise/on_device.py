"""Normal draws added where tensors lie, for tensors on an accelerator that Triton compiles for.

Drawn on the CPU, the noise of a large model would take longer than its step, and a copy of the
model over the bus. Here random words come from ChaCha20, keyed anew for each piece by the stream,
and become draws by the same ziggurat (`kernels`).
"""

import struct
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpoptim.noise import series
from dpoptim.noise.on_device_reference import REGION, draws
from dpoptim.noise.stream import KeyStream
from dpoptim.noise.ziggurat_layers import FLOOR, INNER, RISE, STEP, TAIL_START

DTYPES = (torch.float32, torch.float64)  # that the kernels add to
KEY = struct.Struct("<8i")
STD, HALVES = struct.Struct("<d"), struct.Struct("<2i")
MOST_REGIONS = 1 << 12  # of a piece: they take 13 MiB of room, and 2^18 would exhaust a key
CHECKED = (1 << 17, 1, 777, (1 << 16) + 5)  # entries of tensors
CHECKED_STD = 1.7

Launch = Callable[[Tensor, Tensor, torch.dtype, Sequence[int], Sequence[int]], None]


def add_there(stream: KeyStream, targets: Sequence[Tensor], std: float) -> None:
    """Add independent N(0, std^2) draws to tensors on one device that `draws_on` accepts.

    Args:
        stream: where the keys come from.
        targets: contiguous, of one dtype in `DTYPES`, changed in place.
        std: in their units, finite and >= 0.

    The same draws on every device, for the same state of a seeded stream. Nothing waits for the
    device.

    **Guarantee.** As of `add_normal`, to whoever can break neither AES-256 nor ChaCha20: a key
    is the next bytes of a branch, is used for one piece, and no block of a key is used twice.
    """
    launch = launch_on(targets[0].device)
    assert launch is not None
    for regions in regions_of(targets).split(MOST_REGIONS):
        launch_with(launch, stream.branch(), regions, targets[0].dtype, std)


def launch_with(
    launch: Launch, stream: KeyStream, regions: Tensor, dtype: torch.dtype, std: float
) -> bytes:
    """Draw for a piece with a key of the stream, which is returned for `check` alone."""
    secret = bytearray(KEY.size)
    stream.fill(secret)
    halves = HALVES.unpack(STD.pack(std))
    launch(regions, tables_on(regions.device), dtype, KEY.unpack(secret), halves)
    return bytes(secret)


def regions_of(targets: Sequence[Tensor]) -> Tensor:
    """Addresses and numbers of entries, int64 (regions, 2), on the device of the targets."""
    address, entries = np.array([(each.data_ptr(), each.numel()) for each in targets]).T
    regions = -(-entries // REGION)
    before = np.repeat(np.cumsum(regions) - regions, regions)  # of other targets
    start = (np.arange(len(before)) - before) * REGION
    begins = np.repeat(address, regions) + start * targets[0].element_size()
    lengths = np.minimum(np.repeat(entries, regions) - start, REGION)
    table, device = torch.from_numpy(np.stack([begins, lengths], 1)), targets[0].device
    pinned = device.type == "cuda"  # so that nothing waits for the copy
    return (table.pin_memory() if pinned else table).to(device, non_blocking=pinned)


def tables() -> Tensor:
    """Make what `kernels` looks up, float64: of each layer, terms of exp and of log, constants."""
    of_layers = (STEP, INNER, FLOOR, RISE)
    constants = np.array([*series.CONSTANTS, TAIL_START])
    return torch.from_numpy(np.concatenate([*of_layers, series.TERMS, series.ODD_TERMS, constants]))


@cache
def tables_on(device: torch.device) -> Tensor:
    return tables().to(device)


@cache
def launch_on(device: torch.device) -> Launch | None:
    """Return what starts the kernels there; None where Triton has none for the device."""
    try:
        from dpoptim.noise import kernels  # needs Triton, which takes a while to load
    except ImportError:
        return None
    if not kernels.serves(device):
        return None
    return kernels.launch if device.type == "cpu" else partial(_launch_there, kernels.launch)


def _launch_there(launch: Launch, regions: Tensor, *given: Any) -> None:
    device = regions.device
    with torch.get_device_module(device).device(device):  # the current one, which Triton starts on
        launch(regions, *given)


@cache
def draws_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernels draw there, once what they add is compared with the CPU's.

    Bit by bit, for the tables and for 200,000 draws with a spent key: a device that errs now and
    then, or in larger pieces alone, may pass. Where there are no kernels for a device, or its
    compiler fails, the noise comes from the CPU; the latter is warned of.

    Args:
        device: of the tensors.
        dtype: of them. Others than `DTYPES` are drawn for in float64.

    Raises:
        RuntimeError: they add something else.
    """
    launch = launch_on(device)
    if launch is None:
        return False
    dtype = dtype if dtype in DTYPES else torch.float64
    vector = torch.ones(sum(CHECKED), dtype=dtype, device=device)
    try:
        secret = launch_with(
            *(launch, KeyStream(), regions_of(vector.split([*CHECKED])), dtype, CHECKED_STD)
        )
        found = vector.cpu()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers and drivers raise their own kinds
        warnings.warn(
            f"noise for {device} is drawn on the CPU and copied, which takes longer: Triton's "
            f"kernels failed there ({type(error).__name__}: {str(error)[:300]}).",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    expected = torch.from_numpy(1.0 + CHECKED_STD * draws(secret, CHECKED)).to(dtype)
    if not (torch.equal(found, expected) and torch.equal(tables_on(device).cpu(), tables())):
        raise RuntimeError(
            f"noise cannot be drawn on {device}: it adds other numbers than the CPU computes, "
            "so the noise would not be what the guarantee assumes. Fix: train on the CPU, or "
            "report this with the device and the versions of PyTorch, Triton and its driver."
        )
    return True
