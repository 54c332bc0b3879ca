"""Privacy bugs of banded noise and of batches sampled by turns, put into this library while a
``with`` lasts.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from dpoptim.accounting.balls_in_bins import BallsInBinsDpEvent
from dpoptim.accounting.choose_profile import monte_carlo_profile
from dpoptim.accounting.min_separation import MinSeparationDpEvent
from dpoptim.accounting.replicas import Replicas
from dpoptim.mechanisms import correlated
from dpoptim.noise.correlated import BandedToeplitz, buffered_toeplitz, choose_strategy
from dpoptim.noise.correlated.banded import BandedState
from dpoptim.noise.correlated.redrawn import RedrawnState
from dpoptim.noise.correlated.strategy import NoiseState
from dpoptim.noise.stream import KeyStream
from dpoptim.sampling import (
    CyclicPoissonSampling,
    MinSeparationSampling,
    Position,
    balls_in_bins,
)

Fault = AbstractContextManager[Any]


def banded_sensitivity_left_out() -> Fault:
    def sensitivity(
        strategy: BandedToeplitz, steps: int, *pattern: Any, regular: bool = False
    ) -> float:
        return 1.0

    return patch.object(BandedToeplitz, "sensitivity", sensitivity)


@contextmanager
def passes_of_buffers_apart() -> Iterator[None]:
    """Columns of a record's passes overlap, and are charged as if they did not."""
    remembered = (
        buffered_toeplitz.fitted,
        buffered_toeplitz.scaled_rows,
        choose_strategy.best_strategy,
    )
    for each in remembered:
        each.cache_clear()  # what was computed before would hide the fault
    try:
        with patch.object(buffered_toeplitz, "added_up", lambda column, separation: column):
            yield
    finally:
        for each in remembered:
            each.cache_clear()  # and the fault would outlive itself


def rates_taken_for_clipping() -> Fault:
    """A record charged by how far iterates go, which small learning rates shorten."""
    honest = BandedToeplitz._sensitivity

    def sensitivity(
        strategy: BandedToeplitz, steps: int, k: int, b: int, *, regular: bool
    ) -> float:
        moved = float(np.sqrt(np.mean(strategy.workload.rates(steps) ** 2)))
        return moved * honest(strategy, steps, k, b, regular=regular)

    return patch.object(BandedToeplitz, "_sensitivity", sensitivity)


def noise_by_planned_rates() -> Fault:
    """Noise as small as the rates of a plan of numbers, since little of it moves the iterates."""
    honest = BandedToeplitz.start

    def start(
        strategy: BandedToeplitz, steps: int, sizes: Sequence[int], stream: KeyStream
    ) -> NoiseState:
        if isinstance(strategy.workload.decay, str):
            return honest(strategy, steps, sizes, stream)
        column, rows = strategy.coefficients(steps)
        return BandedState(steps, sizes, stream, column, rows / strategy.workload.rates(steps) ** 2)

    return patch.object(BandedToeplitz, "start", start)


def draws_of_all_steps_alike() -> Fault:
    """Noise that is taken back is the noise that hides the step: next to none is left."""
    honest = RedrawnState._draws_of
    return patch.object(RedrawnState, "_draws_of", lambda state, key: honest(state, bytes(32)))


def records_in_neighbouring_turns() -> Fault:
    """Each record comes in its own turn and in the one before, which banded noise does not
    hide.
    """
    honest = CyclicPoissonSampling.batches

    def batches(
        sampler: CyclicPoissonSampling,
        coins: KeyStream,
        records: int,
        position: Position | None = None,
    ) -> Iterator[NDArray[np.int64]]:
        position = position or Position()
        for mine in honest(sampler, coins, records, position):
            assert position.order is not None
            early = np.flatnonzero(position.order == position.drawn % sampler.parts)
            yield np.union1d(mine, early)

    return patch.object(CyclicPoissonSampling, "batches", batches)


def one_turn_charged() -> Fault:
    return patch.object(
        CyclicPoissonSampling,
        "event",
        lambda sampler, noise: honest_event(sampler, noise[: sampler.parts]),
    )


def more_bins_charged_than_dealt() -> Fault:
    """Ten times as many, of which the others have nothing to do with the record's."""

    def mixture(*given: Any) -> BallsInBinsDpEvent:
        honest = balls_in_bins.mixture_event(*given)
        return replace(honest, gram=honest.gram + (0.0,) * (9 * len(honest.gram)))

    return patch.object(correlated, "mixture_event", mixture)


def records_back_too_soon() -> Fault:
    """Nobody waits: a coin of the same rate in every step."""
    honest = MinSeparationSampling.batches

    def batches(
        sampler: MinSeparationSampling,
        coins: KeyStream,
        records: int,
        position: Position | None = None,
    ) -> Iterator[NDArray[np.int64]]:
        position = position or Position()
        for mine in honest(sampler, coins, records, position):
            assert position.order is not None
            position.order[:] = 0
            yield mine

    return patch.object(MinSeparationSampling, "batches", batches)


def rate_of_coins_divided_by_the_gap_twice() -> Fault:
    """As if a record's one participation in so many steps were a coin for all of these."""
    honest = MinSeparationSampling.event_of_strategy

    def event_of_strategy(sampler: MinSeparationSampling, *given: Any) -> MinSeparationDpEvent:
        return replace(honest(sampler, *given), rate=sampler.rate / sampler.gap**2)

    return patch.object(MinSeparationSampling, "event_of_strategy", event_of_strategy)


@contextmanager
def cross_terms_left_out() -> Iterator[None]:
    """Copies are drawn, and their moment summed up, as if their outputs were orthogonal."""
    honest = Replicas.__init__

    def without(replicas: Replicas, copies: int, rate: float, products: Any) -> None:
        honest(replicas, copies, rate, 0 * products)

    monte_carlo_profile.cache_clear()  # what was computed before would hide the fault
    try:
        with patch.object(Replicas, "__init__", without):
            yield
    finally:
        monte_carlo_profile.cache_clear()


honest_event = CyclicPoissonSampling.event
