"""Privacy bugs that have happened, put into this library for as long as a ``with`` lasts: noise,
accounting, ledger.

For testing the detectors only. A run under a fault promises nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import dp_accounting
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpoptim.accounting import accountant, choose_profile
from dpoptim.distributed import ranks
from dpoptim.gate import Gate, GaussianSum, adaptive, planned
from dpoptim.mechanisms import IndependentNoise
from dpoptim.noise import gaussian, ziggurat
from dpoptim.noise.few_rows import Vector, write_out
from dpoptim.noise.gaussian import add_normal
from dpoptim.noise.prefetch import DrawnAhead
from dpoptim.noise.stream import KeyStream
from dpoptim.sampling import Draws, PoissonSampling
from dpoptim.training.batches.microbatches import BatchQueue

Fault = Callable[[], AbstractContextManager[Any]]
Draw = Callable[[KeyStream, Tensor, float], None]


def noisy_by(draw: Draw) -> Fault:
    """The gate draws its noise by ``draw(stream, total, standard_deviation)`` instead."""

    def on_one_vector(stream: KeyStream, out: Tensor | Sequence[Vector], std: float) -> None:
        vectors = [out] if isinstance(out, Tensor) else out
        parts = write_out(vectors)
        total = torch.cat([each.flatten().double() for each in parts])
        draw(stream, total, std)
        for each, noisy in zip(parts, total.split([p.numel() for p in parts]), strict=True):
            each.copy_(noisy.view(each.shape))

    @contextmanager
    def swapped() -> Iterator[None]:
        with (
            patch.object(planned, "add_normal", on_one_vector),
            patch.object(adaptive, "add_normal", on_one_vector),
        ):
            yield

    return swapped


def scaled_noise(stream: KeyStream, total: Tensor, std: float) -> None:
    add_normal(stream, total, 0.9 * std)


def noise_for_most_entries(stream: KeyStream, total: Tensor, std: float) -> None:
    add_normal(stream, total[: -max(1, total.numel() // 3)], std)


def noise_for_nonzero_entries(stream: KeyStream, total: Tensor, std: float) -> None:
    noisy = total.clone()
    add_normal(stream, noisy, std)
    total.copy_(torch.where(total != 0, noisy, total))


def same_noise_each_step(stream: KeyStream, total: Tensor, std: float) -> None:
    add_normal(KeyStream.from_seed(0, "the same each time"), total, std)


@contextmanager
def draws_ahead_used_twice() -> Iterator[None]:
    """What was drawn ahead serves two steps."""
    honest, kept = DrawnAhead.take, list[Tensor]()

    def take(self: DrawnAhead, branch: KeyStream, size: int) -> Tensor | None:
        drawn = honest(self, branch, size)
        if drawn is None or kept:
            return None if drawn is None else kept.pop()
        kept.append(drawn)
        return drawn

    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # with one, nothing is drawn ahead
    try:
        with patch.object(DrawnAhead, "take", take):
            yield
    finally:
        torch.set_num_threads(threads)


def same_noise_in_both_halves(stream: KeyStream, total: Tensor, std: float) -> None:
    half = torch.zeros((total.numel() + 1) // 2, dtype=torch.float64)
    add_normal(stream, half, std)
    total += torch.cat([half, half])[: total.numel()]


def float32_noise(stream: KeyStream, total: Tensor, std: float) -> None:
    # A seed of its own from the stream: only the precision is at fault.
    seed = np.empty(1, np.uint64)
    stream.words(seed)
    generator = torch.Generator().manual_seed(int(seed[0] >> 1))
    total += std * torch.randn(total.shape, generator=generator)


def cut_tail() -> AbstractContextManager[Any]:
    honest = gaussian.settle

    def cut(
        stream: KeyStream, place: NDArray[np.float64], layer: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        return honest(stream, place, layer).clip(-5.768, 5.768)

    faults = ExitStack()
    for module in (ziggurat, gaussian):
        faults.enter_context(patch.object(module, "settle", cut))
    return faults


def unsettled_throws() -> AbstractContextManager[Any]:
    return patch.object(gaussian, "settle", lambda stream, place, layer: place.copy())


def settled_throws_left_out() -> AbstractContextManager[Any]:
    return patch.object(gaussian, "settle", lambda stream, place, layer: np.zeros(len(place)))


def places_above_the_curve_kept() -> AbstractContextManager[Any]:
    def settle(
        stream: KeyStream, place: NDArray[np.float64], layer: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        settled, beyond = place.copy(), layer == 0
        drawn = ziggurat.tail(stream, int(beyond.sum()))
        settled[beyond] = np.copysign(drawn, place[beyond])
        return settled

    return patch.object(gaussian, "settle", settle)


def global_seed() -> AbstractContextManager[Any]:
    def key_stream(seed: int | None, purpose: str) -> KeyStream:
        return KeyStream.from_seed(torch.initial_seed() if seed is None else seed, purpose)

    return patch.object(ranks, "key_stream", key_stream)


def query_of(change: Callable[[GaussianSum], GaussianSum]) -> Fault:
    """The mechanism asks the gate for another query than the one that was accounted."""
    honest = IndependentNoise.query
    return lambda: patch.object(IndependentNoise, "query", lambda *given: change(honest(*given)))


def halved_noise(query: GaussianSum) -> GaussianSum:
    return GaussianSum(query.norm_bound, query.noise_multiplier / 2)


def ignored_clip_norm(query: GaussianSum) -> GaussianSum:
    return GaussianSum(1.0, query.noise_multiplier)


@contextmanager
def replace_one_as_add_or_remove() -> Iterator[None]:
    honest = choose_profile.gaussian_mu
    # what was computed before would hide the fault, and the fault would outlive itself
    accountant._epsilon.cache_clear()
    accountant._points.cache_clear()
    try:
        with patch.object(
            choose_profile,
            "gaussian_mu",
            lambda leaves, relation: honest(
                leaves, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
            ),
        ):
            yield
    finally:
        accountant._epsilon.cache_clear()
        accountant._points.cache_clear()


def event_of(rate: float = 1.0, steps: Callable[[int], int] = lambda count: count) -> Fault:
    """The sampler accounts for another sample rate, or another number of steps, than it has."""
    honest = PoissonSampling.event

    def event(
        self: PoissonSampling, noise_multipliers: NDArray[np.float64]
    ) -> dp_accounting.DpEvent:
        return honest(
            PoissonSampling(self.sample_rate * rate),
            noise_multipliers[: steps(len(noise_multipliers))],
        )

    return lambda: patch.object(PoissonSampling, "event", event)


@contextmanager
def more_steps_than_reserved() -> Iterator[None]:
    gate_init, queue_init = Gate.__init__, BatchQueue.__init__

    def lenient_gate(self: Gate, *, releases: int, **rest: Any) -> None:
        gate_init(self, releases=releases + 2, **rest)

    def longer_queue(
        self: BatchQueue, sampler: Draws, coins: KeyStream, units: int, steps: int, *more: Any
    ) -> None:
        queue_init(self, sampler, coins, units, steps + 2, *more)

    with ExitStack() as stack:
        stack.enter_context(patch.object(Gate, "__init__", lenient_gate))
        stack.enter_context(patch.object(BatchQueue, "__init__", longer_queue))
        yield


def no_charge() -> AbstractContextManager[Any]:
    return patch.object(Gate, "open", lambda self: None)


@contextmanager
def charge_after_noise() -> Iterator[None]:
    honest_open, honest_release = Gate.open, Gate.release_sum

    def release_sum(self: Gate, sums: list[Tensor]) -> list[Tensor]:
        released = honest_release(self, sums)
        honest_open(self)
        return released

    with (
        patch.object(Gate, "release_sum", release_sum),
        patch.object(Gate, "open", lambda self: None),
    ):
        yield
