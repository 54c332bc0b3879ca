"""How records are kept apart, in words: for the basis of a guarantee, and for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dpoptim.assumptions import Assumption, enforced, trusted
from dpoptim.gradients.isolation import Isolation
from dpoptim.training.trials.isolation_fallback import Failure

if TYPE_CHECKING:
    from dpoptim.training.trials.made_up_records import Sample

OTHER_WAY = re.compile(r"(?:^|[;,.]? (?:or|Or) )(?:dpoptim\.attach|attach |isolation=)")
INDEPENDENT = "the model treats records independently"
CHANGED = (
    "; while it was tried, numbers in its plain attributes changed, such as a count of calls: that "
    "holds whatever these are later"
)
ALONE = "records cannot be mixed: every microbatch has one record"
WHOLE = (
    "records cannot be mixed in the model: its forward pass is vectorised, with a row of "
    "parameters for each"
)
WAYS_IN_WORDS = {
    "alone": "records pass alone, one in each microbatch",
    "vmap": "the whole model is vectorised, with a row of parameters for each record",
}
VECTORISED_PARTS = "modules {} are vectorised, with a row of parameters for each record"
LOOPED_PARTS = (
    "modules {} run record by record inside each batch, with a row of parameters for each"
)
PARTS = "in {} records cannot be mixed: {}, with a row of parameters for each"


def first_sentence(message: str) -> str:
    return message.split(". Fix: ", maxsplit=1)[0].rstrip(".")


def basis_of(isolation: Isolation, sample: Sample | None) -> tuple[Assumption, ...]:
    """Assumptions of a way that passed its trial, by the sample it was tried on."""
    whole = sample is not None and sample.whole
    inputs = "random inputs of 0 and 1, which alone it took," if whole else "random inputs,"
    passed = trusted(
        f"{INDEPENDENT} (it did on {inputs} against batches of one)",
        of_program=True,
    )
    if isolation.alone:
        return (enforced(ALONE),)
    if isolation.enforced:
        return (enforced(WHOLE),)
    ways = ((isolation.by_vmap, "vectorised"), (isolation.by_loop, "called once for each"))
    return (*(enforced(PARTS.format(some(of), way)) for of, way in ways if of), passed)


def by_what_changed(basis: Iterable[Assumption]) -> tuple[Assumption, ...]:
    """The basis, of a model whose plain attributes changed while it was tried."""
    return tuple(
        replace(item, text=item.text + CHANGED) if item.text.startswith(INDEPENDENT) else item
        for item in basis
    )


def not_probed(reason: str) -> Assumption:
    return trusted(
        f"{INDEPENDENT}, and every layer has them on its first axis (not "
        f"tested on random inputs: {reason}; see dpoptim.check)",
    )


def forgets(reason: str) -> Assumption:
    return trusted(
        "the model keeps nothing from one record's forward pass to the next one's (not tested on "
        f"random inputs: {reason})",
    )


def some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(map(repr, names[:2])) + more


def fix_of(message: str) -> str:
    """Advice of an error's message, but for other ways of keeping records apart."""
    fix = message.partition("Fix: ")[2]
    return OTHER_WAY.split(fix, maxsplit=1)[0].rstrip(".")


def slower(isolation: Isolation, reason: str, fix: str = "") -> str:
    """Tell that records are kept apart in a slower way, why, and what would spare it."""
    ways = (VECTORISED_PARTS, isolation.by_vmap), (LOOPED_PARTS, isolation.by_loop)
    parts = "; ".join(words.format(some(of)) for words, of in ways if of)
    what = WAYS_IN_WORDS.get(isolation.tier, parts)
    return f"{what}, because {reason}." + (f" To be faster: {fix}." if fix else "")


def message_of(isolation: Isolation, failures: Sequence[Failure]) -> str:
    """Warning about a way that is slower than rules; empty if there is nothing to tell.

    Args:
        failures: of faster ways, in order. The first is told, and what could not be vectorised,
            which is what the user can change.
    """
    if not failures or (isolation.tier == "rules" and not isolation.apart):
        return ""
    first = failures[0]
    unvectorised = next((each for each in failures if each.unvectorised), first)
    reason, fix = f"with rules for layers {first.reason}", unvectorised.fix or first.fix
    if unvectorised is not first:
        reason += f", and {unvectorised.reason}"
    if isolation.alone and unvectorised.fix and not unvectorised.modules:
        fix += "; or a module of its own for that, which then runs record by record inside a batch"
    return slower(isolation, reason, fix)


def warning_of(message: str, isolation: Isolation, cost: str) -> str:
    """The whole warning: what is slower and why, what it costs, and how to be told no more."""
    named = isolation.tier != "rules"
    silence = (
        f"isolation={isolation.tier!r} takes this way without a warning"
        if named
        else 'warnings.simplefilter("ignore", dpoptim.IsolationWarning) silences this'
    )
    return " ".join(filter(None, (message, cost, f"{silence}.")))
