"""The gate: the one place that adds privacy noise, and that charges for it.

Before it everything is private; what it releases may be logged, plotted and saved. It reserves
the whole run in the ledger before the first noisy sum exists, so a crash can only count too much.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import dp_accounting
from torch import Tensor

from dpoptim.accounting.filters import GaussianFilter, selection_mu
from dpoptim.accounting.ledger import Ledger, Reservation
from dpoptim.accounting.ledger_charge import Charge, PartOf
from dpoptim.errors import PrivacyError
from dpoptim.noise.choice import exponential_choice
from dpoptim.noise.correlated.increments import increment_std
from dpoptim.noise.correlated.strategy import NoiseState, Strategy
from dpoptim.noise.gaussian import add_normal
from dpoptim.noise.stream import KeyStream
from dpoptim.noise.trials import even_choice, logarithmic_count


@dataclass(frozen=True)
class GaussianSum:
    """The sums of a run, each with independent noise of std ``noise_multiplier * norm_bound`` in
    every entry.

    ``norm_bound`` bounds a record's part of each sum; or, where one record may move many sums, the
    root of all its squared shifts on every path, so that the run is one Gaussian of the noise
    multiplier.

    ``scales``: of the noise in each step, over that; empty: 1 in all of them.
    """

    norm_bound: float
    noise_multiplier: float
    scales: tuple[float, ...] = ()

    @property
    def standard_deviation(self) -> float:
        """Standard deviation of the noise in every entry of a step whose scale is 1; 0 without
        noise.
        """
        return self.noise_multiplier * self.norm_bound if self.noise_multiplier > 0 else 0.0

    def deviation(self, step: int) -> float:
        """Standard deviation of the noise in every entry of a step, counted from 0."""
        return self.standard_deviation * (self.scales[step] if self.scales else 1.0)

    def released_deviation(self, step: int) -> float:
        """The same: what is released has the noise that was drawn."""
        return self.deviation(step)


@dataclass(frozen=True)
class CorrelatedSum:
    """The sums of a run, as `GaussianSum`, but with noise that later steps take back: for whoever
    adds the sums up.

    All steps together are **one** ``Gaussian(noise_multiplier)`` event, if one record takes part
    in at most ``participations`` of them, any two at least ``separation`` steps apart (None:
    nothing is known); ``regular``: exactly in every ``separation``-th step from some step on.
    """

    norm_bound: float
    noise_multiplier: float
    strategy: Strategy
    steps: int
    participations: int = 1
    separation: int | None = None
    regular: bool = False

    @property
    def event(self) -> dp_accounting.DpEvent:
        """What the whole run costs."""
        return dp_accounting.GaussianDpEvent(self.noise_multiplier)

    @cached_property
    def sensitivity(self) -> float:
        """Of the strategy's output to one record, in norm bounds."""
        return self.strategy.sensitivity(
            self.steps, self.participations, self.separation, regular=self.regular
        )

    @property
    def standard_deviation(self) -> float:
        """Of the entries of z, from which the strategy makes the noise; see
        `noise.correlated.strategy`.
        """
        return self.noise_multiplier * self.norm_bound * self.sensitivity

    def released_deviation(self, step: int) -> float:
        """Standard deviation of the noise in every entry of what a step releases; ``nan`` if it is
        not known.
        """
        if self.noise_multiplier == 0:
            return 0.0
        return self.standard_deviation * increment_std(self.strategy, self.steps, step)


Query = GaussianSum | CorrelatedSum


class Gate:
    """Releases the planned queries of one run, and no others.

    Args:
        event: the whole run's event: what is reserved.
        neighboring: the relation of the guarantee, by name.
        query: the kind of sum that each step releases.
        releases: how many of them the event pays for.
        ledger: where the run is charged; None only for a run without noise, which promises
            nothing.
        noise: the stream that the noise comes from.
        label: public text for the ledger's entry.
        resume: what `secret_state` returned for the part of the run that is over; independent
            noise comes from ``noise``.
        checkpoint: SHA-256 of the checkpoint that held it; the ledger must have been told of it.
        part_of: what the first releases of the run cost, and those that were made twice; see
            `Plan.event_of_part`. None: only the whole run has a price.

    Raises:
        LedgerError: the budget does not cover the run; or the run to go on was completed, or did
            not save this checkpoint.
        ValueError: ``resume`` counts releases that the run does not have.

    **Guarantee** (with ``resume``). The releases before and from now on are together one run of
    the event, on the reservation that it has; in another ledger it is reserved anew. What was
    released in between, and is now done again, must not have been looked at; the ledger shows how
    many releases that may be. With its last planned release a run is completed: no checkpoint of
    it goes on.
    """

    def __init__(
        self,
        *,
        event: dp_accounting.DpEvent,
        neighboring: str,
        query: Query,
        releases: int,
        ledger: Ledger | None,
        noise: KeyStream,
        label: str,
        resume: dict[str, Any] | None = None,
        checkpoint: str = "",
        part_of: PartOf | None = None,
    ) -> None:
        if ledger is None and query.noise_multiplier > 0:
            raise ValueError(
                "ledger is missing; only a run without noise, which promises nothing, has none."
            )
        if isinstance(query, CorrelatedSum) and releases > query.steps:
            raise ValueError(
                f"releases={releases} is more than the {query.steps} steps that the "
                "query's noise is made for."
            )
        self.event, self.neighboring, self.query = event, neighboring, query
        self.releases, self.label = releases, label
        self.released = 0
        self.ended = False
        self._begun = 0  # draws of noise along the run, interrupted ones included
        self._returning = False  # closed, and the ledger does not know it yet
        self._part_of = part_of or (lambda released, repeated: event)
        self._process = os.getpid()
        self._charge = Charge(ledger, event, neighboring, label)
        self._noise = noise
        self._correlated: NoiseState | None = None
        if resume is not None:
            self._restore(resume, checkpoint)
        if self.released < releases:
            self._charge.check()

    @property
    def reservation(self) -> Reservation | None:
        """The run's entry in the ledger; None before the first release, or without noise."""
        return self._charge.reservation

    def open(self) -> None:
        """Reserve the run, or take its reservation up again. Called by the first release; a
        refusal releases nothing.
        """
        refuse_fork(self._process)
        self._charge.open()

    def release_sum(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """Add fresh Gaussian noise to every entry of ``sums`` (float64, any shapes), in place, and
        return them.

        The tensors together are one query: their joint Euclidean norm must be bounded record by
        record.

        Raises:
            PrivacyError: every planned release has been made.
            LedgerError: the budget does not cover the run, or the ledger cannot be written.

        **Guarantee.** If two neighbouring data sets give sums at most ``norm_bound`` apart (twice
        that under replace-one), what is returned is that step of the reserved event. The
        reservation was on disk before.
        """
        if self.released >= self.releases:
            raise PrivacyError(
                f"all {self.releases} planned noisy sums have been released. Fix: make a plan "
                "with more steps."
            )
        self.open()
        self._charge.announce(self._begun, self.releases)
        self._begun += 1  # first: what was drawn can never be given back
        if self.query.noise_multiplier > 0:
            self._add_noise(sums)
        self.released += 1  # a draw that is interrupted has released nothing
        if self.released == self.releases:
            # before anybody sees the last one: no checkpoint may be taken up after it
            self.finish()
        return list(sums)

    def _add_noise(self, sums: Sequence[Tensor]) -> None:
        query = self.query
        if isinstance(query, CorrelatedSum):
            if self._correlated is None:
                self._correlated = query.strategy.start(
                    query.steps, [total.numel() for total in sums], self._noise
                )
            self._correlated.add(sums, query.standard_deviation)
            return
        for total in sums:
            add_normal(self._noise, total, query.deviation(self.released))

    def secret_state(self) -> dict[str, Any]:
        """For a checkpoint: the releases so far, the reservation that pays for them, and
        correlated noise. Secret.
        """
        return {
            "released": self.released,
            "reservation": self._charge.secret_id,
            "correlated": None if self._correlated is None else self._correlated.secret_state(),
        }

    def note_checkpoint(self, digest: str) -> None:
        """Tell the ledger of a checkpoint with this SHA-256, before it is written. LedgerError if
        that fails; PrivacyError in a forked process, which does not know how far the run has come.
        """
        refuse_fork(self._process)
        if self.released < self.releases:
            self._charge.note_checkpoint(self.released, self._begun, digest)

    def _restore(self, secret: dict[str, Any], checkpoint: str) -> None:
        released, correlated = secret["released"], secret["correlated"]
        if type(released) is not int or not 0 <= released <= self.releases:
            raise ValueError(
                f"resume: the checkpoint counts {released!r} releases of {self.releases} planned "
                "ones; it was changed. "
                "Fix: give it as private.save(path) wrote it."
            )
        if isinstance(self.query, CorrelatedSum) and correlated is not None:
            self._correlated = self.query.strategy.start(
                self.query.steps, correlated["sizes"], self._noise
            )
            self._correlated.restore(correlated)
        self.released = self._begun = released
        if released < self.releases:
            self._charge.take_up(secret["reservation"], released, checkpoint)

    def reenter(self) -> None:
        """Go on after `finish`, with the releases that remain of the same event. The caller has
        kept everything else that a checkpoint would hold.

        Raises:
            PrivacyError: none remains, or this is a forked process.
            LedgerError: the ledger cannot be written.
        """
        refuse_fork(self._process)
        if self.released >= self.releases:
            raise PrivacyError(
                f"all {self.releases} planned steps are done, so the run cannot be entered again. "
                "Fix: a new plan, which is a charge of its own."
            )
        self._charge.reenter()

    def finish(self) -> None:
        """Mark the run as completed. It counts in full either way, so a failure here is no reason
        to lose its results.
        """
        self._charge.finish()

    @property
    def why_nothing_is_returned(self) -> str:
        """Why the ledger's budget gets nothing back when the run ends early; "" if it does.
        Public.
        """
        if self._part_of(0, 0) == self.event:
            return "its steps share their noise or their charge, so only the whole run has a price"
        return self._charge.why_nothing_is_returned()

    def close(self) -> None:
        """Release nothing more, whatever the plan says."""
        refuse_fork(self._process)
        self.releases, self.ended = self.released, True

    def give_back(self, most: Callable[[int], int] = lambda begun: begun) -> None:
        """Release nothing more, and leave to the ledger's budget what the run has not released.

        Args:
            most: of the sums that were begun here and in the processes that train with this one.

        Raises:
            LedgerError: nothing can be given back; the run is over, and charged in full. Where the
                ledger could not be written, this may be called again.

        **Guarantee.** Every draw of noise that was begun on this reservation, here or by whoever
        held it before, stays charged to the budget: this gate is closed first, and the ledger lets
        nobody else go on. When to call it may depend on all that was released ("Giving back" in
        `dpoptim.accounting.budget`). A kill at any moment leaves the run charged in full, or ended.
        """
        self._returning = self._returning or self.released < self.releases
        self.close()
        begun = most(self._begun)
        if self._returning:
            self._charge.end(self._part_of, begun)
            self._returning = False


def refuse_fork(process: int) -> None:
    """Releases go on in the process that began them: a forked one would release more on the same
    charge.
    """
    if os.getpid() != process:
        raise PrivacyError(
            "a run was taken over by a forked process: both would release its sums, on one "
            "charge. Fix: start it in the "
            "process that trains."
        )


# covers what `accurate_norm` rounds, up to 2^31 records of the bound's norm
NORM_ROUNDING = 1 + 2.0**-20


def accurate_norm(total: Tensor) -> float:
    """Euclidean norm of a float64 tensor, to 2^-52 of its value however many entries there are,
    and of whatever size.
    """
    # so that no square leaves float64
    exponent = min(max(math.frexp(float(total.abs().max()))[1], -1000), 1000)
    scaled = total * 2.0**-exponent
    return math.sqrt(math.fsum(scaled.square().flatten().tolist())) * 2.0**exponent


class FilteredGate:
    """Releases whose noise may depend on what was released before, within a budget of mu-GDP fixed
    beforehand.

    The whole budget is reserved before the first release; a filter is asked before every one. What
    is not spent stays reserved: where a run stops may have been read off its outputs.

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
        self.neighbours_differ_by = 2.0 if neighboring == "replace-one" else 1.0  # in norm bounds
        self.event = dp_accounting.GaussianDpEvent(self.neighbours_differ_by / mu)
        self._process = os.getpid()
        self._charge, self._noise = Charge(ledger, self.event, neighboring, label), noise
        self._charge.check()

    @property
    def reservation(self) -> Reservation | None:
        """The run's entry in the ledger; None before the first release."""
        return self._charge.reservation

    def release_sum(self, total: Tensor, *, norm_bound: float, mu: float) -> Tensor:
        """``total`` (float64) with Gaussian noise of standard deviation `deviation`, at the price
        ``mu``.

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
        """The Euclidean norm of ``total`` with Gaussian noise; may be negative. Errors and price
        as for `release_sum`.

        **Guarantee.** mu-GDP under the same condition, by the triangle inequality. Rounding is
        covered up to a total of 2^31 bounds; the condition is on what is passed, with whatever was
        rounded in adding it up.
        """
        norm = total.new_tensor([accurate_norm(total)])
        return float(self.release_sum(norm, norm_bound=norm_bound * NORM_ROUNDING, mu=mu))

    def select(self, scores: Sequence[float], *, norm_bound: float, epsilon: float) -> int:
        """The index of a high score: the exponential mechanism, drawn exactly. Price:
        `filters.selection_mu`.

        **Guarantee.** epsilon-DP, if every score is plus or minus the `accurate_norm` of a sum to
        which one record adds at most ``norm_bound`` in Euclidean norm.
        """
        self._pay(selection_mu(epsilon))
        scale = 2 * self.neighbours_differ_by * norm_bound * NORM_ROUNDING / epsilon
        return exponential_choice(
            self._noise, [Fraction(score) / Fraction(scale) for score in scores]
        )

    def deviation(self, norm_bound: float, mu: float) -> float:
        """Standard deviation of the noise on a sum with this norm bound, at this price; rounded
        up.
        """
        return self.neighbours_differ_by * norm_bound / mu * (1 + 2.0**-40)

    def open(self, mu: float) -> None:
        """Reserve the budget, if it is not yet, for a release at this price: before a sum leaves
        the process that made it.

        Raises:
            PrivacyError: the filter does not admit it. LedgerError: nor does the ledger.
        """
        refuse_fork(self._process)
        if not self.filter.ask(mu):
            self.filter.charge(mu)  # says why not
        self._charge.open()

    def count(self, mu: float) -> None:
        """Count the price of a release that another process of this run makes."""
        self.filter.charge(mu)

    def _pay(self, mu: float) -> None:
        self.open(mu)
        self.filter.charge(mu)

    def finish(self) -> None:
        """Mark the run as completed; see `Gate.finish`."""
        self._charge.finish()


class SelectionGate:
    """One choice among public candidates, by the exponential mechanism; charged before it is
    drawn.

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


class TrialsGate:
    """A search whose trials are charged as one event before the first of them; see
    `dpoptim.tuning`.

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

    def draw(self, candidates: int) -> list[int]:
        """Which of the candidates to try, one after the other: as many as the event says, each
        drawn evenly.
        """
        refuse_fork(self._process)
        self._charge.open()
        count = logarithmic_count(self._noise, self.event.mean)
        return [even_choice(self._noise, candidates) for _ in range(count)]

    def finish(self) -> None:
        """Mark the search as completed; see `Gate.finish`."""
        self._charge.finish()
