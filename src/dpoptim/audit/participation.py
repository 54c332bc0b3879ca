"""Participation audit: who took part in which step, and is that what the accountant was told?

With the noise off, canaries whose gradients are coordinates of their own show exactly which records
each step summed. Under Poisson sampling these are independent coins of one bias, so their counts
are binomial. Shuffled batches, batches of a fixed size, coins tossed once for a run or once for a
batch, skipped or redrawn empty batches and a counted placeholder all show in one of the counts.

Checks are p-values as in `audit.finding` (exact binomials, or chi-square and normal approximations
of sums of thousands).
"""

from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import bdtrc
from torch.utils.data import TensorDataset

from dpoptim.audit.bounds import Floats
from dpoptim.audit.finding import Checks, binomial_pvalue, chi_square_pvalue, normal_pvalue
from dpoptim.audit.two_worlds import Canaries
from dpoptim.methods import DPSGD
from dpoptim.sampling.poisson import largest_batch_of
from dpoptim.training.attach import attach


@dataclass(frozen=True)
class ParticipationResult(Checks):
    """The checks, and how many planned steps released nothing: ``steps_missing``."""

    steps_missing: int

    @property
    def failed(self) -> tuple[str, ...]:
        missing = f"{self.steps_missing} planned steps did not happen"
        return (missing,) * (self.steps_missing > 0) + super().failed


def audit_participation(
    *,
    records: int,
    batch_size: int,
    steps: int,
    largest_batch: float | None = None,
    failure: float = 1e-6,
    noise_seed: int | None = None,
) -> ParticipationResult:
    """Run a plan without noise through the public API; test batches against independent coins.

    Args:
        records, batch_size, steps: of the plan; an expected batch of one or two makes empty
            batches frequent.
        largest_batch: as for `DPSGD`: whether who is left out is left to coins as well.
        failure: probability of a false alarm, at most (up to the approximations).
        noise_seed: as for ``attach``; it seeds the coins.

    Returns:
        the finding, with a verdict.

    Raises:
        ValueError: every record takes part in every step, so there are no coins to test, or there
            are too few steps.
    """
    if batch_size >= records or steps < 2:
        raise ValueError(
            f"batch_size={batch_size} of {records} records in {steps} steps: use a smaller batch, "
            "or more steps."
        )
    took_part = participation(
        records=records,
        batch_size=batch_size,
        steps=steps,
        largest_batch=largest_batch,
        noise_seed=noise_seed,
    )
    missing, sample_rate = steps - len(took_part), batch_size / records
    if largest_batch is None:
        pvalues = participation_pvalues(took_part, sample_rate)
    else:
        most = largest_batch_of(batch_size, largest_batch)
        pvalues = truncated_pvalues(took_part, sample_rate, most)
    return ParticipationResult(pvalues, failure, steps_missing=missing)


def participation(
    *,
    records: int,
    batch_size: int,
    steps: int,
    largest_batch: float | None = None,
    noise_seed: int | None = None,
) -> Floats:
    """How often each record counted in each step: (steps, records), 0 or 1 if all is well."""
    model = Canaries(records, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = DPSGD(clip_norm=1.0, largest_batch=largest_batch).plan(
        n=records, batch_size=batch_size, steps=steps, noise_multiplier=0.0, delta=1e-6
    )
    with torch.no_grad():
        model.table.weight.zero_()
    rows = []
    data = TensorDataset(torch.arange(records))
    with attach(plan, model, optimizer, data, noise_seed=noise_seed) as private:
        for (index,) in private.batches():
            private.backward(2.0 * model(index))
            optimizer.step()
            rows.append(-model.table.weight.detach()[:, 0].numpy() * batch_size)
            with torch.no_grad():
                model.table.weight.zero_()
    return np.round(np.stack(rows), 3)


def participation_pvalues(took_part: Floats, sample_rate: float) -> dict[str, float]:
    """p-values of coins of bias ``sample_rate`` in (0, 1); ``took_part``: (steps, records)."""
    (steps, records), q = took_part.shape, sample_rate
    variance = q * (1 - q)
    sizes, counts = took_part.sum(1), took_part.sum(0)
    spread_of_sizes = ((sizes - records * q) ** 2).sum() / (records * variance)
    spread_of_counts = ((counts - steps * q) ** 2).sum() / (steps * variance)
    again = (took_part[1:] * took_part[:-1]).sum()
    # Of X_t X_(t+1) summed over t: its own variance, and the covariance of neighbours that share a
    # coin.
    spread_of_again = records * ((steps - 1) * q**2 * (1 - q**2) + 2 * (steps - 2) * (q**3 - q**4))
    return {
        "each record counts once or not at all": float(np.isin(took_part, (0.0, 1.0)).all()),
        "sample rate": binomial_pvalue(sizes.sum(), took_part.size, q),
        "sample rate of record 0": binomial_pvalue(counts[0], steps, q),
        "empty batches": binomial_pvalue((sizes == 0).sum(), steps, (1 - q) ** records),
        "spread of batch sizes": chi_square_pvalue(spread_of_sizes, steps),
        "spread of records' counts": chi_square_pvalue(spread_of_counts, records),
        "records that come again": normal_pvalue(
            (again - records * (steps - 1) * q**2) / np.sqrt(max(spread_of_again, 1e-300))
        ),
    }


def truncated_pvalues(took_part: Floats, sample_rate: float, most: int) -> dict[str, float]:
    """p-values of batches of ``most`` at most, cut by coins where more were drawn."""
    steps, records = took_part.shape
    sizes, counts = took_part.sum(1), took_part.sum(0)
    at_least = bdtrc(np.arange(most) - 1.0, records, sample_rate)  # P(size >= 0), ...
    at_least = np.append(at_least, bdtrc(most - 1.0, records, sample_rate))
    mean = at_least[1:].sum()
    variance = ((2 * np.arange(1, most + 1) - 1) * at_least[1:]).sum() - mean**2
    return {
        "each record counts once or not at all": float(np.isin(took_part, (0.0, 1.0)).all()),
        "largest batch": float(sizes.max() <= most),
        "full batches": binomial_pvalue((sizes == most).sum(), steps, at_least[most]),
        "mean batch": normal_pvalue((sizes.sum() - steps * mean) / np.sqrt(steps * variance)),
        "sample rate of record 0": binomial_pvalue(counts[0], steps, mean / records),
        "sample rate of the last record": binomial_pvalue(counts[-1], steps, mean / records),
    }
