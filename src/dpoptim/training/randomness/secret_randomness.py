"""Secret seeds for the random numbers of models and data sets (dropout, augmentation)."""

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dpoptim.noise.stream import KeyStream
from dpoptim.training.randomness.generators import (
    Generator,
    everywhere,
    generators_in,
    set_state,
    state_from,
    state_of,
)

WORDS = 4  # of 64 bits in a seed; of torch's generators, one is used


@contextmanager
def secret_randomness(stream: KeyStream, own: Sequence[Generator] = ()) -> Iterator[None]:
    """Seed torch's, numpy's and Python's generators from ``stream``; put them back at the end.

    Whoever knows the seed of dropout knows each record's mask, and one record more would shift the
    masks of all that follow it: as ``torch.manual_seed(0)``, which many programs begin with, would
    let it. Workers of data loaders: `SecretInWorker`. Where this is entered again meanwhile, for
    another run, the last to end puts back what the first has found.

    Args:
        own: generators of the program's own, `generators_in` its parts; seeded and put back, too.

    **Guarantee.** None by itself: torch's generator on CPUs keeps 32 bits of a seed, and a program
    may seed it anew. See `assumptions.RANDOM`.
    """
    words = np.empty(WORDS * (1 + len(everywhere(own))), dtype=np.uint64)
    stream.words(words)
    with put_back_by_the_last([*of_torch_itself(), *everywhere(own)]):
        seed_all(
            [int.from_bytes(seed.tobytes(), "little") for seed in words.reshape(-1, WORDS)], own
        )
        yield


@dataclass
class Kept:
    """The state that a program has given a generator, and how many keep others from seeing it."""

    generator: Generator
    state: Any
    users: int = 0


_kept: dict[int, Kept] = {}  # by the generator's id
_keeping = threading.Lock()


@contextmanager
def put_back_by_the_last(generators: Sequence[Generator]) -> Iterator[None]:
    """Restore each generator where nobody else is inside with it, in whatever order they leave."""
    with _keeping:
        for each in generators:
            _kept.setdefault(id(each), Kept(each, state_of(each))).users += 1
    try:
        yield
    finally:
        with _keeping:
            for each in generators:
                kept = _kept[id(each)]
                kept.users -= 1
                if kept.users == 0:
                    set_state(each, _kept.pop(id(each)).state)


@contextmanager
def own_states() -> Iterator[None]:
    """Give generators that are seeded in secret the program's own states for a while."""
    with _keeping:
        own = list(_kept.values())
    secret = [(each.generator, state_of(each.generator)) for each in own]
    for each in own:
        set_state(each.generator, each.state)
    try:
        yield
    finally:
        for generator, state in secret:
            set_state(generator, state)


@contextmanager
def same_randomness(own: Sequence[Generator] = (), seed: int = 0) -> Iterator[None]:
    """Seed all generators with one number, whoever has drawn before; put them back at the end."""
    with put_generators_back([*of_torch_itself(), *own]):
        seed_all([seed] * (1 + len(everywhere(own))), own)
        yield


def of_torch_itself() -> list[Generator]:
    """Torch's generators, on the CPU and on each GPU."""
    if not torch.cuda.is_available():
        return [torch.default_generator]
    torch.cuda.init()  # before that it has none
    return [torch.default_generator, *torch.cuda.default_generators]


def seed_all(seeds: Sequence[int], own: Sequence[Generator]) -> None:
    """Seed torch's generators by the first seed, and the others by one each."""
    seed_torch(seeds[0] % 2**64)
    seed_others(seeds[1:], own)


def seed_others(seeds: Sequence[int], own: Sequence[Generator]) -> None:
    """Seed numpy's and Python's generators, and one's own, by one each."""
    for generator, seed in zip(everywhere(own), seeds, strict=True):
        set_state(generator, state_from(generator, seed))


@dataclass(frozen=True, repr=False)
class SecretInWorker:
    """Seeds all generators in a worker of a data loader, as its ``worker_init_fn``.

    A worker has copies of the program's generators. Alike in all workers they would draw for one
    record what they draw for another, and one record more would change whose numbers are the same.

    Args:
        root: secret bytes, which all seeds are made of.
        parts: of the program that run in the worker: data set and collate function.
        first: the program's own ``worker_init_fn``, whose seeds anybody may know.
    """

    root: bytes
    parts: tuple[Any, ...]
    first: Callable[[int], None] | None

    @classmethod
    def drawn(
        cls, stream: KeyStream, parts: tuple[Any, ...], first: Callable[[int], None] | None
    ) -> "SecretInWorker":
        words = np.empty(WORDS, dtype=np.uint64)
        stream.words(words)
        return cls(words.tobytes(), parts, first)

    def __call__(self, worker: int) -> None:
        if self.first is not None:
            self.first(worker)
        own = generators_in(*self.parts)
        seeds = [self._seed(worker, i) for i in range(1 + len(everywhere(own)))]
        torch.manual_seed(seeds[0] % 2**64)  # as data loaders do it there
        seed_others(seeds[1:], own)

    def _seed(self, worker: int, number: int) -> int:
        text = self.root + f"{worker} {number}".encode()
        return int.from_bytes(hashlib.sha256(text).digest(), "little")


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
