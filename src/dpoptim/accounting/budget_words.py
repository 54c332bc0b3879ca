"""Words for what runs have spent, what a budget has left, and why a run was refused."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import dp_accounting as dp

from dpoptim.accounting.accountant import compute_epsilon
from dpoptim.accounting.budget import Budget, Shortfall
from dpoptim.accounting.guarantee import Guarantee, parse_neighboring, rounded_up
from dpoptim.errors import LedgerError
from dpoptim.printable import printable

OWN_SHARE = 0.9  # of a budget's epsilon, above which a run is meant to take all of it
LEAVES = 0.999  # of a filter's bound, above which nothing of use is left
_FILTER_NAMES = {"renyi": "RDP filter", "basic": "basic-composition filter"}


class BudgetExceeded(LedgerError):  # noqa: N818 (reads as what happened)
    """The budget does not admit a run; nothing was reserved. `shortfall` has the numbers."""

    def __init__(self, message: str, shortfall: Shortfall) -> None:
        super().__init__(message)
        self.shortfall = shortfall

    def __reduce__(self) -> tuple[type["BudgetExceeded"], tuple[str, Shortfall]]:
        return type(self), (str(self), self.shortfall)  # so that a worker process can hand it back


class WholeBudgetWarning(UserWarning):
    """A first run takes all of a budget that is larger than its own epsilon."""


def takes_all(budget: Budget, event: dp.DpEvent) -> str:
    """The warning that a first run of this event leaves nothing to later ones; "" if it does not.

    Not where its own epsilon is about the budget's: then that is no surprise. Public numbers only.
    """
    own = compute_epsilon(event, budget.delta, budget.neighboring).epsilon
    charge, _ = budget.charge(event, 1)
    if own > OWN_SHARE * budget.epsilon or charge < LEAVES * budget.limit:
        return ""
    why, fix = (
        ("has no bound for it", 'another relation, or a new ledger with filter="basic"')
        if math.isinf(charge)
        else (
            "charges choices, and small batches with little noise, more than their epsilon",
            "a larger batch, or more noise (a smaller epsilon)",
        )
    )
    return (
        f"this run takes the whole budget, {_promise(budget)}, though its own epsilon is "
        f"{rounded_up(own)}: what later runs, planned on its outputs, may add is bounded by a "
        f"filter ({budget.currency}), which {why}. After it nothing more is admitted. Fix: {fix}; "
        "or one plan for everything, such as a PrivatePipeline"
    )


@dataclass(frozen=True)
class Remaining:
    """The rest of a ledger's budget.

    `reserved`, `left` and `limit` are in the budget's currency: epsilon while the ledger is empty,
    then the filter's. `next_epsilon` says it in familiar units: about the epsilon, at the budget's
    delta, of the largest single Gaussian release that would still be admitted. Without a budget
    all are infinite.
    """

    budget: Budget | None
    runs: int
    reserved: float
    left: float
    limit: float
    next_epsilon: float

    @classmethod
    def of(cls, budget: Budget | None, charges: Sequence[float], runs: int) -> "Remaining":
        """The rest of `budget` after so many runs, whose charges it has added up."""
        if budget is None:
            return cls(None, runs, math.inf, math.inf, math.inf, math.inf)
        if not runs:
            return cls(budget, 0, 0.0, budget.epsilon, budget.epsilon, budget.epsilon)
        reserved = math.fsum(charges)
        left = max(0.0, budget.limit - reserved)
        return cls(budget, runs, reserved, left, budget.limit, budget.largest_gaussian(left))

    def __str__(self) -> str:
        if self.budget is None:
            return f"{_count(self.runs)} reserved; no budget: everything is admitted"
        promise = f"budget {_promise(self.budget)}"
        if self.runs == 0:
            return f"{promise}; nothing reserved: a first run may use all of it"
        if self.left == 0:
            return f"{promise}; {_count(self.runs)} reserved; nothing more is admitted"
        return (
            f"{promise}; {_count(self.runs)} reserved: {self.reserved / self.limit:.1%} of the "
            f"filter's bound; left for later runs: {self.left / self.limit:.1%}, about one "
            f"Gaussian release of epsilon={self.next_epsilon:.3g}"
        )


def spent(
    budget: Budget | None, events: Sequence[dp.DpEvent], delta: float, neighboring: str
) -> Guarantee:
    """The guarantee at `delta` of the releases of the runs `events`; see `Ledger.spent`."""
    count = len(events)
    if budget is None or count < 2:
        guarantee = compute_epsilon(dp.ComposedDpEvent(list(events)), delta, neighboring)
        if count < 2:
            return guarantee
        note = (
            f"{count} runs without a budget: valid if no run's parameters depended on earlier "
            "outputs, on the word of whoever made the runs"
        )
        return replace(guarantee, status="on the user's word", notes=(*guarantee.notes, note))
    note = (
        f"{count} runs: the filter's bound for all runs, later ones included, also if planned on "
        "outputs"
    )
    accountant = _FILTER_NAMES[budget.filter]
    return Guarantee(
        budget.bound(delta), delta, parse_neighboring(neighboring), accountant, notes=(note,)
    )


def over_budget_error(
    budget: Budget, short: Shortfall, *, runs: int, dataset: str
) -> BudgetExceeded:
    """The error for a run that does not fit: budget, reserved, needed, left, and how to fit."""
    head = f"over the budget of data set {printable(dataset)!r}, {_promise(budget)}: "
    if runs == 0:
        body = (
            f"nothing is reserved yet and epsilon={short.left:.6g} is left, but this run needs "
            f"epsilon={short.needed:.6g}. Plan it for a lower epsilon: fewer steps, a smaller "
            "sample rate or more noise."
        )
        return BudgetExceeded(head + body, short)
    body = (
        f"{_count(runs)} reserved {short.reserved:.6g} of {short.limit:.6g} ({budget.currency}), "
        f"this run needs {short.needed:.6g}, left is {short.left:.6g}. "
    )
    if math.isinf(short.reserved):
        body += "An earlier run has no bound under this filter, so it must stay the only one."
    elif short.reserved > short.limit:
        body += "The first run took the whole budget, so it must stay the only one on this data."
    elif math.isinf(short.needed):
        body += f"The filter has no bound for this run ({short.reason})."
        if budget.filter == "renyi":
            body += (
                ' Plan it so that RDP applies; a new data set\'s ledger may use filter="basic" '
                "instead."
            )
    elif short.left <= 1e-3 * short.limit:
        body += "The budget is used up; no further run on this data fits."
    else:
        body += _how_to_fit(budget, short)
    return BudgetExceeded(head + body, short)


def _how_to_fit(budget: Budget, short: Shortfall) -> str:
    if budget.filter == "basic":
        return "Plan it for a lower epsilon: fewer steps, a smaller sample rate or more noise."
    steps = math.floor(100 * short.left / short.needed)
    noise = math.sqrt(short.needed / short.left)
    single = budget.largest_gaussian(short.left)
    shorter = f"at most {steps} % of its steps, or " if steps >= 1 else ""
    return (
        f"To fit: {shorter}about {noise:.3g} times its noise, or a lower epsilon (a single "
        f"Gaussian release of epsilon={single:.3g} would fit)."
    )


def _promise(budget: Budget) -> str:
    return f"epsilon={budget.epsilon:g} at delta={budget.delta:g} ({budget.neighboring})"


def _count(runs: int) -> str:
    return f"{runs} run{'' if runs == 1 else 's'}"
