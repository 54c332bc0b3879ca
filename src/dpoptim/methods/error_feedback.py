"""Clipped error feedback with a proof: what one record can do to a run whose hidden state remembers it.

A run keeps a vector e (left of the gate, never released) and releases, for step t, ``v_t + w_t`` with

    v = sum_i clip(g_i, C1) + clip(e, c),      e <- e - clip(e, c) + sum_i (clip(g_i, R) - clip(g_i, C1)).

All in units of the *sum*: c = B C2. Each record takes part in at most k steps of the run, by an order that depends on no
record. Write a = C1, rho = R - C1 (both doubled under replace-one).

**Theorem.** Under zero-out the run is mu-GDP with mu = S / sigma, sigma the standard deviation of w, if S^2 is at least the
smallest of

1. ``k (a^2 + rho^2) + k (k - 1) rho max(a, rho)``,
2. ``k a^2 + 2 k c rho + 2 a (k - 1) min(2 c, sqrt(2 c rho))``,
3. ``k a^2 + (k rho)^2 + 2 a (k - 1)^(3/2) rho``;

for k = 1, ``a^2 + rho min(rho, 2 c)``; and if e is set to zero after every pass, k times that.

*Proof.* Fix what was released; both worlds then compute the same gradients for all other records. Let d be the difference
of their e, delta that of their clip(e, c), h = d - delta, D = |d|. Projecting onto a ball is firmly non-expansive:
<delta, h> >= 0, so |delta|^2 + |h|^2 <= D^2. A step without the record shifts v by delta and leaves |h| <= D. In a step
with it, the record adds alpha u to v and beta u to e, for one unit vector u, 0 <= alpha <= a, 0 <= beta <= rho.

1. |delta + alpha u|^2 + |h + beta u|^2 <= D^2 + a^2 + rho^2 + 2 |alpha delta + beta h|, and the last norm is at most
   max(a, rho) D, because <delta, h> >= 0. So (squared shifts so far) + D^2 grows by that much at a participation, and
   not otherwise; D is at most (j - 1) rho at the j-th. Sum over j. (Under replace-one two records move apart, each along
   a direction of its own: the same with 2 a and 2 rho.)
2. A step's squared shift is at most |delta|^2, plus a^2 + 2 a |delta| where the record takes part. For a ball even
   <delta, h> >= |h| |delta|^2 / (2 c), so |delta|^2 <= 2 c (D - |h|), which telescopes: until D has grown j times by rho,
   all |delta|^2 together are at most 2 c j rho. Of the |delta| of participations the first is zero, the other k - 1 are
   at most 2 c each, and by Cauchy and Schwarz (k - 1) sqrt(2 c rho) together, since j = k - 1 at the last of them.
3. The same with another bound on all |delta|^2: (sum of |delta|^2) + D^2 does not grow without the record, and its root
   grows by at most rho with it, so until then they are at most (j rho)^2.

The squared shifts of all steps add up to at most S^2 on every path. Conditional on the order of the data, the transcript
determines the shifts, the noise has one covariance; padding with a Gaussian of squared shift S^2 - (sum so far) makes the
log-likelihood ratio exactly normal, so the run is one Gaussian of shift S. QED.

What would amplify this by Poisson sampling would have to be proved: a record drawn once stays in e and moves every later
step, so the steps are no longer independent draws, and neither amplification per step nor its composition applies.
"""

import math
from typing import NoReturn

import torch
from torch import Tensor

ROUNDING = 1 + 2.0**-16  # covers float64: e is kept to 2^-53 of its length, over at most 10^7 steps


def run_sensitivity(*, clip: float, residual: float, feedback: float, participations: int, reset: bool) -> float:
    """S of the theorem, under zero-out, rounded up.

    Args:
        clip: C1 = a, > 0.
        residual: R - C1 = rho, >= 0; infinite if nothing bounds what enters the state.
        feedback: c = B C2, >= 0: what the state may add to one sum.
        participations: k, passes over the data.
        reset: whether the state is set to zero after every pass.
    """
    a, rho, c, k = clip, residual, feedback, participations
    once = a**2 + min(rho**2, 2 * c * rho)
    if k == 1 or reset:
        return math.sqrt(k * once) * ROUNDING
    squares = (
        k * (a**2 + rho**2) + k * (k - 1) * rho * max(a, rho),
        k * a**2 + 2 * k * c * rho + 2 * a * (k - 1) * min(2 * c, math.sqrt(2 * c * rho)),
        k * a**2 + (k * rho) ** 2 + 2 * a * (k - 1) ** 1.5 * rho,
    )
    return math.sqrt(min(squares)) * ROUNDING


class ErrorFeedback:
    """The hidden state e of one run: what clipping took off and has not been fed back yet. Private.

    Args:
        feedback: c, the most that it adds to one sum, in Euclidean norm.
        pass_steps: steps after which it is set to zero; None: never.
        softening: 0 feeds back the projection of e onto the ball of radius c; above 0, ``c e / (|e| + softening)``, which is
            what the paper's automatic variant does (with 0.01, for which the theorem above does not hold).
    """

    def __init__(self, feedback: float, pass_steps: int | None, softening: float = 0.0) -> None:
        self._feedback, self._pass_steps, self._softening = feedback, pass_steps, softening
        self._error: list[Tensor] | None = None
        self._steps = 0

    def query(self, sums: list[list[Tensor]]) -> list[Tensor]:
        """Add the fed-back part to the clipped sum (in place), and take the residual sum into the state.

        **Guarantee.** The theorem of this module, if a record moves the first sum by at most C1 and the second by at most
        R - C1.
        """
        clipped, residual = sums
        if self._error is None:
            self._error = [torch.zeros_like(part) for part in clipped]
        share = self._share()
        for error, total, rest in zip(self._error, clipped, residual, strict=True):
            total.add_(error, alpha=share)
            error.mul_(1 - share).add_(rest)
        self._steps += 1
        if self._pass_steps is not None and self._steps % self._pass_steps == 0:
            for error in self._error:
                error.zero_()
        return clipped

    def _share(self) -> float:
        """The share of e that is fed back."""
        assert self._error is not None
        length = math.sqrt(sum(float(error.square().sum()) for error in self._error))
        if self._softening > 0:
            return self._feedback / (length + self._softening)
        return min(1.0, self._feedback / length) if length > 0 else 1.0

    def __repr__(self) -> str:
        return "<ErrorFeedback: private>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("the error state cannot be pickled or copied: it holds sums without noise.")
