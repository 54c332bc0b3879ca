"""Budgets that admit runs, each of which may be planned after seeing the earlier ones.

Adding up runs by PLD is a theorem only if all their parameters were fixed beforehand. A ledger
cannot know that, so a budget is kept by a *privacy filter*: a rule, fixed when the ledger is made,
that stops before the sum of public charges passes a bound. The rule here, with alpha, b and the
kind of filter fixed at creation as functions of (epsilon, delta) alone:

* the first run E1 is admitted iff its own epsilon at delta (PLD where possible) is at most
  epsilon;
* a later run is admitted iff the charges of all runs, E1 included, add up to at most the filter's
  bound.

**Theorem.** Whatever is released by the admitted runs together is (epsilon, delta)-DP for the
budget's relation, though the parameters of every run but the first may be functions of earlier
outputs (and of public values).

**Proof.** E1 was fixed before any output, so which of two cases holds is a public constant.
(A) E1's charge alone exceeds the bound. Charges are never negative, so no later run is ever
admitted: the releases are those of E1, which is (epsilon, delta)-DP by its own accounting.
(B) It does not. Then on *every* path the sum of the charges stays within the bound, because each
admission asks for exactly that and the charge is reserved before the run's first release.
Filter "renyi": the charge of a run is its Renyi divergence of order alpha, so by the RDP filter at
one fixed order (Feldman & Zrnic 2021; Lecuyer 2021) the whole is (alpha, b)-RDP, which implies
(epsilon, delta)-DP by the conversion that defines b. Filter "basic": run i is (epsilon_i, delta
2^-i)-DP with sum epsilon_i <= epsilon, and sum delta 2^-i < delta (Rogers, Roth, Ullman & Vadhan
2016, the filter by basic composition). Runs that overlap in time are covered too: both filters
hold for the concurrent composition of interactive mechanisms (Haney et al. 2023). []

**Giving back.** A run whose steps are mechanisms of their own (independent noise in each) and that
has been *ended*, so that nothing more can ever be released on it, is charged for the steps that it
released, if the filter is "renyi" and its whole charge is within the bound. The rest is free for
other runs. When to end a run may depend on everything released so far, its own steps included. The
theorem above stays true.

**Proof.** In case (A) the first run's charge exceeds the bound, so nothing is given back and
nothing else is admitted: as before. In case (B) count each step of such runs as a mechanism of its
own, and every other run as one. Let S be the divergences of all steps released by such runs up to
some moment, plus the whole charges of the other runs. Ended runs are charged for their steps, open
ones in full, which is at least the steps they have released and will release; so S never exceeds
the sum of the charges, and that never exceeds the bound: an admission asks for it, a step of an
admitted run leaves it alone, and an ending only lowers it. Hence, on every path, each mechanism is
released only while the divergences of all mechanisms so far, its own included, add up to at most
the bound. That is the RDP filter at one fixed order under fully adaptive composition, where what
comes next, and whether anything does, may be any function of what was released (Feldman & Zrnic
2021, Theorem 4.3; Lecuyer 2021). []

It needs one fixed order, so it is for the budget alone: the guarantee stated for the run itself
(its own epsilon at its own delta, by PLD) keeps the whole plan, since where a run stopped may tell
what was seen. It needs the divergence of a *part* of a run, which only steps with independent noise
have: noise that later steps take back pays for the run as one. The basic filter is about whole
runs: their (epsilon_i, delta_i) is not a sum over steps.

The conversion (Canonne, Kamath & Steinke 2020, Proposition 12; dp_accounting's RDP accountant):
(alpha, r)-RDP implies (epsilon, delta)-DP for
`epsilon = r + log(1 - 1/alpha) - log(delta alpha) / (alpha - 1)`; solved for r it gives b.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import dp_accounting as dp
import numpy as np

from dpoptim.accounting.accountant import compute_epsilon, renyi_divergence
from dpoptim.accounting.event_json import event_from_json, event_text

FilterKind = Literal["renyi", "basic"]

# below it the accountants' arithmetic is not reliable (and each basic run halves delta)
SMALLEST_DELTA = 1e-14
_ROUNDING = 1e-6  # share of b that is kept back for rounding errors in the summed divergences
_ORDERS = np.concatenate(
    [
        np.arange(11, 110) / 10.0,
        np.arange(11.0, 64.0),
        # whole orders: exact for Poisson-sampled Gaussians
        np.unique(np.round(np.geomspace(64, 1e5, 200))),
    ]
)


def renyi_budget(epsilon: float, delta: float, order: float) -> float:
    """The largest r such that (order, r)-RDP implies (epsilon, delta)-DP; negative: none.

    Args: epsilon > 0; 0 < delta < 1; order > 1.
    """
    return epsilon - math.log1p(-1 / order) + math.log(delta * order) / (order - 1)


def epsilon_from_renyi(renyi: float, delta: float, order: float) -> float:
    """The least epsilon that (order, renyi)-RDP implies at `delta`; inverts `renyi_budget`."""
    return max(0.0, renyi + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))


def filter_order(epsilon: float, delta: float) -> float:
    """The order of a budget's filter: a public function of the two numbers, as the proof needs.

    A Gaussian's divergence is `alpha mu^2 / 2`, so the best order for it maximises b(alpha) /
    alpha. That maximum is flat, while the divergence of a Poisson-sampled Gaussian explodes above
    some order; so the lowest order is taken that costs a Gaussian at most 5.4 % more noise.
    (Against the best order in hindsight, DP-SGD runs with q from 1e-4 to 1e-2 then need up to 20 %
    more noise, instead of 35 %.)

    Raises ValueError for an epsilon so small (2e-4 at delta=1e-10) that no order up to 1e5 serves.
    """
    budgets = np.array([renyi_budget(epsilon, delta, float(order)) for order in _ORDERS])
    worth = budgets / _ORDERS
    if not (worth.max() > 0 and worth.argmax() < len(worth) - 1):
        raise ValueError(
            f"epsilon={epsilon:g} is too small for a filter at delta={delta:g}; use a larger "
            "epsilon"
        )
    return float(_ORDERS[np.argmax(worth >= 0.9 * worth.max())])


@dataclass(frozen=True)
class Shortfall:
    """Why a run does not fit, in the filter's own currency (epsilon for a first run)."""

    needed: float  # charge of the run that asked; infinite if the filter has no bound for it
    reserved: float  # charges of the runs before it
    limit: float
    reason: str = ""  # why a charge is infinite

    @property
    def left(self) -> float:
        """The rest that may be charged, >= 0."""
        return max(0.0, self.limit - self.reserved)


@dataclass(frozen=True)
class Budget:
    """(epsilon, delta) for one neighbouring relation, and the filter that keeps it across runs.

    Args:
        epsilon: > 0, finite.
        delta: in (1e-14, 1).
        neighboring: the relation's name, as in `Guarantee`.
        filter: "renyi" (the default) or "basic", which is weaker but has an answer wherever a
            single run has one, e.g. for Poisson sampling under replace-one.
        order: the filter's Renyi order; None computes it (a stored budget passes what was stored).
    """

    epsilon: float
    delta: float
    neighboring: str
    filter: FilterKind = "renyi"
    order: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise ValueError(f"epsilon: expected a finite number > 0, got {self.epsilon!r}")
        if not SMALLEST_DELTA < self.delta < 1:
            raise ValueError(
                f"delta: expected a number in ({SMALLEST_DELTA:g}, 1), got {self.delta!r}"
            )
        if self.filter not in ("renyi", "basic"):
            raise ValueError(f'filter: expected "renyi" or "basic", got {self.filter!r}')
        if self.filter == "renyi" and self.order is None:
            object.__setattr__(self, "order", filter_order(self.epsilon, self.delta))

    @property
    def limit(self) -> float:
        """The bound on the sum of the charges: b(alpha) less a margin for rounding, or epsilon."""
        if self.order is None:
            return self.epsilon
        return renyi_budget(self.epsilon, self.delta, self.order) * (1 - _ROUNDING)

    @property
    def currency(self) -> str:
        """Unit of charges, for messages."""
        return (
            "basic-composition epsilon"
            if self.order is None
            else f"Renyi divergence of order {self.order:g}"
        )

    def charge(self, event: dp.DpEvent, number: int) -> tuple[float, str]:
        """The charge of run `number` (1, 2, ...), >= 0, and the reason if it is infinite."""
        text = event_text(event)
        if self.order is not None:
            return _renyi_charge(text, self.order, self.neighboring)
        # the schedule is fixed: it may not depend on the runs
        share = math.ldexp(self.delta, -number)
        if share <= SMALLEST_DELTA:
            return math.inf, f"run {number} would have a share of delta below {SMALLEST_DELTA:g}"
        return _epsilon(text, share, self.neighboring), ""

    def why_nothing_is_returned(self, whole: float) -> str:
        """Why a run of this charge keeps all of it, however early it ends; "" if it need not."""
        if self.order is None:
            return "the basic filter charges whole runs"
        if not whole <= self.limit:
            return (
                "the run was admitted as the only one, by its own accounting; its charge in the "
                "budget's filter is above the filter's bound"
            )
        return ""

    def charge_of_part(self, whole: float, part: dp.DpEvent) -> float:
        """The charge of a run that ended after ``part`` of it ("Giving back"), at most `whole`."""
        if self.why_nothing_is_returned(whole):
            return whole
        return min(whole, self.charge(part, 1)[0])

    def shortfall(self, charges: Sequence[float], event: dp.DpEvent) -> Shortfall | None:
        """The shortfall if `event` is to follow runs of these `charges`; None: nothing."""
        if not charges:
            own = _epsilon(event_text(event), self.delta, self.neighboring)
            return None if own <= self.epsilon else Shortfall(own, 0.0, self.epsilon)
        reserved = math.fsum(charges)
        needed, reason = self.charge(event, len(charges) + 1)
        if reserved + needed <= self.limit:
            return None
        return Shortfall(needed, reserved, self.limit, reason)

    def bound(self, delta: float) -> float:
        """The epsilon at `delta` that the filter promises for all runs, present and future."""
        if delta == self.delta:
            return self.epsilon
        if self.order is not None:
            return epsilon_from_renyi(
                renyi_budget(self.epsilon, self.delta, self.order), delta, self.order
            )
        return self.epsilon if delta > self.delta else math.inf

    def largest_gaussian(self, charge: float) -> float:
        """Epsilon at `delta` of the largest single Gaussian release within `charge`.

        Only to say in familiar units what is left; nothing is admitted by it.
        """
        if charge <= 0:
            return 0.0
        if self.order is None:
            return charge
        unit = renyi_divergence(dp.GaussianDpEvent(1.0), self.order, self.neighboring)
        event = dp.GaussianDpEvent(math.sqrt(unit / charge))
        return compute_epsilon(event, self.delta, self.neighboring).epsilon


@lru_cache(maxsize=4096)
def _epsilon(event: str, delta: float, neighboring: str) -> float:
    return compute_epsilon(event_from_json(json.loads(event)), delta, neighboring).epsilon


@lru_cache(maxsize=4096)
def _renyi_charge(event: str, order: float, neighboring: str) -> tuple[float, str]:
    try:
        divergence = renyi_divergence(event_from_json(json.loads(event)), order, neighboring)
    except ValueError as error:  # no RDP for this event and relation
        return math.inf, str(error)
    if math.isnan(divergence) or divergence == math.inf:
        return math.inf, f"its Renyi divergence of order {order:g} is not finite"
    return max(0.0, divergence), ""
