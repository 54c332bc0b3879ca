"""The option ``--budget`` of every command that charges a ledger."""

from pathlib import Path


def whole_budget(
    budget: str | None, ledger: Path | None
) -> tuple[float, float] | tuple[None, None]:
    """Epsilon and delta of a new ledger over all runs, as `Ledger` takes them.

    Args:
        budget: ``"EPSILON,DELTA"``; None: the ledger has none. ledger: the file that keeps it.

    Raises:
        ValueError: the text is something else, or no file is named.

    Examples:
        >>> from pathlib import Path
        >>> from dpoptim.runs.whole_budget import whole_budget
        >>> whole_budget("3,1e-5", Path("patients.sqlite"))
        (3.0, 1e-05)
    """
    if budget is None:
        return None, None
    if ledger is None:
        raise ValueError("--budget is kept by a ledger file; name one with --ledger.")
    try:
        epsilon, delta = (float(part) for part in budget.split(","))
    except ValueError:
        raise ValueError(f"--budget takes EPSILON,DELTA such as 3,1e-5, got {budget!r}.") from None
    return epsilon, delta
