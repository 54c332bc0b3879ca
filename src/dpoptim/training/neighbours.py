"""Comparison of a model's outputs for records beside others than before."""

import torch
from torch import Tensor, nn

from dpoptim.training.made_up import Sample


@torch.no_grad()
def neighbours_are_invisible(model: nn.Module, sample: Sample) -> bool:
    """Whether another record, also an enormous one, leaves all other records' outputs alone."""
    before = sample.outputs(model)
    for sizes in ((1.0,), (1e6, 1e3, 10.0)):
        after = with_another_record(model, sample, sizes)
        if after is None:
            continue
        for pair in zip(before, after, strict=True):
            a, b = (out[1:] for out in pair)
            if moved(a, b):
                return False
    return True


def moved(a: Tensor, b: Tensor) -> bool:
    """Whether outputs are others, beyond rounding."""
    distance = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    return bool(
        a.numel() and not float(distance.max()) <= 1e-5 * float(a.nan_to_num(0, 0, 0).abs().max())
    )


def with_another_record(
    model: nn.Module, sample: Sample, sizes: tuple[float, ...]
) -> list[Tensor] | None:
    """The outputs with another first record, of the first size that the model takes; or None."""
    for size in sizes:
        try:
            return sample.with_another_first(size).outputs(model)
        except ValueError:
            if len(sizes) == 1:
                raise
    return None
