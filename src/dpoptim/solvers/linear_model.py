"""Generalised linear models in closed form: clipped sums from two products, no autograd.

With scores ``s = V (x, 1)`` a record's gradient is ``outer(r, (x, 1))``, where ``r`` is the
derivative of its loss by the scores; its norm is ``|r| |(x, 1)|``. A combination of gradients at
several points has the same shape, ``sum_j c_j grad f(w_j) = outer(sum_j c_j r_j, (x, 1))``, so
clipping a *difference* of gradients costs no more.

| loss     | value                                    | r                      | y              |
|----------|------------------------------------------|------------------------|----------------|
| softmax  | log sum exp(s) - s_y                     | softmax(s) - e_y       | a class, (B,)  |
| logistic | log(1 + e^s) - y s                       | sigmoid(s) - y         | 0 to 1, (B,)   |
| squared  | |s - y|^2 / 2                            | s - y                  | (B,) or (B, p) |
| huber    | as squared, linear where |s - y| > delta | (s - y) cut to +-delta | (B,) or (B, p) |
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dpoptim.arguments import one_of, positive_number
from dpoptim.clipping import SMALLEST_NORM, Clipping
from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.arithmetic.multiplication import linear, rows_leave_mkl
from dpoptim.gradients.arithmetic.norms import row_squared_norms
from dpoptim.gradients.arithmetic.precision import exact_arithmetic
from dpoptim.gradients.arithmetic.products import add_weighted_outer, consecutive_groups, margin
from dpoptim.gradients.per_sample.per_sample_grads import zero_outside
from dpoptim.solvers import linear_sums

Loss = Literal["softmax", "logistic", "squared", "huber"]

FEW = 32  # outputs
# longer rows count as not finite: their products would leave the float32 range
LARGEST_ENTRY = 2.0**100


@dataclass(frozen=True)
class LinearModel:
    """A generalised linear model with parameters w in float64, shape (d,), d = outputs * columns.

    Args:
        loss: ``"softmax"``, ``"logistic"`` (binary, one output), ``"squared"`` or ``"huber"``.
        features: columns of x, at least 1.
        outputs: p, the classes of softmax (at least 2) or the targets of a regression.
        intercept: append a 1 to every record; w viewed as (outputs, columns) has the intercepts in
            its last column.
        huber_delta: where the Huber loss becomes linear, > 0.

    Raises:
        ValueError: a setting out of range.

    Examples:
        >>> from dpoptim.solvers import LinearModel
        >>> LinearModel("softmax", features=4, outputs=3).dimension
        15
    """

    loss: Loss
    features: int
    outputs: int = 1
    intercept: bool = True
    huber_delta: float = 1.0

    def __post_init__(self) -> None:
        one_of("loss", self.loss, get_args(Loss))
        if self.features < 1:
            raise ValueError(f"features must be at least 1, got {self.features!r}.")
        least, most = {"softmax": (2, math.inf), "logistic": (1, 1)}.get(self.loss, (1, math.inf))
        if not least <= self.outputs <= most:
            fix = (
                "use loss='softmax' for several classes"
                if self.loss == "logistic"
                else f"give at least {least}"
            )
            raise ValueError(f"outputs={self.outputs!r} does not fit loss={self.loss!r}; {fix}.")
        positive_number("huber_delta", self.huber_delta)

    @property
    def columns(self) -> int:
        """Columns of a record with its appended 1."""
        return self.features + int(self.intercept)

    @property
    def dimension(self) -> int:
        """d, the number of parameters."""
        return self.outputs * self.columns

    def scores(self, w: Tensor, x: Tensor) -> Tensor:
        """s of shape (B, p), dtype and device of ``x``, for x of shape (B, features).

        Few outputs lie in memory one after the other, not record by record: their products are
        twice as fast so.
        """
        matrix = w.view(self.outputs, self.columns).to(x)
        weight, bias = matrix[:, : self.features], matrix[:, self.features :]
        few = 1 < self.outputs <= FEW
        if rows_leave_mkl(x, self.outputs, self.features):
            scores = linear(x, weight, bias[:, 0] if self.intercept else None)
            return scores.T.contiguous().T if few else scores
        if few:
            return (torch.addmm(bias, weight, x.T) if self.intercept else torch.mm(weight, x.T)).T
        return torch.addmm(bias.T, x, weight.T) if self.intercept else torch.mm(x, weight.T)

    def residuals(self, scores: Tensor, y: Tensor) -> Tensor:
        """r of shape (B, p), in the scores' dtype; NaN, so counted as zero, for unknown classes."""
        if self.loss == "softmax":
            label = (
                (y.nan_to_num(-1.0) if y.is_floating_point() else y.long())
                .clamp(0, self.outputs - 1)
                .long()
            )
            r = scores.T.softmax(0).T if self.outputs <= FEW else scores.softmax(1)
            r.scatter_add_(1, label[:, None], -torch.ones_like(r[:, :1]))
            return r.masked_fill_((y != label)[:, None], torch.nan)
        if self.loss == "logistic":
            return scores.sigmoid() - y.to(scores.dtype)[:, None]
        target = y[:, None] if y.dim() == 1 else y.flatten(1)
        # targets may be large, and differ by little
        rest = (scores.double() - target.double()).to(scores.dtype)
        return rest if self.loss == "squared" else rest.clamp(-self.huber_delta, self.huber_delta)

    def losses(self, scores: Tensor, y: Tensor) -> Tensor:
        """Each record's loss, float64, shape (B,)."""
        s = scores.double()
        if self.loss == "softmax":
            return F.cross_entropy(s, y.long(), reduction="none")
        target = (y[:, None] if y.dim() == 1 else y.flatten(1)).double()
        if self.loss == "logistic":
            return (F.softplus(s) - target * s).sum(1)
        if self.loss == "squared":
            return (s - target).square().sum(1) / 2
        return F.huber_loss(s, target.expand_as(s), reduction="none", delta=self.huber_delta).sum(1)

    def lipschitz(self, radius: float) -> float:
        """L0, a bound on gradient norms where ``|(x, 1)| <= radius``; infinite for squared loss."""
        slope = {"softmax": math.sqrt(2), "logistic": 1.0, "squared": math.inf}
        return slope.get(self.loss, self.huber_delta * math.sqrt(self.outputs)) * radius

    def smoothness(self, radius: float) -> float:
        """L1: an upper bound on the curvature of a record's loss where ``|(x, 1)| <= radius``."""
        # the largest eigenvalues of the losses' Hessians by the scores
        curvature = {"softmax": 0.5, "logistic": 0.25}
        return curvature.get(self.loss, 1.0) * radius**2

    def squared_row_norms(self, x: Tensor) -> Tensor:
        """``|(x, 1)|^2`` of each record, float64, shape (B,)."""
        return row_squared_norms(x) + int(self.intercept)

    def clipped_sum(
        self,
        x: Tensor,
        y: Tensor,
        terms: Sequence[tuple[float, Tensor]],
        bound: float,
        *,
        capacity: int,
        squared_row_norms: Tensor | None = None,
        shares: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """``sum_i shares_i clip(weights_i sum_j c_j grad f(w_j; z_i), bound)``: float64, (d,).

        Private.

        Args:
            x: float32 or float64, shape (B, features); see `as_rows`.
            y: targets, as in the table above.
            terms: pairs (c_j, w_j), at least one; w_j float64 of shape (d,).
            bound: the largest norm of one record's combination, > 0; flat clipping.
            capacity: the most records that any logical sum holds (n, or
                `PoissonSampling.capacity`); public. Batches that belong to one logical sum may be
                added in float64. Rows are summed in consecutive groups, so the neighbour must keep
                every other record in its place (zero-out, replace-one).
            squared_row_norms: what `squared_row_norms` returns for x, to save computing it again.
            shares: how much of each row's clipped gradient is added; float64, shape (B,), >= 0,
                those of a record's rows together at most 1. None: every row is a record.
            weights: of each row's loss, float64, shape (B,); private. Any number does: what is
                clipped is the product.

        **Guarantee.** For two data sets that differ in one record, the sums differ by at most
        ``bound`` if the record is there in one only (twice that if it has another value), rounding
        included, whatever the records hold: what is not finite counts as zero. (`products` proves
        it. It does not cover that a matrix product rounds a row differently beside others. A
        record of several rows has part in as many of its groups; in float64, for which records of
        several rows are meant, the margin is enough for 10^5 groups. Where `linear_sums` serve, all
        of it is float64, and no row is rounded differently beside others.)
        """
        bound, scale = bound_and_power(bound)
        y = self._targets(x, y)
        self._refuse_shapes(x, [w for _, w in terms], squared_row_norms, shares, weights)
        if linear_sums.serve(x, self.outputs, self.columns):
            rows = self.squared_row_norms(x) if squared_row_norms is None else squared_row_norms
            share = margin(torch.float64, capacity, common_factor=False)
            total = linear_sums.clipped_sum(
                x,
                y,
                [w for _, w in terms],
                [c * scale for c, _ in terms],
                Clipping(bound).in_c(share),
                loss=self.loss,
                shape=(self.outputs, self.columns),
                huber_delta=self.huber_delta,
                longest=LARGEST_ENTRY**2,
                squared_row_norms=rows,
                shares=shares,
                weights=weights,
            )
            return total.view(-1).mul_(1 / scale)
        with torch.no_grad(), exact_arithmetic():
            # the very numbers that are summed
            g = self._combined(x, y, [(c * scale, w) for c, w in terms]).contiguous()
            if weights is not None:
                g.mul_(weights[:, None])
            rows = self.squared_row_norms(x) if squared_row_norms is None else squared_row_norms
            left = row_squared_norms(g)
            squared = left * rows
            squared.masked_fill_(torch.maximum(left, rows) > LARGEST_ENTRY**2, torch.inf)
            factors = Clipping(bound).factors(
                squared, margin(x.dtype, capacity, common_factor=False)
            )
            countable = factors > 0
            if not bool(countable.all()):
                g, x = zero_outside(g, countable), zero_outside(x, countable)
            if shares is not None:
                factors = factors * shares
            total = torch.empty(self.outputs, self.columns, dtype=torch.float64, device=x.device)
            weight = Sums([self.outputs, self.features], x.device)
            add_weighted_outer(weight, g, x, factors[None], consecutive_groups(len(x)))
            total[:, : self.features] = weight.settle()[0]
            if self.intercept:
                torch.mv(g.double().T, factors, out=total[:, -1])
            return total.view(-1).mul_(1 / scale)

    def _targets(self, x: Tensor, y: Tensor) -> Tensor:
        """Targets with one number a record, (B,), or one for each output, (B, p)."""
        rows = x.shape[:1]
        one_label = self.loss in ("softmax", "logistic")
        columns = 1 if y.dim() == 1 else math.prod(y.shape[1:])
        fits = y.dim() == 1 if one_label else y.dim() > 0 and columns in (1, self.outputs)
        if y.shape[:1] != rows or not fits:
            shape = "(B,)" if one_label else f"(B,) or (B, {self.outputs})"
            raise ValueError(
                f"y must have shape {shape} for loss={self.loss!r} and {self.outputs} outputs, "
                "with as many records as x."
            )
        if one_label or self.outputs == 1:
            return y.reshape(rows)
        return (y[:, None] if y.dim() == 1 else y.flatten(1)).expand(-1, self.outputs)

    def _refuse_shapes(self, x: Tensor, points: Sequence[Tensor], *known: Tensor | None) -> None:
        """Refuse what does not fit: compiled functions read numbers without asking for shapes."""
        if x.dim() != 2 or x.shape[1] != self.features:
            raise ValueError(
                f"x must have shape (B, {self.features}), as this LinearModel has features."
            )
        if any(w.numel() != self.dimension for w in points):
            raise ValueError(f"terms: each w must have {self.dimension} entries (dimension).")
        if any(each is not None and each.shape != x.shape[:1] for each in known):
            raise ValueError("squared_row_norms, shares and weights must have shape (B,), as x.")

    def _combined(self, x: Tensor, y: Tensor, terms: Sequence[tuple[float, Tensor]]) -> Tensor:
        """``sum_j c_j r_j`` of each record, (B, p), in x's dtype; differences taken in float64."""
        if len(terms) == 1:
            (coefficient, w) = terms[0]
            return self.residuals(self.scores(w, x), y).mul_(coefficient)
        total = torch.zeros(len(x), self.outputs, dtype=torch.float64, device=x.device)
        for coefficient, w in terms:
            total.add_(self.residuals(self.scores(w, x).double(), y), alpha=coefficient)
        return total.to(x.dtype)


def bound_and_power(bound: float) -> tuple[float, float]:
    """The bound times a power of two, out of where float32 is coarse; and that power."""
    if not 0 < bound <= LARGEST_ENTRY:
        raise ValueError(f"bound must be above 0 and at most {LARGEST_ENTRY:g}, got {bound!r}.")
    scale = 1.0 if bound >= SMALLEST_NORM else 2.0 ** (1 - math.frexp(bound)[1])
    return bound * scale, scale


def as_rows(values: Any) -> Tensor:
    """Rows of an array, memory map or tensor as a tensor: float64 stays, the rest is float32.

    A slice of a memory map is read here, so stream in chunks: ``as_rows(x[start:stop])``.
    """
    rows = as_tensor(values)
    return rows if rows.dtype == torch.float64 else rows.to(torch.float32)


def as_tensor(values: Any) -> Tensor:
    """A tensor as it is, anything else as a copy: norms are measured once, and hold for it."""
    return values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
