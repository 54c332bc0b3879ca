"""Whether linear estimators keep their rows in float32, of which each pass reads half as much."""

import numpy as np

from dpoptim.estimators.solving import sums_are_sharp
from dpoptim.solvers import linear_sums
from dpoptim.solvers.budget import Budget
from dpoptim.solvers.linear_model import LinearModel

NARROW_NORMS = (1e-15, 1e15)  # of rows whose entries float32 holds well


def dtype_of_rows(
    solver: str,
    model: LinearModel,
    n: float,
    budget: Budget,
    *,
    norm: float,
) -> type[np.float32] | None:
    """float32 where it suffices for rows, of which each pass then reads half as much; None: as is.

    Compiled functions multiply and add in float64 all the same, and take each row's gradient for
    that of the row as it was rounded: this costs nothing of the guarantee, and less than noise.
    Sums of products keep all digits, since their noise may be small, too.

    Args:
        n: records, over the weight that counts whole. norm: public bound on rows.
    """
    if not linear_sums.serve(None, model.outputs, model.columns):
        return None
    if not NARROW_NORMS[0] < norm < NARROW_NORMS[1] or solver == "sufficient-statistics":
        return None
    return None if solver == "auto" and sums_are_sharp(model, n, budget) else np.float32
