"""Weights and settings that ranks compare in every step: ranks that differ train different models.

Each would take its gradients at weights of its own, and the sum of these is of no model.
"""

import zlib
from collections.abc import Sequence

import torch

from dpoptim.gradients.engine import Engine
from dpoptim.runtime.torch_internals import local_part
from dpoptim.training.optimizer_settings import settings_of

WEIGHTS = (
    "weights (where other processors, thread counts or libraries round otherwise: broadcast them "
    "from rank 0 after optimizer.step())"
)
PLAIN = (bool, int, float, complex, str, type(None))


class SameOnRanks:
    """Public numbers that all ranks have alike when a step is released.

    Args:
        engine: attached; its watch has read the weights as the batch began.
        optimizers: whose settings are compared.
    """

    def __init__(self, engine: Engine, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._engine, self._optimizers = engine, tuple(optimizers)
        # of parameters that are spread, each rank has another part
        self._whole = all(local_part(p) is p for p in engine.parameters)

    def number(self) -> int:
        """A checksum of everything, of 63 bits; equal on ranks that have the same."""
        settings = repr([self._settings(each) for each in self._optimizers]).encode()
        return (self._weights() ^ (zlib.crc32(settings) << 31)) % (1 << 63)

    def facts(self) -> dict[str, str]:
        """The same in parts, by names for a message."""
        found = {WEIGHTS: str(self._weights())}
        for place, optimizer in enumerate(self._optimizers):
            whose = f" of optimizer {place}" if len(self._optimizers) > 1 else ""
            for name, values in self._settings(optimizer).items():
                found[f"{name}{whose} (an optimizer setting)"] = repr(values)
        return found

    def _weights(self) -> int:
        state = self._engine.state
        return state.noted_weights() if self._whole and state is not None else 0

    @staticmethod
    def _settings(optimizer: torch.optim.Optimizer) -> dict[str, list[object]]:
        """Numbers and texts among an optimizer's settings; others may be written as addresses."""
        return {
            name: [value for value in values if is_plain(value)]
            for name, values in sorted(settings_of(optimizer).items())
            if name != "params"
        }


def is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return isinstance(value, PLAIN)
