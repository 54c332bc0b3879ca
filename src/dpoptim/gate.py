"""The gate: the one place that adds privacy noise, and that charges for it.

Left of it everything is private; what it releases may be logged, plotted and saved. It reserves the whole run in the
ledger before the first noisy sum exists, so a crash can only count too much.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import dp_accounting
from torch import Tensor

from dpoptim.accounting.ledger import Ledger, LedgerError, Reservation
from dpoptim.errors import PrivacyError
from dpoptim.noise.gaussian import add_normal
from dpoptim.noise.stream import KeyStream


@dataclass(frozen=True)
class GaussianSum:
    """A sum over records, each bounded by ``norm_bound``, released with noise of std noise_multiplier * norm_bound."""

    norm_bound: float
    noise_multiplier: float


class Gate:
    """Releases the planned queries of one run, and no others.

    Args:
        event: the whole run's event: what is reserved.
        neighboring: the relation of the guarantee, by name.
        query: the kind of sum that each step releases.
        releases: how many of them the event pays for.
        ledger: where the run is charged; None only for a run without noise, which promises nothing.
        noise: the stream that the noise comes from.
        label: public text for the ledger's entry.
    """

    def __init__(
        self,
        *,
        event: dp_accounting.DpEvent,
        neighboring: str,
        query: GaussianSum,
        releases: int,
        ledger: Ledger | None,
        noise: KeyStream,
        label: str,
    ) -> None:
        if ledger is None and query.noise_multiplier > 0:
            raise ValueError("ledger is missing; only a run without noise, which promises nothing, has none.")
        self.event, self.neighboring, self.query = event, neighboring, query
        self.releases, self.label = releases, label
        self.released = 0
        self.reservation: Reservation | None = None
        self._ledger, self._noise = ledger, noise
        if ledger is not None:
            ledger.check(event, neighboring)  # refuse before any work is done; the reservation itself decides

    def open(self) -> None:
        """Reserve the run. Called by the first release; a refusal leaves nothing released."""
        if self._ledger is not None and self.reservation is None:
            self.reservation = self._ledger.reserve(self.event, neighboring=self.neighboring, label=self.label)

    def release_sum(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """Add fresh Gaussian noise to every entry of ``sums`` (float64, any shapes), in place, and return them.

        The tensors together are one query: their joint Euclidean norm must be bounded record by record.

        Raises:
            PrivacyError: every planned release has been made.
            LedgerError: the budget does not cover the run, or the ledger cannot be written.

        **Guarantee.** If two neighbouring data sets give sums at most ``norm_bound`` apart (twice that under
        replace-one), what is returned is that step of the reserved event. The reservation was on disk before.
        """
        if self.released >= self.releases:
            raise PrivacyError(
                f"all {self.releases} planned noisy sums have been released. Fix: make a plan with more steps."
            )
        self.open()
        self.released += 1
        standard_deviation = self.query.noise_multiplier * self.query.norm_bound
        if self.query.noise_multiplier > 0:
            for total in sums:
                add_normal(self._noise, total, standard_deviation)
        return list(sums)

    def finish(self) -> None:
        """Mark the run as completed. It counts in full either way, so a failure here is no reason to lose its results."""
        if self._ledger is None or self.reservation is None:
            return
        try:
            self._ledger.commit(self.reservation)
        except LedgerError as error:
            warnings.warn(f"the run is charged, but could not be marked as completed: {error}", RuntimeWarning, stacklevel=3)
