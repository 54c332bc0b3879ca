"""Who takes part in which step, by a sampler."""

import numpy as np

from dpoptim.noise.stream import KeyStream
from dpoptim.sampling import Sampler


def took_part(sampler: Sampler, records: int, steps: int, seed: int = 0) -> np.ndarray:
    """Who takes part in each step: (steps, records)."""
    drawn = sampler.batches(KeyStream.from_seed(seed, "test"), records)
    found = np.zeros((steps, records), dtype=bool)
    for step in range(steps):
        found[step, next(drawn)] = True
    return found
