"""Balls in bins (Chua et al. 2025; Choquette-Choo et al. 2025): each record is in one of the bins.

It takes part in every step of its bin ("Near-exact privacy amplification for matrix mechanisms").

Batches are those of a shuffled order, but for their sizes, and so is the cost of reading them; as
nobody is told a record's bin, its whereabouts hide it as the coins of Poisson sampling do. Unlike
these they do so for any strategy C >= 0, however many bands it has.

**Theorem.** Let C be lower-triangular with entries >= 0, and let a record's set of steps be drawn,
from any law that looks at nothing, as one of sets A_1, ..., A_b. Put ``m_j = C 1_{A_j}``. A run
with noise z of standard deviation s is dominated by the pair of ``N(m_j, s^2 I)``, j drawn,
against ``N(0, s^2 I)``, also where gradients depend on what was released before; and by any pair
whose means have inner products that are at least as large.

*Proof.* What the other records put in is a function of what was released before, and subtracted.
Without the record the rows y_1, y_2, ... are noise; with it, and set A_j, row t is shifted by
``v_j(t) = sum_(r <= t, r in A_j) C_tr g_r``, where g_r, at most 1 long, is a function of the rows
before r. The likelihood ratio is ``L = E_j exp(sum_t <v_j(t), y_t> / s^2 - |v_j(t)|^2 / (2 s^2))``,
and both directions' deltas are E f(L), f convex, over the noise. Kahane's inequality: for Gaussian
vectors X, Y with ``Cov X <= Cov Y`` entry by entry, ``E f(sum_j w_j exp(X_j - Var X_j / 2))`` is at
most that of Y. Let U_t(w) be E f of the ratio of the rows after t, for weights w_j, where all g
are one and the same unit vector. Claim: no adaptive choice of the g after t makes E f larger than
U_t, whatever the g up to t were. After the last row there is nothing to choose. Else, given
everything before row t, E f is at most ``E U_t(w exp(<v(t), y_t> / s^2 - ...))``, which is E f over
a Gaussian vector whose covariances are ``<v_i(t), v_j(t)> / s^2`` plus those of the later rows; as
C >= 0 the former are largest where all g are one unit vector; by Kahane's inequality U_(t-1) is at
least as large. At t = 0 this is the theorem, and the last part is Kahane's inequality again. QED.
"""

import math
from dataclasses import dataclass

import dp_accounting
import numpy as np
from scipy.linalg import toeplitz

from dpoptim.accounting.balls_in_bins import BallsInBinsDpEvent
from dpoptim.sampling.cyclic_poisson import CyclicPoissonSampling
from dpoptim.sampling.sampler import Floats


@dataclass(frozen=True)
class BallsInBins(CyclicPoissonSampling):
    """Step t takes the records of bin t modulo ``parts``: all of them.

    Args:
        sample_rate: 1 / parts. parts: bins, >= 1.
    """

    relations = ("add-or-remove-one", "zero-out")
    by_coins = False

    @classmethod
    def of(cls, bins: int) -> "BallsInBins":
        """With so many bins."""
        return cls(1 / bins, bins)

    @property
    def rate(self) -> float:
        return 1.0

    @property
    def regular(self) -> bool:
        return True

    def event(self, noise_multipliers: Floats) -> dp_accounting.DpEvent:
        """The mixture of the bins, of independent noise."""
        steps = np.arange(len(noise_multipliers))
        means = np.zeros((len(steps), self.parts))
        means[steps, steps % self.parts] = noise_multipliers.min() / noise_multipliers
        return mixture_event(means, float(noise_multipliers.min()), 1.0)

    def promise(self) -> str:
        return (
            f"each record is in one of {self.parts} bins, by a coin of its own, and takes part in "
            f"one step in {self.parts}, its bin's"
        )


def mixture_event(means: Floats, noise_multiplier: float, sensitivity: float) -> BallsInBinsDpEvent:
    """The event of a strategy, by the theorem.

    Args:
        means: m_j as columns, shape (steps, bins), entries >= 0.
        noise_multiplier: the noise's standard deviation over ``sensitivity``.
        sensitivity: what the noise is scaled by, > 0.

    Raises:
        ValueError: an entry of ``means`` is negative, so that the theorem does not hold.
    """
    if means.min() < 0:
        raise ValueError("means has negative entries; balls in bins need a strategy C >= 0.")
    gram = means.T @ means / sensitivity**2
    lags = np.array([np.diagonal(gram, lag).max() for lag in range(means.shape[1])])
    # a Toeplitz matrix of maxima need not be one of inner products; a longer diagonal makes it one
    least = float(np.linalg.eigvalsh(toeplitz(lags))[0])
    lags[0] += max(0.0, -least)
    lags *= 1 + 1e-12  # rounding
    return BallsInBinsDpEvent(noise_multiplier, tuple(lags.tolist()))


def bins_of(n: int, batch_size: int) -> int:
    """Bins that hold ``batch_size`` records or a few less on average."""
    return max(1, math.ceil(n / batch_size))
