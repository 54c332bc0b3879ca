"""Whether Triton's kernels form gradients on a device: tried before they are used."""

from functools import cache

import torch
from torch import Tensor

from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.arithmetic.norms import NORM_BLOCK
from dpoptim.gradients.arithmetic.precision import NARROW
from dpoptim.gradients.arithmetic.triton_calls import KINDS, tried_on
from dpoptim.gradients.per_sample.fused_factors import (
    WIDE,
    Factors,
    FusedLayer,
    Lookups,
    Way,
)
from dpoptim.gradients.per_sample.fused_outer import FusedOuter


def serves(x: Tensor) -> bool:
    """Whether gradients made of such numbers are formed by the kernel."""
    narrow = x.dtype in NARROW or x.dtype == torch.float32
    return not x.is_cpu and narrow and compiles_on(x.device, x.dtype)


@cache
def compiles_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels are there, and right, on a device: see `tried_on`.

    In whole tiles, as models have them.
    """

    def all_agree() -> bool:
        g = (torch.arange(2 * 64 * WIDE, device=device) % 7).to(dtype).view(2, 64, WIDE)
        a = torch.ones_like(g)
        index = (torch.arange(128, device=device) % 5).view(2, 64)
        exact = torch.einsum("btp,btd->bpd", g.double(), a.double())
        added = exact.scatter_add(1, index[:, :, None].expand_as(a), a.double())
        plain, looked_up = Factors.of(g, a), Factors.of(g, a, Lookups.of(index, a))
        ways: list[tuple[Factors, Way, Tensor]] = [
            *((plain, "kept", exact), (plain, "claimed", exact), (plain, "twice", exact)),
            *((looked_up, "kept", added), (looked_up, "twice", added)),
        ]
        return all(agrees(*each) for each in ways)

    return device.type in KINDS and tried_on(device, dtype, all_agree, "gradients")


def agrees(layer: Factors, way: Way, exact: Tensor) -> bool:
    """Whether norms and sums are those of such gradients, (B, p, d), but for rounding."""
    squared = exact.flatten(1).square().sum(1)
    weights = torch.ones(1, len(exact), dtype=torch.float64, device=exact.device)
    sums = Sums(exact.shape[1:], exact.device)
    fused = FusedOuter({0: FusedLayer.of(layer, way)}, ["all"])
    close = torch.allclose(fused.measure(NORM_BLOCK)["all"], squared, rtol=1e-3)
    fused.add({"all": weights}, [sums], [[len(exact)]])
    return close and torch.allclose(sums.settle()[0], exact.sum(0), rtol=1e-3)
