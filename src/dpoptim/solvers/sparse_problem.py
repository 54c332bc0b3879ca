"""Linear models on wide sparse tables: a pass costs as much as they have entries."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpoptim.clipping import Clipping
from dpoptim.data.sparse_rows import EntriesOfRows, row_of_entries
from dpoptim.gradients.arithmetic.products import margin
from dpoptim.solvers.linear_model import LinearModel, as_tensor, bound_and_power
from dpoptim.solvers.problem import LinearProblem, Terms, factors_of

WHOLE = 52  # bits of a float64 that count: sums of whole numbers below 2^52 are exact


class SparseProblem(LinearProblem):
    """`LinearProblem` of canonical CSR rows, one a record, in float64.

    **Guarantee.** As `Problem.clipped_sum`, whatever a table stores. What a record adds to an
    entry is cut towards zero to a multiple of ``bound / grid``, the grid being a power of two with
    ``capacity * grid <= 2^52``, and whole numbers add up exactly, in any order. So a record moves
    the sum by what it adds itself: at most ``bound (1 - margin)``, computed with relative errors
    of a few 2^-53. Only the last product (with ``bound / grid``) and the addition of chunks round:
    in both worlds by less than ``capacity (1 + chunks) 2^-51 bound``, which is within the margin of
    at least ``capacity 2^-32``. Scores and norms are sums over a row's own entries, one after the
    other, so no record's gradient depends on others.
    """

    def prepare(self, records: tuple[Any, ...]) -> tuple[Any, ...]:
        table = records[0]
        row = row_of_entries(table)
        squares = np.bincount(row, np.square(table.data), minlength=table.shape[0])
        norms = torch.from_numpy(squares) + int(self.model.intercept)
        return (table, as_tensor(records[1]), norms, row, *factors_of(records))

    def clipped_sum(self, batch: tuple[Any, ...], terms: Terms, bound: float) -> Tensor:
        table, y, norms, row, *factors_of_rows = batch
        model, (bound, scale) = self.model, bound_and_power(bound)
        g = torch.zeros(len(y), model.outputs, dtype=torch.float64, device="cpu")
        for coefficient, w in terms:
            g.add_(model.residuals(self._scores(table, w), y), alpha=coefficient * scale)
        if len(factors_of_rows) > 1:
            g.mul_(factors_of_rows[1][:, None])
        squared = g.square().sum(1) * norms
        factors = Clipping(bound).factors(
            squared, margin(torch.float64, self.capacity, common_factor=False)
        )
        g = g.masked_fill((factors == 0)[:, None], 0.0)  # 0 times what is not finite is not 0
        if factors_of_rows:
            factors = factors * factors_of_rows[0]
        grid = 2.0 ** math.floor(WHOLE - math.log2(self.capacity))
        parts = (g * (factors * (grid / bound))[:, None]).numpy()
        total = np.empty((model.outputs, model.columns))
        for sums, part in zip(total, parts.T, strict=True):
            added = np.trunc(part[row] * table.data)
            sums[: model.features] = np.bincount(table.indices, added, minlength=model.features)
            if model.intercept:
                sums[-1] = np.trunc(part).sum()
        return torch.from_numpy(total).view(-1) * (bound / grid / scale)

    def total_loss(self, batch: tuple[Any, ...], w: Tensor) -> float:
        table, y, _, _, *factors_of_rows = batch
        losses = self.model.losses(self._scores(table, w), y)
        for factors in factors_of_rows:
            losses = losses * factors
        return float(losses.sum())

    def _scores(self, table: Any, w: Tensor) -> Tensor:
        """Scores of the rows, float64, (B, outputs)."""
        matrix = w.view(self.model.outputs, self.model.columns).numpy()
        scores = np.asarray(table @ matrix[:, : self.model.features].T)
        if self.model.intercept:
            scores = scores + matrix[:, -1]
        return torch.from_numpy(scores)


def problem_of(
    data: tuple[Any, ...], model: LinearModel, *, capacity: int, l2: float
) -> LinearProblem:
    """The problem for dense rows, or for those that are given by their entries."""
    kind = SparseProblem if isinstance(data[0], EntriesOfRows) else LinearProblem
    return kind(model, capacity=capacity, l2=l2)
