"""The search that a ledger's budget would still admit, for the error of one that it refuses."""

import math
from typing import Any

from dpoptim.accounting.budget_words import BudgetExceeded
from dpoptim.accounting.ledger import Ledger
from dpoptim.gate import TrialsGate
from dpoptim.noise.stream import KeyStream
from dpoptim.tuning.search_event import search_event

# how the ledger's advice to runs of steps begins, which a search has not
ADVICE = ("To fit: ", "Plan it for a lower epsilon")
LEAST = 0.01  # of the epsilon that was asked for: less is not looked for
ROUNDS = 9  # of halving: to a part in 500


def trials_gate(
    event: Any,
    ledger: Ledger,
    *,
    neighboring: str,
    noise: KeyStream,
    label: str,
    of: tuple[float, float, float],
) -> TrialsGate:
    """The gate of a search. All that its refusal says is public.

    Args:
        of: epsilon, delta and the expected number of trials that make the event.

    Raises:
        BudgetExceeded: the search does not fit; with an epsilon at which it does, if there is one.
    """
    try:
        return TrialsGate(
            event=event, neighboring=neighboring, ledger=ledger, noise=noise, label=label
        )
    except BudgetExceeded as error:
        refused = error
    epsilon, delta, mean_trials = of

    def fits(share: float) -> bool:
        try:
            made = search_event(share * epsilon, delta, neighboring, mean_trials)
            ledger.check(made, neighboring)
        except BudgetExceeded:
            return False
        return True

    if not fits(LEAST):
        raise refused
    low, high = LEAST, 1.0
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    digits = 1 - math.floor(math.log10(low * epsilon))  # two that count, rounded down
    fitting = math.floor(low * epsilon * 10**digits) / 10**digits
    head = str(refused)
    for advice in ADVICE:
        head = head.partition(advice)[0]
    raise BudgetExceeded(f"{head}Fix: a search of epsilon={fitting:g} fits.", refused.shortfall)
