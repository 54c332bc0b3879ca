"""A network's fit in the part of their public range that targets take up, on one budget."""

import math
from collections.abc import Callable
from dataclasses import replace

import dp_accounting
import numpy as np
from numpy.typing import NDArray

from dpoptim.accounting.accountant import compute_epsilon
from dpoptim.accounting.guarantee import Guarantee, neighbours_differ_by
from dpoptim.accounting.ledger import Ledger
from dpoptim.estimators.persons import rows_brought
from dpoptim.estimators.target_spread import (
    ROUNDS,
    SHARE,
    WHOLE,
    can_be_narrowed,
    price_of_round,
    spread_of_targets,
)
from dpoptim.gate import FilteredGate, charged_together, event_ahead
from dpoptim.noise.stream import key_stream
from dpoptim.plan import Plan
from dpoptim.target_range import TargetRange
from dpoptim.training.batches.privacy_units import Persons

MOST_EXPONENT = 50.0  # of a plan with almost no noise


class NarrowedFit:
    """A network's fit, before which a part of its budget finds where targets lie.

    Args:
        plan: of the network.
        noise_seed: repeatable noise, for tests; None: secret.
        label: public text for the ledger's entry.

    Attributes:
        narrows: whether noise leaves something of the range to be found; else nothing is released
            for that.
        parts: the events of what is released, in turn.
    """

    def __init__(self, plan: Plan, noise_seed: int | None, label: str) -> None:
        self.plan, self._seed, self._label = plan, noise_seed, label
        # what the network's noise would come to if every step had all records
        strength = math.expm1(min(plan.noise_multiplier**-2, MOST_EXPONENT))
        whole = plan.batch_size / plan.n * math.sqrt(plan.steps * strength / (1 - SHARE))
        self._mu = price_of_round(whole)
        self._of_rounds = self._mu * math.sqrt(ROUNDS) * (1 + 1e-9)  # rounding is covered
        self.parts: list[dp_accounting.DpEvent] = [plan.event]
        self.narrows = can_be_narrowed(self._mu, plan.n, plan.neighboring)
        if self.narrows:
            differ = neighbours_differ_by(plan.neighboring)
            self.parts.insert(0, dp_accounting.GaussianDpEvent(differ / self._of_rounds))

    @property
    def event(self) -> dp_accounting.DpEvent:
        """Everything that is released."""
        return dp_accounting.ComposedDpEvent(self.parts) if self.narrows else self.plan.event

    def run(
        self,
        train: Callable[[TargetRange, Ledger | None], Guarantee],
        y: NDArray[np.float64],
        owners: Persons | None,
        ledger: Ledger | None,
    ) -> tuple[Guarantee, TargetRange]:
        """Find the range that targets take up, and train in it, in one reservation.

        Args:
            train: trains on targets scaled to a range, charged to a ledger.
            y: targets in [-1, 1], (rows,); private.
            owners: of the rows.
            ledger: where all of it is charged, once, before the first release.

        Returns:
            the guarantee of all of it, and the range.

        Raises:
            ValueError, TypeError: what ``train`` refuses, before anything is charged.

        **Guarantee.** The event's, by adaptive composition: rounds are Gaussian releases of a sum
        of bounded terms, each mu-GDP, and ``train`` is private whatever range it is given.
        """
        plan, relation = self.plan, self.plan.neighboring
        event_ahead(lambda trial: train(WHOLE, trial), relation)
        shares = None
        if owners is not None:
            coins = key_stream(self._seed, "rows of persons, range of targets")
            index, shares = rows_brought(owners, np.arange(len(owners)), coins)
            y = y[index]
        paying = charged_together(
            ledger, self.parts, neighboring=relation, label=self._label, unit=plan.unit.name
        )
        with paying as paid:
            gate = FilteredGate(
                mu=self._of_rounds,
                neighboring=relation,
                ledger=paid,
                noise=key_stream(self._seed, "range of targets"),
                label="range of targets",
            )
            part = spread_of_targets(gate, y, shares, plan.n, mu=self._mu)
            gate.finish()
            guarantee = train(part, paid)
        whole = compute_epsilon(self.event, plan.delta, relation)
        return replace(whole, unit=guarantee.unit, notes=guarantee.notes), part
