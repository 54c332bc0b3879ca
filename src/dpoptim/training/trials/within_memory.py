"""Operations of PyTorch that read or write beyond their memory on numbers that trials make up."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

Honest = Callable[..., Tensor]


def labels_within_classes(
    honest: Honest, logits: Tensor, targets: Tensor, *rest: Any, **options: Any
) -> Tensor:
    """CTC's loss, raising on labels that are no classes, where PyTorch's does not look.

    Raises:
        ValueError: labels are no classes.
    """
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < logits.shape[-1]:
        raise ValueError("labels are no classes")
    return honest(logits, targets, *rest, **options)


def places_that_are_numbers(
    honest: Honest, image: Tensor, places: Tensor, *rest: Any, **options: Any
) -> Tensor:
    """`grid_sample` that is not finite where places are not, without a look at memory there.

    PyTorch's takes NaN for an index where padding is "border" or "reflection", in either pass.
    """
    nowhere = 0 * places.detach()  # NaN where one is no number, and nothing else
    sampled = honest(image, places.nan_to_num(posinf=0.0, neginf=0.0), *rest, **options)
    return sampled + nowhere.sum(-1).unsqueeze(1)


GUARDED = {"ctc_loss": labels_within_classes, "grid_sampler": places_that_are_numbers}


@contextmanager
def within_memory() -> Iterator[None]:
    """Put guards before these operations, which else may end the process."""
    honest: dict[str, Honest] = {name: getattr(torch, name) for name in GUARDED}
    vars(torch).update({name: partial(guard, honest[name]) for name, guard in GUARDED.items()})
    try:
        yield
    finally:
        vars(torch).update(honest)
