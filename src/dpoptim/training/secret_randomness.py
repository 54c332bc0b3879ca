"""Random numbers of models and data sets (dropout, augmentation) from seeds nobody knows."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch

from dpoptim.noise.stream import KeyStream


@contextmanager
def secret_randomness(stream: KeyStream) -> Iterator[None]:
    """Seed torch's, numpy's and Python's generators from ``stream``; put them back at the end.

    Whoever knows the seed of dropout knows each record's mask, and one record more would shift the
    masks of all that follow it: as ``torch.manual_seed(0)``, which many programs begin with, would
    let it. Workers of data loaders take their seeds from torch's generator.

    **Guarantee.** None by itself: torch's generator on CPUs keeps 32 bits of a seed, and a program
    may seed it anew. See `assumptions.RANDOM`.
    """
    words = np.empty(3, dtype=np.uint64)
    stream.words(words)
    with seeded(*(int(word) for word in words)):
        yield


@contextmanager
def seeded(for_torch: int, for_numpy: int, for_python: int) -> Iterator[None]:
    """Seed torch's, numpy's and Python's generators; put them back at the end."""
    numpys, pythons = np.random.get_state(), random.getstate()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            seed_torch(for_torch)
            np.random.seed(for_numpy % 2**32)
            random.seed(for_python)
            yield
    finally:
        np.random.set_state(numpys)
        random.setstate(pythons)


def seed_torch(seed: int) -> None:
    """Seed torch's generators, without a queue for accelerators that are not there.

    ``torch.manual_seed`` writes down the stack for each kind of them, a millisecond each, to seed
    it once it appears, and keeps it.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def states_of_other_generators() -> tuple[object, ...]:
    """Numpy's and Python's states, which any draw changes; comparable."""
    state = cast("tuple[Any, ...]", np.random.get_state())
    return random.getstate(), state[1].tobytes(), state[2:]
