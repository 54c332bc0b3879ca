"""Average the last iterates of a run."""

from typing import Any

import torch
from torch import nn


class TailAverage:
    """The mean of the iterates after a given step: less noise for free, as they are released."""

    def __init__(self, model: nn.Module, start: int) -> None:
        self._model, self._start, self._count = model, start, 0
        self._mean = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        self._count = self._count + 1 if step > self._start else 1
        for mean, p in zip(self._mean, self._model.parameters(), strict=True):
            mean.lerp_(p, 1 / self._count)

    def state(self) -> dict[str, Any]:
        """State for a later part of the run: released numbers."""
        return {"count": self._count, "mean": self._mean}

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._count = int(state["count"])
        for mean, saved in zip(self._mean, state["mean"], strict=True):
            mean.copy_(saved)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the model's parameters with their mean; a second call undoes it."""
        for p, mean in zip(self._model.parameters(), self._mean, strict=True):
            current = p.detach().clone()
            p.copy_(mean)
            mean.copy_(current)
