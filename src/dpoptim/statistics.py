"""Released statistics of private records: bounded sums and counts as one Gaussian vector."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self, TypedDict

import dp_accounting
import numpy as np
import torch
from numpy.typing import NDArray

from dpoptim.accounting.accountant import check_delta, compute_epsilon
from dpoptim.accounting.gaussian import gdp_mu
from dpoptim.accounting.guarantee import (
    SEEDED,
    Guarantee,
    neighboring_name,
    neighbours_differ_by,
    parse_neighboring,
)
from dpoptim.accounting.ledger import Ledger
from dpoptim.accounting.public_numbers import public_number_of_records, stated_delta
from dpoptim.arguments import positive_number, real_number
from dpoptim.data.sparse_rows import SparseRows
from dpoptim.gate import FilteredGate
from dpoptim.gate.one_process import refuse_other_ranks
from dpoptim.noise.stream import key_stream

Floats = NDArray[np.float64]
IN_CACHE = 1 << 15  # numbers taken at a time
GRID = 2.0**26  # steps in a norm bound; sums of up to 2^27 records are exact


@dataclass(frozen=True)
class NoisySum:
    """A released vector; public.

    Attributes:
        values: float64, shape (k,).
        deviation: standard deviation of the noise in every entry.
        guarantee: of the release, at the delta that was asked for.
    """

    values: Floats
    deviation: float
    guarantee: Guarantee


class Terms(TypedDict):
    """Keyword arguments of `release_sum` and `quantiles.select_tails`; see there."""

    mu: float
    delta: float
    neighboring: str
    label: str
    ledger: Ledger | None
    noise_seed: int | None


def release_sum(
    total: Floats | Callable[[], Floats],
    *,
    norm_bound: float,
    mu: float,
    delta: float,
    neighboring: str,
    label: str,
    ledger: Ledger | None = None,
    noise_seed: int | None = None,
) -> NoisySum:
    """``total`` with Gaussian noise of std ``norm_bound / mu`` (twice under replace-one).

    Args:
        total: a sum over records, float64, shape (k,); private. Or a function that fetches it from
            other processes, called once the budget is reserved.
        norm_bound: how much one record adds at most, in Euclidean norm.
        mu: the price, of Gaussian differential privacy; > 0.
        delta: where the guarantee is stated.
        neighboring: the relation, by name.
        label: public text for the ledger's entry.
        ledger: where it is charged; None: nowhere.
        noise_seed: repeatable noise, for tests; the guarantee then says that it is not for release.

    Raises:
        LedgerError: the budget does not admit it; nothing is drawn. RankError: several processes
            call it, and would each draw and charge.

    **Guarantee.** mu-GDP, charged before the noise is drawn.
    """
    mu, delta = positive_number("mu", mu), check_delta(delta)
    with paid_gate(mu, neighboring, label=label, ledger=ledger, noise_seed=noise_seed) as gate:
        gate.open(mu)
        fetched = total() if callable(total) else total
        noisy = noisy_sum(gate, fetched, norm_bound=norm_bound, mu=mu)
    return NoisySum(
        noisy, gate.deviation(norm_bound, mu), guarantee_of(gate, delta, noise_seed=noise_seed)
    )


@contextmanager
def paid_gate(
    mu: float, neighboring: str, *, label: str, ledger: Ledger | None, noise_seed: int | None
) -> Iterator[FilteredGate]:
    """A gate for releases that cost at most ``mu`` together; arguments as for `release_sum`.

    Raises:
        RankError: several processes call it. LedgerError: as the ledger has it.

    **Guarantee.** mu-GDP, also where a release depends on what was released before.
    """
    refuse_other_ranks(label, ledger)
    relation = neighboring_name(parse_neighboring(neighboring))
    with Ledger(neighboring=relation) as own:
        gate = FilteredGate(
            mu=mu,
            neighboring=relation,
            ledger=own if ledger is None else ledger,
            noise=key_stream(noise_seed, label),
            label=label,
        )
        yield gate
        gate.finish()


def noisy_sum(gate: FilteredGate, total: Floats, *, norm_bound: float, mu: float) -> Floats:
    """Release a sum through ``gate``, as an array."""
    private = torch.from_numpy(np.array(total, dtype=np.float64))
    return gate.release_sum(private, norm_bound=norm_bound, mu=mu).numpy()


def guarantee_of(gate: FilteredGate, delta: float, *, noise_seed: int | None) -> Guarantee:
    """The cost of all releases of a gate, with a note if they are seeded."""
    found = compute_epsilon(gate.event, delta, gate.neighboring)
    return replace(found, notes=() if noise_seed is None else (SEEDED,))


def ask_first(ledger: Ledger | None, *, epsilon: float, delta: float, neighboring: str) -> None:
    """Raise, before any record is read, what `release_sum` would raise; nothing is charged.

    Raises:
        LedgerError: the budget does not admit it. ValueError: a setting out of range.
    """
    mu, relation = price_of(epsilon, delta), neighboring_name(parse_neighboring(neighboring))
    if ledger is not None:
        ledger.check(dp_accounting.GaussianDpEvent(neighbours_differ_by(relation) / mu), relation)


def price_of(epsilon: float, delta: float) -> float:
    """mu of Gaussian differential privacy that (epsilon, delta) buys, rounded down."""
    return gdp_mu(positive_number("epsilon", epsilon), check_delta(delta)) * (1 - 1e-12)


class Price(NamedTuple):
    """Price of a release on records.

    Attributes:
        n: number of records, public.
        mu: of Gaussian differential privacy.
        delta: where it is stated. said: what must be said of it.
    """

    n: int
    mu: float
    delta: float
    said: tuple[str, ...]

    @classmethod
    def of(cls, rows: int, *, epsilon: float, delta: Any, neighboring: str, n: int | None) -> Self:
        """Args: rows: of the table, private where n must be given. delta: as `stated_delta`'s."""
        n = public_number_of_records(n, rows, neighboring)
        delta, said = stated_delta(delta, n, epsilon=epsilon)
        return cls(n, price_of(real_number("epsilon", epsilon), delta), delta, said)

    def noted(self, guarantee: Guarantee) -> Guarantee:
        """The guarantee of the release, with what must be said of its price."""
        return replace(guarantee, notes=(*guarantee.notes, *self.said))


class Rows(Protocol):
    """An array of shape (n, k), or what makes one of each slice of rows."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice) -> Floats: ...


def bounded_sum(rows: Rows, norm_bound: float) -> Floats:
    """The sum of ``rows`` (n, k), each cut to ``norm_bound``; float64, (k,). Private.

    A row that is not finite counts as zero.

    **Guarantee.** A record adds at most ``norm_bound (1 + 2^-40)`` in Euclidean norm, rounding
    included: every entry is cut towards zero to a multiple of ``norm_bound / GRID``, and whole
    numbers add up exactly, in any order and whoever else is there, for up to 2^27 records.
    """
    total = np.zeros(rows.shape[1], dtype=np.int64)
    step = max(1, IN_CACHE // rows.shape[1])
    for start in range(0, len(rows), step):
        part = np.array(rows[start : start + step], dtype=np.float64)
        with np.errstate(all="ignore"):  # a warning would tell of a record
            part /= norm_bound
            finite = np.isfinite(part)
            if not finite.all():
                part[~finite.all(1)] = 0.0
            # so that no square leaves float64
            largest = np.maximum(part.max(1, initial=1.0), -part.min(1, initial=-1.0))[:, None]
            scaled = part if (largest == 1.0).all() else part / largest
            length = largest[:, 0] * np.sqrt(np.square(scaled).sum(1))
            part *= (1 / np.maximum(length, 1.0))[:, None]
            part *= GRID
            total += part.astype(np.int64).sum(0)  # which cuts towards zero
    return total.astype(np.float64) * (norm_bound / GRID)


class Cells(Protocol):
    """Numbers that each value of a table adds by itself: k of them, (k, *values.shape)."""

    def __call__(self, values: Floats, columns: Any) -> Floats:
        """Args: columns: that the values are in, of their shape, or ``...`` for (rows, columns)."""


def sum_of_cells(table: Any, cells: Cells, norm_bound: float) -> Floats:
    """The sum of what all values of a table add; float64, (k, columns). Private.

    Args:
        table: an array of shape (n, columns), or `SparseRows`, of which only the entries are
            looked at: a column's zeros all add the same.
        norm_bound: of a row. What one value adds is cut to a share ``norm_bound / sqrt(columns)``
            of it; one that is not finite adds zeros.

    **Guarantee.** A record adds at most ``norm_bound (1 + 2^-40)`` in Euclidean norm, rounding
    included: its values' vectors stand at right angles, each is cut towards zero to multiples of
    ``norm_bound / GRID``, and whole numbers add up exactly, for up to 2^27 records. So the sum is
    the same in any order, of a sparse table and of the dense one.
    """
    n, width = table.shape

    def steps(values: Floats, columns: Any) -> NDArray[np.int64]:
        with np.errstate(all="ignore"):  # a warning would tell of a record
            parts = cells(values, columns) / norm_bound
            finite = np.isfinite(parts)
            if not finite.all():
                parts[:, ~finite.all(0)] = 0.0
            length = np.sqrt(np.square(parts).sum(0) * width)
            if (length > 1.0).any():
                parts /= np.maximum(length, 1.0)
            parts *= GRID
            return parts.astype(np.int64)  # which cuts towards zero

    nothing = steps(np.zeros((1, width)), ...)[:, 0]
    total = np.zeros_like(nothing)
    if isinstance(table, SparseRows):
        total += n * nothing
        for values, columns in table.entries():
            added = steps(values, columns) - nothing[:, columns]
            for part, numbers in zip(total, added, strict=True):
                np.add.at(part, columns, numbers)
    else:
        step = max(1, IN_CACHE // width)
        for start in range(0, n, step):
            total += steps(table[start : start + step], ...).sum(1)
    return total.astype(np.float64) * (norm_bound / GRID)


BOUND_ROUNDING = 1 + 2.0**-40
SURE = 5.0  # standard deviations of noise


def warn_of_other_labels(known: float, deviation: float, n: int) -> None:
    """Warn that most labels are no classes, where a noisy count says so.

    Args:
        known: records whose labels are classes, as released, with noise of this deviation.
        n: of all records, public.

    **Guarantee.** A post-processing of a release: it looks at no record.
    """
    if known + SURE * deviation < n / 2:
        warnings.warn(
            "labels of fewer than half of the n records are classes, by the noisy counts, and "
            "others add nothing. Fix: classes= of the labels' own kind, such as texts for texts.",
            stacklevel=3,
        )


def histogram_bound(neighboring: str) -> float:
    """Norm bound of a histogram to which every record adds 1 in one bin at most.

    Under replace-one a record moves from one bin to another, sqrt 2 and not twice its own norm;
    the gate takes twice the bound for it.
    """
    return math.sqrt(2) / 2 if neighboring == "replace-one" else 1.0
