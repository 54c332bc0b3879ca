"""Choices among public candidates: one by its score, or the trials of a search."""

import os
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import dp_accounting

from dpoptim.accounting.ledger import Ledger
from dpoptim.accounting.ledger_charge import Charge
from dpoptim.errors import LedgerError, PrivacyError
from dpoptim.gate.one_process import refuse_fork
from dpoptim.noise.exponential_mechanism import exponential_choice
from dpoptim.noise.stream import KeyStream
from dpoptim.noise.trials import even_choice, logarithmic_count


class SelectionGate:
    """One choice among public candidates, by the exponential mechanism, charged before the draw.

    Args:
        epsilon: its price, > 0.
        neighboring, ledger, noise, label: as for `Gate`.
    """

    def __init__(
        self, *, epsilon: float, neighboring: str, ledger: Ledger, noise: KeyStream, label: str
    ) -> None:
        self.epsilon, self.neighboring, self.label = epsilon, neighboring, label
        # The mechanism's log-likelihood ratios span an interval of length epsilon; every such
        # mechanism is a post-processing of a randomised response that Laplace noise of scale
        # 1/epsilon dominates (Dong et al. 2020).
        self.event = dp_accounting.LaplaceDpEvent(1 / epsilon)
        self._process = os.getpid()
        self._ledger, self._noise = ledger, noise
        Charge(ledger, self.event, neighboring, label).check()

    def select(self, scores: Sequence[float]) -> int:
        """The index of a high score, with odds of exactly ``exp(epsilon score / 2)``.

        Raises:
            LedgerError: the budget does not cover it; nothing is drawn.

        **Guarantee.** epsilon-DP, if neighbouring data sets change no score by more than 1.
        """
        refuse_fork(self._process)
        charge = Charge(self._ledger, self.event, self.neighboring, self.label)
        charge.open()
        half = Fraction(self.epsilon) / 2
        chosen = exponential_choice(self._noise, [Fraction(score) * half for score in scores])
        charge.finish()
        return chosen


class _ChargeAheadError(LedgerError):
    """A fit has come as far as its charge. ``event``: what it would reserve."""

    def __init__(self, event: dp_accounting.DpEvent) -> None:
        super().__init__("a fit that was only tried was about to be charged")
        self.event = event


class _NoCharge(Ledger):
    """A ledger in memory at which every fit ends, as at one that refuses it."""

    def reserve(self, event: dp_accounting.DpEvent, **_: Any) -> Any:
        raise _ChargeAheadError(event)


def event_ahead(fit: Callable[[Ledger], Any], neighboring: str) -> Any:
    """The event that a fit would reserve; None if it ends without. It is run as far as that.

    Args:
        fit: trains, charged to the ledger that it is given.

    Raises:
        ValueError, TypeError: what the fit refuses.

    **Guarantee.** Nothing is drawn, charged or learnt: the fit ends where it would reserve.
    """
    with _NoCharge(neighboring=neighboring) as ledger:
        try:
            fit(ledger)
        except _ChargeAheadError as reached:
            return reached.event
    return None


class TrialsGate:
    """A search charged as one event before the first of its trials; see `dpoptim.tuning`.

    Args:
        event, neighboring, ledger, noise, label: as for `Gate`; a ``RepeatAndSelectDpEvent`` of
            shape 0.
    """

    def __init__(
        self, *, event: Any, neighboring: str, ledger: Ledger, noise: KeyStream, label: str
    ) -> None:
        self.event, self._noise, self._process = event, noise, os.getpid()
        self._charge = Charge(ledger, event, neighboring, label)
        self._charge.check()

    def rehearse(self, fit: Callable[[Ledger], Any]) -> None:
        """Run a trial's fit as far as its charge, where all that can be refused has been.

        Args:
            fit: trains, charged to the ledger that it is given.

        Raises:
            ValueError, TypeError: what the fit refuses. PrivacyError: it would release something
                else than one Gaussian of the search's event.

        **Guarantee.** Nothing is drawn, charged or learnt: the fit ends where it would reserve.
        """
        trial = self.event.event
        found = event_ahead(fit, self._charge.neighboring)
        if not (
            isinstance(found, dp_accounting.GaussianDpEvent)
            and found.noise_multiplier >= trial.noise_multiplier
        ):
            raise PrivacyError(
                f"a trial of this search is paid for as {trial}, and this fit would be {found}. "
                "Fix: DPLogisticRegression or DPLinearRegression, as they are."
            )

    def draw(self, candidates: int) -> list[int]:
        """Draw which candidates to try: as many as the event says, each evenly."""
        refuse_fork(self._process)
        self._charge.open()
        count = logarithmic_count(self._noise, self.event.mean)
        return [even_choice(self._noise, candidates) for _ in range(count)]

    def finish(self) -> None:
        """Mark the search as completed; see `Gate.finish`."""
        self._charge.finish()
