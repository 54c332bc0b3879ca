"""In place of the kernels' launch, on memory that the CPU can reach: the draws that they would add,
by the library's reference. For tests of what surrounds them where Triton is missing.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from dpoptim.noise import on_device
from dpoptim.noise.on_device import HALVES, KEY, STD
from dpoptim.noise.on_device_reference import draws_of_region

KINDS = {torch.float32: np.float32, torch.float64: np.float64}
Launch = Callable[[Tensor, Tensor, torch.dtype, Sequence[int], Sequence[int]], None]


def launch(
    regions: Tensor, tables: Tensor, dtype: torch.dtype, key: Sequence[int], std: Sequence[int]
) -> None:
    assert tables.device == regions.device
    secret, (factor,) = KEY.pack(*key), STD.unpack(HALVES.pack(*std))
    for region, (address, entries) in enumerate(regions.cpu().tolist()):
        kind = np.dtype(KINDS[dtype])
        memory = (ctypes.c_char * (entries * kind.itemsize)).from_address(address)
        target = np.frombuffer(memory, kind)
        target[:] = target + factor * draws_of_region(secret, region, entries)


@contextmanager
def launched_by(launch: Launch | None) -> Iterator[None]:
    """All devices have this one in place of kernels, tried anew."""
    on_device.draws_on.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_device, "launch_on", lambda device: launch)
        yield
    on_device.draws_on.cache_clear()
