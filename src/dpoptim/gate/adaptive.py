"""Releases whose noise is chosen on the way, within a budget that was fixed beforehand."""

import math
import os
from collections.abc import Sequence
from fractions import Fraction

import dp_accounting
from torch import Tensor

from dpoptim.accounting.filters import GaussianFilter, selection_mu
from dpoptim.accounting.guarantee import neighbours_differ_by
from dpoptim.accounting.ledger import Ledger, Reservation
from dpoptim.accounting.ledger_charge import Charge
from dpoptim.errors import LedgerError, PrivacyError
from dpoptim.gate.one_process import refuse_fork
from dpoptim.noise.exponential_mechanism import exponential_choice
from dpoptim.noise.gaussian import add_normal
from dpoptim.noise.stream import KeyStream

# covers what `accurate_norm` rounds, up to 2^31 records of the bound's norm
NORM_ROUNDING = 1 + 2.0**-20
WORTH_RETURNING = 0.999  # of a filter's mu: who has spent more has spent it all, but for rounding


def accurate_norm(total: Tensor) -> float:
    """Euclidean norm of a float64 tensor, to 2^-52 of it, whatever its length and scale."""
    # so that no square leaves float64
    exponent = min(max(math.frexp(float(total.abs().max()))[1], -1000), 1000)
    scaled = total * 2.0**-exponent
    return math.sqrt(math.fsum(scaled.square().flatten().tolist())) * 2.0**exponent


class FilteredGate:
    """Releases whose noise may depend on earlier ones, within a mu-GDP budget fixed beforehand.

    The whole budget is reserved before the first release; a filter is asked before every one. The
    run's guarantee is of all of it, since where a run stops may have been read off its outputs;
    what it has not spent `finish` leaves to the ledger's budget.

    Args:
        mu: the budget, > 0.
        neighboring: the relation of the guarantee, by name.
        ledger, noise, label: as for `Gate`.
    """

    def __init__(
        self, *, mu: float, neighboring: str, ledger: Ledger, noise: KeyStream, label: str
    ) -> None:
        self.filter = GaussianFilter(mu)
        self.neighboring, self.label = neighboring, label
        self.neighbours_differ_by = neighbours_differ_by(neighboring)  # in norm bounds
        self.event = dp_accounting.GaussianDpEvent(self.neighbours_differ_by / mu)
        self._process, self._released, self._ended = os.getpid(), 0, False
        self._charge, self._noise = Charge(ledger, self.event, neighboring, label), noise
        self._charge.check()

    @property
    def reservation(self) -> Reservation | None:
        """The run's entry in the ledger; None before the first release."""
        return self._charge.reservation

    def release_sum(self, total: Tensor, *, norm_bound: float, mu: float) -> Tensor:
        """Release ``total`` (float64) with Gaussian noise of std `deviation`, at the price ``mu``.

        Raises:
            PrivacyError: the filter does not admit it; nothing is drawn.
            LedgerError: the reservation was refused or could not be written; nothing is drawn.

        **Guarantee.** mu-GDP, if one record adds at most ``norm_bound`` to the sum, in Euclidean
        norm.
        """
        self._pay(mu)
        released = total.clone()
        add_normal(self._noise, released, self.deviation(norm_bound, mu))
        return released

    def release_norm(self, total: Tensor, *, norm_bound: float, mu: float) -> float:
        """Release the norm of ``total`` with Gaussian noise, maybe negative; else as `release_sum`.

        **Guarantee.** mu-GDP under the same condition, by the triangle inequality. Rounding is
        covered up to a total of 2^31 bounds; the condition is on what is passed, with whatever was
        rounded in adding it up.
        """
        norm = total.new_tensor([accurate_norm(total)])
        return float(self.release_sum(norm, norm_bound=norm_bound * NORM_ROUNDING, mu=mu))

    def select(self, scores: Sequence[float], *, norm_bound: float, epsilon: float) -> int:
        """Choose a high score's index by the exponential mechanism, for `filters.selection_mu`.

        **Guarantee.** epsilon-DP, if every score is plus or minus the `accurate_norm` of a sum to
        which one record adds at most ``norm_bound`` in Euclidean norm.
        """
        return self.select_in_parts([scores], norm_bound=norm_bound, epsilon=epsilon)[0]

    def select_in_parts(
        self,
        parts: Sequence[Sequence[float]],
        *,
        norm_bound: float,
        epsilon: float,
        touched: int = 1,
    ) -> list[int]:
        """Choose as `select` does in each of several parts of the records.

        Args:
            parts: scores of each part, of which its own records alone have moved any.
            touched: in how many parts one record moves scores, at most.

        **Guarantee.** Each choice as for `select`; all together cost as much as ``touched`` of
        them: the others are the same for both neighbours, and drawn independently.
        """
        self._pay(selection_mu(epsilon) * math.sqrt(min(touched, len(parts))))
        scale = 2 * self.neighbours_differ_by * norm_bound * NORM_ROUNDING / epsilon
        found = []
        for scores in parts:
            exact = {score: Fraction(score) / Fraction(scale) for score in set(scores)}
            found.append(exponential_choice(self._noise, [exact[score] for score in scores]))
        return found

    def deviation(self, norm_bound: float, mu: float) -> float:
        """Standard deviation of the noise on a sum of this norm bound and price; rounded up."""
        return self.neighbours_differ_by * norm_bound / mu * (1 + 2.0**-40)

    def open(self, mu: float) -> None:
        """Reserve the budget for a release at this price, before a sum leaves its process.

        Raises:
            PrivacyError: the filter does not admit it. LedgerError: nor does the ledger.
        """
        refuse_fork(self._process)
        if self._ended:
            raise PrivacyError(
                "this run is over, and what it had not spent may be another's by now. Fix: start a "
                "new run, with a budget of its own."
            )
        if not self.filter.ask(mu):
            self.filter.charge(mu)  # says why not
        self._charge.open()

    def count(self, mu: float) -> None:
        """Count the price of a release that another process of this run makes."""
        self.filter.charge(mu)
        self._released += 1

    def _pay(self, mu: float) -> None:
        self.open(mu)
        self.count(mu)

    def finish(self) -> None:
        """Mark the run as completed, see `Gate.finish`; give what is left back to the budget.

        **Guarantee.** The budget's still holds ("Giving back" in `accounting.budget`): every
        release here is a mechanism of its own, with fresh noise, whose divergence is at most that
        of a Gaussian of its price, so all of them have at most that of one Gaussian of what the
        filter has charged. The run's own guarantee stays that of its whole budget.
        """
        spent = self.filter.spent
        if not 0 < spent < WORTH_RETURNING * self.filter.mu or (
            self._charge.why_nothing_is_returned()
        ):
            self._charge.finish()
            return
        refuse_fork(self._process)  # another process may go on releasing
        self._ended = True
        part = dp_accounting.GaussianDpEvent(self.neighbours_differ_by / spent * (1 - 2.0**-40))
        try:
            self._charge.end(lambda begun, repeated: part, self._released)
        except LedgerError:  # no reason to lose the results: the whole stays charged
            self._charge.finish()
