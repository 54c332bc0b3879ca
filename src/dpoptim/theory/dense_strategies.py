"""How small the error of correlated noise can be at all: the dense optimum, by its dual problem.

A strategy C has the mean squared error ``tr(A^T A X^-1) / T`` for X = C^T C and A the workload
(prefix sums); a record in the steps i, i + b, ... moves its output by at most 1 if ``tr(R X_i) <=
1`` for every correlation matrix R, X_i that pattern's block of X. (A correlation matrix holds the
inner products of unit gradients.) So every choice of multipliers lambda_i >= 0 and correlation
matrices R_i gives a lower bound on all strategies: with W the matrix of blocks ``lambda_i R_i``,
``(tr (A W A^T)^(1/2))^2 / (T sum_i lambda_i)`` (Choquette-Choo, McMahan, Rush and Thakurta 2023,
"Multi-epoch matrix factorization", in the dual). Ascent over both brings it up to the optimum.
"""

import math

import numpy as np

from dpoptim.noise.correlated.workload import PREFIX_SUMS, Workload

ASCENT = 0.5  # step of the correlation matrices, in units of the mean of X's diagonal
ROUNDED = 1e-13  # of the largest eigenvalue


def least_mean_error(
    steps: int, separation: int, updates: int = 100, workload: Workload = PREFIX_SUMS
) -> float:
    """Return a lower bound on the root of the mean squared error of iterates at 1-GDP.

    Args:
        steps: T; takes T^3 operations an update. separation: b, a divisor of T.
        updates: more bring the bound nearer to the optimum.
        workload: of the optimizer whose iterates these are; by default, prefix sums.
    """
    passes = steps // separation
    if passes * separation != steps:
        raise ValueError(f"separation={separation} must divide steps={steps}.")
    sums = workload.matrix(steps)
    places = np.arange(separation)[:, None] + separation * np.arange(passes)
    multipliers = np.ones(separation)
    vectors = np.tile(np.eye(passes), (separation, 1, 1))  # whose inner products are the R_i
    best = 0.0
    for _ in range(updates):
        blocks = multipliers[:, None, None] * (vectors @ vectors.transpose(0, 2, 1))
        weights = np.zeros((steps, steps))
        weights[places[:, :, None], places[:, None, :]] = blocks
        values, axes = np.linalg.eigh(sums @ weights @ sums.T)
        # workloads that decay to nothing are nearly singular: what rounds to 0 or below is left out
        roots = np.sqrt(np.where(values > ROUNDED * values[-1], values, np.inf))
        best = max(best, float(roots[np.isfinite(roots)].sum() ** 2 / multipliers.sum()))
        gram = sums.T @ ((axes / roots) @ axes.T) @ sums
        own = gram[places[:, :, None], places[:, None, :]]
        correlations = vectors @ vectors.transpose(0, 2, 1)
        shifts = np.sum(correlations * own, axis=(1, 2))
        diagonals = np.einsum("iaa->ia", own)
        pull = own - diagonals[:, :, None] * np.eye(passes)
        vectors = vectors + ASCENT / diagonals.mean(1)[:, None, None] * (pull @ vectors)
        vectors /= np.linalg.norm(vectors, axis=2, keepdims=True)
        multipliers *= shifts / (multipliers @ shifts) * multipliers.sum()
    return math.sqrt(best / steps)
