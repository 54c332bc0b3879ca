"""Groups: what a guarantee for one record says of several, such as all rows of one person."""

import math

import dp_accounting as dp

from dpoptim.accounting.accountant import check_epsilon, compute_delta
from dpoptim.arguments import whole_number

ROUNDED_UP = 1 + 2.0**-40
LARGEST_EXPONENT = 700.0  # e to it is still a number


def group_delta(
    event: dp.DpEvent, epsilon: float, size: int, neighboring: str | dp.NeighboringRelation
) -> float:
    """A delta at `epsilon` for data sets that differ in up to `size` records; an upper bound.

    From data set to data set by one record each: if every step is (e, d), then k of them are
    (k e, d (1 + e^e + ... + e^((k-1) e))), here at e = epsilon / k (Vadhan 2017, Lemma 2.2). It
    holds for any event, and its epsilon grows about as the size does: whoever can should name the
    persons instead (``attach(..., persons=...)``), who are then clipped as one.

    Args:
        event: of all that was released, such as ``plan.event``.
        epsilon: > 0, of the group.
        size: records of the group, at most; >= 1.
        neighboring: the relation of one record, as for `compute_epsilon`.

    Returns:
        delta in [0, 1]; 1 promises nothing.

    Raises:
        ValueError, TypeError: as for `compute_epsilon`; or size is no whole number from 1 on.

    Examples:
        >>> import dp_accounting as dp
        >>> from dpoptim.accounting import group_delta
        >>> group_delta(dp.GaussianDpEvent(20.0), 1.0, 3, "zero-out") < 1e-8
        True
    """
    epsilon, size = check_epsilon(epsilon), whole_number("size", size, least=1)
    each = epsilon / size
    delta = compute_delta(event, each, neighboring).delta
    if size == 1:
        return delta
    if epsilon > LARGEST_EXPONENT:
        return 1.0
    delta = max(delta, math.ulp(0.0))  # which may have been too small for a number
    return min(1.0, delta * math.expm1(epsilon) / math.expm1(each) * ROUNDED_UP)
