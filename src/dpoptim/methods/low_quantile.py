"""A low quantile of one number a record, such as Lipschitz constants: for a clip norm.

Das et al. 2023 report the noisy smallest constant, adding noise to each record's own; which record
won, and what it holds, would then be public. Here the candidates are public numbers, and the
records only vote.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpoptim.accounting.guarantee import Guarantee, neighboring_name, parse_neighboring
from dpoptim.accounting.ledger import Ledger
from dpoptim.arguments import positive_number, real_number
from dpoptim.errors import axes_of
from dpoptim.gate import SelectionGate
from dpoptim.noise.stream import key_stream

CANDIDATES_PER_OCTAVE = 8  # so 9 % from one to the next
LEAST_RANK = 10.0  # divided by epsilon: below that, the noise decides


def private_low_quantile(
    values: Tensor | NDArray[np.floating],
    quantile: float,
    *,
    epsilon: float,
    low: float,
    high: float,
    neighboring: str = "zero-out",
    ledger: Ledger | None = None,
    noise_seed: int | None = None,
) -> tuple[float, Guarantee]:
    """A number below which about a share ``quantile`` of the values lies.

    Args:
        values: one for each record, shape (n,); what is not a number counts as large.
        quantile: in (0, 1); its rank ``quantile * n`` must be at least 10 / epsilon.
        epsilon: what it may cost, > 0.
        low, high: public range of the answer, 0 < low < high. Not to be read off the values.
        neighboring: ``"zero-out"`` or ``"replace-one"``; n is public under both.
        ledger: where it is charged, with the training that follows; None: nowhere.
        noise_seed: repeatable noise, for tests; the guarantee then says that it is not for release.

    Returns:
        one of the public candidates ``low 2^(i/8)``, and its guarantee.

    Raises:
        ValueError: a setting out of range, or a rank that the noise would drown.

    **Guarantee.** epsilon-DP, delta = 0: the exponential mechanism on public candidates r with
    score ``-|#{values < r} - rank|``, which one record changes by at most 1; drawn exactly
    (`noise.exponential_mechanism`), not by Gumbel noise of 53 bits, so what is left is that nobody
    tells the AES-256 keystream from random bits.

    Examples:
        >>> import torch
        >>> import dpoptim
        >>> lengths = torch.linspace(0.5, 20, 1_000)
        >>> value, guarantee = dpoptim.private_low_quantile(
        ...     lengths, 0.1, epsilon=1.0, low=0.01, high=100.0
        ... )
        >>> guarantee.epsilon
        1.0
    """
    relation = parse_neighboring(neighboring)
    if neighboring_name(relation) == "add-or-remove-one":
        raise ValueError(
            "neighboring='add-or-remove-one' makes n private, which the rank is taken of; use "
            "'zero-out'."
        )
    quantile, epsilon = real_number("quantile", quantile), positive_number("epsilon", epsilon)
    low, high = positive_number("low", low), positive_number("high", high)
    if not low < high:
        raise ValueError(f"low={low:g} must be below high={high:g}.")
    numbers = torch.as_tensor(values).to("cpu", torch.float64)
    if numbers.dim() != 1:  # several numbers of a record would be several votes
        raise ValueError(
            f"values must have one number for each record, shape (n,); got {axes_of(numbers)}."
        )
    rank = quantile * len(numbers)
    if not 0 < quantile < 1 or rank < LEAST_RANK / epsilon:
        raise ValueError(
            f"quantile={quantile:g} of {len(numbers)} records is rank {rank:.3g}; the noise needs "
            f"at least 10 / epsilon = {LEAST_RANK / epsilon:.3g}. Use a larger quantile below 1, "
            "or a larger epsilon."
        )
    octaves = math.log2(high / low)
    candidates = [
        low * 2 ** (i / CANDIDATES_PER_OCTAVE)
        for i in range(math.floor(octaves * CANDIDATES_PER_OCTAVE) + 1)
    ]
    ordered = torch.where(numbers.isnan(), math.inf, numbers).sort().values
    below = torch.searchsorted(ordered, torch.tensor(candidates, dtype=torch.float64, device="cpu"))
    scores = [-abs(float(count) - rank) for count in below]
    seeded = noise_seed is not None
    noise = key_stream(noise_seed, "low quantile")
    with Ledger(neighboring=neighboring) as own:
        gate = SelectionGate(
            epsilon=epsilon,
            neighboring=neighboring_name(relation),
            ledger=own if ledger is None else ledger,
            noise=noise,
            label="low quantile",
        )
        chosen = candidates[gate.select(scores)]
    notes = ("seeded: not for release",) if seeded else ()
    return chosen, Guarantee(epsilon, 0.0, relation, "exponential mechanism", notes=notes)
