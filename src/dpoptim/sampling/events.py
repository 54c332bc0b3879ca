"""The events of steps with independent Gaussian noise."""

import math

import dp_accounting
import numpy as np

from dpoptim.sampling.sampler import Floats


def composed(noise_multipliers: Floats, sample_rates: float | Floats) -> dp_accounting.DpEvent:
    """Gaussians on Poisson batches, composed; equal ones counted, in any order.

    Args:
        noise_multipliers: of each step, shape (steps,).
        sample_rates: of each step, shape (steps,), or of all.
    """
    rates = np.broadcast_to(sample_rates, len(noise_multipliers))
    # stretches of equal steps first: to sort ten million steps takes longer than all that follows
    changes = np.diff(noise_multipliers).astype(bool)
    if np.ndim(sample_rates):
        changes |= np.diff(rates).astype(bool)
    starts = np.flatnonzero(np.concatenate([[True], changes])[: len(noise_multipliers)])
    lengths = np.diff(np.append(starts, len(noise_multipliers)))
    pairs = np.stack([noise_multipliers[starts], rates[starts]])
    kinds, kind = np.unique(pairs, axis=1, return_inverse=True)
    counts = np.zeros(kinds.shape[1], np.int64)
    np.add.at(counts, kind.ravel(), lengths)
    events = []
    for (value, rate), count in zip(kinds.T.tolist(), counts.tolist(), strict=True):
        step: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(value)
        if rate < 1:
            step = dp_accounting.PoissonSampledDpEvent(rate, step)
        events.append(dp_accounting.SelfComposedDpEvent(step, count))
    return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)


def one_gaussian(
    noise_multipliers: Floats, steps_per_pass: int, *, moves: bool
) -> dp_accounting.DpEvent:
    """The Gaussian of the costliest steps that one record can take part in, one of each pass.

    Args:
        noise_multipliers: shape (steps,), > 0.
        moves: whether a record's place changes from pass to pass.
    """
    values = np.unique(noise_multipliers)
    passes = math.ceil(len(noise_multipliers) / steps_per_pass)
    if len(values) == 1:
        return dp_accounting.SelfComposedDpEvent(
            dp_accounting.GaussianDpEvent(float(values[0])), passes
        )
    costs = np.zeros(passes * steps_per_pass)
    costs[: len(noise_multipliers)] = noise_multipliers**-2.0
    by_pass = costs.reshape(passes, steps_per_pass)
    most = by_pass.max(1).sum() if moves else by_pass.sum(0).max()
    return dp_accounting.GaussianDpEvent(float(most**-0.5) * (1 - 2.0**-40))
