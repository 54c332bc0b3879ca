"""Bounds on single records' gradients: Lipschitz constants of generalised linear models.

Das et al. 2023, Sec. 5: G_i bounds the norm of record i's gradient over all parameters (of a given
domain); they advise to look for the clip norm below the smallest of them. A G_i is as private as
its record.
"""

import math

from torch import Tensor

from dpoptim.solvers.linear_model import LinearModel


def lipschitz_constants(
    model: LinearModel, x: Tensor, *, radius: float = math.inf, target_bound: float = math.inf
) -> Tensor:
    """G_i of each record: float64, shape (B,). Private.

    * softmax: ``sqrt(2) |(x, 1)|``, since ``|p - e_y| <= sqrt(2)``; reached as p tends to another
      class;
    * logistic: ``|(x, 1)|``, since ``|sigmoid(s) - y| <= 1``: smaller by sqrt(2) than softmax with
      two classes;
    * huber: ``delta sqrt(p) |(x, 1)|``;
    * squared: ``(radius |(x, 1)| + target_bound) |(x, 1)|`` where ``|w| <= radius`` and ``|y| <=
      target_bound``.

    Args:
        x: shape (B, features).
        radius, target_bound: of the squared loss's domain, which has no constant without them.

    Raises:
        ValueError: squared loss without a bounded domain.
    """
    norms = model.squared_row_norms(x).sqrt()
    if model.loss != "squared":
        return norms * model.lipschitz(1.0)
    if not (0 <= radius < math.inf and 0 <= target_bound < math.inf):
        raise ValueError(
            "squared loss has no Lipschitz constant on an unbounded domain: give a finite radius "
            f"and target_bound, got radius={radius!r} and target_bound={target_bound!r}."
        )
    return (norms * radius + target_bound) * norms
