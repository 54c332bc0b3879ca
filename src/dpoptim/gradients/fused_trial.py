"""Whether Triton's kernels form gradients on a device: tried before they are used."""

import importlib.util
import math
import warnings
from functools import cache

import torch
from torch import Tensor

from dpoptim.gradients.arithmetic import NARROW
from dpoptim.gradients.fused_outer import WIDE, FusedOuter, Lookups
from dpoptim.gradients.sums import Sums

KINDS = ("cuda", "xpu")  # of device that Triton compiles for; ROCm's are "cuda", too


def serves(x: Tensor) -> bool:
    """Whether gradients made of such numbers are formed by the kernel."""
    narrow = x.dtype in NARROW or x.dtype == torch.float32
    return not x.is_cpu and narrow and compiles_on(x.device, x.dtype)


@cache
def compiles_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton is there, compiles the kernels for the device, and they are right there.

    In whole tiles, as models have them; of a device for which it fails a warning tells.
    """
    if device.type not in KINDS or importlib.util.find_spec("triton") is None:
        return False
    g, a, ones = (torch.ones(2, 64, WIDE, dtype=dtype, device=device) for _ in range(3))
    index = torch.zeros(2, 64, dtype=torch.int64, device=device)
    weights = torch.ones(1, 2, dtype=torch.float64, device=device)
    ways = [
        FusedOuter(g, a),
        FusedOuter(g, a, ghost_norms=True),
        FusedOuter(g, a, Lookups.of(index, ones)),
    ]
    try:
        found = []
        for way in ways:
            sums = Sums([WIDE, WIDE], device)
            found.append(way.squared_norms())
            way.add_weighted_sums(sums, weights, [[2]])
            found += sums.settle()[0][:2, 0]
        of_all = torch.cat([each.view(-1) for each in found]).tolist()
    except torch.OutOfMemoryError:
        raise  # says nothing of what the device can do
    except Exception as error:  # compilers and drivers raise their own kinds
        of_all, reason = [], f"{type(error).__name__}: {str(error)[:300]}"
    else:
        reason = "they compute something else"
    whole, looked_up = (64.0 * WIDE) ** 2, 64.0**2 * (WIDE * (WIDE - 1) + 4 * WIDE)
    expected = [whole, whole, 128, 128, whole, whole, 128, 128, looked_up, looked_up, 256, 128]
    if len(of_all) == len(expected) and all(map(nearly, of_all, expected)):
        return True
    warnings.warn(
        f"gradients on {device} are formed by PyTorch's operations, which takes longer: Triton's "
        f"kernels failed there for {dtype} ({reason}).",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def nearly(found: float, expected: float) -> bool:
    return math.isclose(found, expected, rel_tol=1e-3)
