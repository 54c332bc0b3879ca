"""Doubts that a person should know before relying on a budget, by public numbers alone."""

from dpoptim.accounting.guarantee import rounded_up

LARGE_EPSILON = 10.0
SMALL_EPSILON = 0.05


def doubts(epsilon: float, delta: float, n: int) -> tuple[str, ...]:
    """Return what should give pause, with the fix.

    Args:
        epsilon, delta: of the budget.
        n: number of records, public. Where it is hidden, nobody may say that it is wrong.

    Examples:
        >>> from dpoptim.accounting.doubts import doubts
        >>> doubts(1.0, 1e-6, 10_000)
        ()
        >>> doubts(1.0, 0.5, 10_000)[0].startswith("delta 0.5 is above 1/n")
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
    if delta * n > 1:
        found.append(
            f"delta {delta:g} is above 1/n = {1 / n:.2g}: publishing a record at random would "
            f"satisfy it. Fix: at most {0.1 / n:.1g}"
        )
    return tuple(found)
