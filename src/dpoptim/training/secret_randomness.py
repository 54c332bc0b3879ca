"""Random numbers of models and data sets (dropout, augmentation) from seeds nobody knows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from dpoptim.noise.stream import KeyStream
from dpoptim.training.generators import Generator, everywhere, set_state, state_from, state_of

WORDS = 4  # of 64 bits in a seed; of torch's generators, one is used


@contextmanager
def secret_randomness(stream: KeyStream, own: Sequence[Generator] = ()) -> Iterator[None]:
    """Seed torch's, numpy's and Python's generators from ``stream``; put them back at the end.

    Whoever knows the seed of dropout knows each record's mask, and one record more would shift the
    masks of all that follow it: as ``torch.manual_seed(0)``, which many programs begin with, would
    let it. Workers of data loaders take their seeds from torch's generator.

    Args:
        own: generators of the program's own, `generators_in` its parts; seeded and put back, too.

    **Guarantee.** None by itself: torch's generator on CPUs keeps 32 bits of a seed, and a program
    may seed it anew. See `assumptions.RANDOM`.
    """
    words = np.empty(WORDS * (1 + len(everywhere(own))), dtype=np.uint64)
    stream.words(words)
    with seeded(
        [int.from_bytes(seed.tobytes(), "little") for seed in words.reshape(-1, WORDS)], own
    ):
        yield


@contextmanager
def same_randomness(own: Sequence[Generator] = ()) -> Iterator[None]:
    """Seed all generators with zero, whoever has drawn before; put them back at the end."""
    with seeded([0] * (1 + len(everywhere(own))), own):
        yield


@contextmanager
def seeded(seeds: Sequence[int], own: Sequence[Generator]) -> Iterator[None]:
    """Seed torch's generators by the first seed, and the others by one each."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with put_generators_back(own), torch.random.fork_rng(devices):
        seed_torch(seeds[0] % 2**64)
        for generator, seed in zip(everywhere(own), seeds[1:], strict=True):
            set_state(generator, state_from(generator, seed))
        yield


@contextmanager
def put_generators_back(own: Sequence[Generator]) -> Iterator[None]:
    """Restore numpy's, Python's and one's own generators at the end; not torch's."""
    before = [(generator, state_of(generator)) for generator in everywhere(own)]
    try:
        yield
    finally:
        for generator, state in before:
            set_state(generator, state)


def seed_torch(seed: int) -> None:
    """Seed torch's generators, without a queue for accelerators that are not there.

    ``torch.manual_seed`` writes down the stack for each kind of them, a millisecond each, to seed
    it once it appears, and keeps it.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
