"""Public numbers that a guarantee is stated with, and what a person should know of them."""

import math
from collections.abc import Sequence
from typing import Protocol

from dpoptim.accounting.guarantee import rounded_up
from dpoptim.arguments import real_number, whole_number

RELATIONS = ("add-or-remove-one", "zero-out", "replace-one")
LARGE_EPSILON = 10.0
SMALL_EPSILON = 0.05


def doubts(epsilon: float, delta: float, n: int) -> tuple[str, ...]:
    """Return what should give pause, with the fix.

    Args:
        epsilon, delta: of the budget.
        n: number of records, public. Where it is hidden, nobody may say that it is wrong.

    Examples:
        >>> from dpoptim.accounting.public_numbers import doubts
        >>> doubts(1.0, 1e-6, 10_000)
        ()
        >>> doubts(1.0, 0.5, 10_000)[0].startswith("delta 0.5 is above 1/(10 n)")
        True
    """
    found = []
    if epsilon > LARGE_EPSILON:
        found.append(
            f"epsilon {rounded_up(epsilon)} promises next to nothing: an attacker's odds may "
            "change by the factor e^epsilon. Fix: 8 or less, better 1 to 4"
        )
    if epsilon < SMALL_EPSILON:
        found.append(
            f"epsilon {rounded_up(epsilon, 3)} is far below what anyone asks for, and takes very "
            "many records to learn anything. Usual: 0.1 to 8"
        )
    if large_delta(delta, n):
        found.append(
            f"delta {delta:g} is above 1/(10 n) = {0.1 / n:.2g}: publishing a record at random"
            f"{'' if delta * n >= 1 else ', once in ten times,'} would satisfy it. "
            f"Fix: at most {0.1 / n:.1g}"
        )
    return tuple(found)


def large_delta(delta: float, n: int) -> bool:
    """Whether delta is above 1/(10 n); not by rounding alone."""
    return delta * n > 0.1 * (1 + 1e-9)


class Counts(Protocol):
    """A `Ledger`, as far as `relation_of` needs it."""

    neighboring: str


def relation_of(
    neighboring: str | None, ledger: Counts | None, has: Sequence[str] = RELATIONS
) -> str:
    """The neighbouring relation of a release on a table.

    Args:
        neighboring: as stated; None: the ledger's, if the release has it, else zero-out.
        has: the relations that it has.

    Examples:
        >>> import dpoptim
        >>> from dpoptim.accounting.public_numbers import relation_of
        >>> relation_of(None, dpoptim.Ledger(neighboring="replace-one"))
        'replace-one'
    """
    if neighboring is not None:
        return neighboring
    return ledger.neighboring if ledger is not None and ledger.neighboring in has else "zero-out"


def public_number_of_records(n: object, records: int, neighboring: str) -> int:
    """The number of records that batches, steps and noise are computed from.

    Args:
        n: as given to the estimator; None where it may be read off the table.
        records: in the table.

    Raises:
        ValueError: the relation hides the number of records, and none was given; or it is public
            and the given one is wrong, or there are none.
    """
    if neighboring == "add-or-remove-one":
        if n is None:
            raise ValueError(
                "n is missing: neighboring='add-or-remove-one' hides how many records there are, "
                "so batches and noise may not be computed from it. Fix: n=, a public estimate; or "
                "neighboring='zero-out' (with a ledger, for that too: "
                "dpoptim.Ledger(..., neighboring='zero-out'))."
            )
        return whole_number("n", n, least=1)
    if n is not None and whole_number("n", n, least=1) != records:
        raise ValueError(
            f"n={n} is not the number of records (of persons, where they are protected), which "
            f"neighboring={neighboring!r} takes as public. Fix: leave n out."
        )
    if records < 1:
        raise ValueError("Found array with 0 sample(s): there are no records to learn from.")
    return records


def usual_delta(n: int) -> float:
    """One over ten times the number of records, at most 1e-5, rounded down to a power of ten.

    What everything takes that is told no delta. Args: n: a public number.

    Examples:
        >>> from dpoptim.accounting.public_numbers import usual_delta
        >>> usual_delta(200), usual_delta(60_000)
        (1e-05, 1e-06)
    """
    return float(min(1e-5, 10.0 ** -math.ceil(math.log10(n) + 1)))


def stated_delta(
    delta: float | str, n: int, *, epsilon: float | None
) -> tuple[float, tuple[str, ...]]:
    """delta, and what must be said of the budget. Args: n: a public number."""
    said: tuple[str, ...] = ()
    if isinstance(delta, str):
        if delta != "auto":
            raise ValueError(f"delta must be a number or 'auto', got {delta!r}.")
        value = usual_delta(n)
        said = ("delta is at most 1e-5 and 1/(10 n), with n taken as public",)
    else:
        value = real_number("delta", delta)
    if not 0 < value < 1:
        raise ValueError(f"delta must be between 0 and 1, got {delta!r}; choose it below 1/(10 n).")
    if epsilon is not None:
        said = (*said, *doubts(real_number("epsilon", epsilon), value, n))
    return value, said
