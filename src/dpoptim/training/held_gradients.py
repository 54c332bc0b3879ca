"""Gradients that a model's parameters hold, left as they were by trials."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def gradients_put_back(model: nn.Module) -> Iterator[None]:
    """Around trials of a model; inside there is nothing in ``.grad``.

    A DistributedDataParallel that a loss names writes zeros there, which no gate has written.
    """
    held = [(p, p.grad) for p in model.parameters()]
    for p, _ in held:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in held:
            p.grad = grad
