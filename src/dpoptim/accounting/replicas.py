"""Several copies of one record's steps, weighted by how their outputs agree: by a transfer matrix.

A record's steps are a pattern B of b-min-sep sampling (`sampling.min_separation`), its part of the
outputs is ``m_B``, the sum of the columns of B, and ``L = E_B exp(<m_B, y> - |m_B|^2 / 2)`` is the
likelihood ratio of outputs y under unit noise. For a whole number a >= 2,

    L^a = E over B_1, ..., B_a, independent, of exp(<sum_i m_i, y> - sum_i |m_i|^2 / 2),

so under noise Q alone ``Z = E_Q L^a = E exp(sum_(i < j) <m_i, m_j>)``, and ``Q L^a / Z`` is a
mixture of Gaussians around ``sum_i m_i``, whose tuples (B_1, ..., B_a) have that weight. Columns
that are b steps apart or more are orthogonal, so the weight is a product over steps: whoever takes
part at step t adds the inner product with each copy that did so d < b steps ago, and with each that
does now. The law is that of a Markov chain whose state is for how many steps each copy must still
wait, copies not told apart: Z is a sum by recursion from the last step, tuples are drawn from the
first on. Neither is an approximation.
"""

import itertools
import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.special import comb, gammaln, xlog1py, xlogy

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def states_of(copies: int, separation: int) -> int:
    """States of the chain: multisets of waiting times."""
    return math.comb(copies + separation - 1, copies)


class Replicas:
    """The chain of one run.

    Args:
        copies: a >= 1. rate: p, the chance of whoever need not wait, in (0, 1].
        products: of each step's column with that of d steps before, over the noise's variance;
            shape (steps, separation).

    Attributes:
        log_moment: log Z.
    """

    def __init__(self, copies: int, rate: float, products: Floats) -> None:
        self.copies, self._products = copies, products
        self.steps, separation = products.shape
        waits = np.array(
            list(itertools.combinations_with_replacement(range(separation), copies)),
            dtype=np.int64,
        ).reshape(-1, copies)
        places = separation ** np.arange(copies - 1, -1, -1)
        codes = waits @ places  # ascending
        free = (waits == 0).sum(1)
        # a copy that must wait r more steps took part separation - r steps ago
        self._ago = np.where(waits == 0, separation, separation - waits)
        self._rows: list[Integers] = []
        self._next: list[Integers] = []
        self._log_chances: list[Floats] = []
        self._weighted: tuple[int, list[Floats]] | None = None
        for joining in range(copies + 1):
            rows = np.flatnonzero(free >= joining)
            after = np.maximum(waits[rows] - 1, 0)
            after[:, :joining] = separation - 1  # the free come first
            chance = xlogy(joining, rate) + xlog1py(free[rows] - joining, -rate)
            self._rows.append(rows)
            self._next.append(np.searchsorted(codes, np.sort(after, axis=1) @ places))
            self._log_chances.append(chance + np.log(comb(free[rows], joining)))
        waiting = copies - free
        counts = np.stack([(waits == r).sum(1) for r in range(separation)])
        share = 1 / (1 + (separation - 1) * rate)  # of the free; each wait's is rate times that
        self._start = np.exp(
            gammaln(copies + 1)
            - gammaln(counts + 1).sum(0)
            + copies * math.log(share)
            + xlogy(waiting, rate)
        )
        self._block = max(1, math.isqrt(self.steps))
        self._kept = {self.steps: np.ones(len(waits))}  # sums over all later steps, up to a factor
        self.log_moment = self._sum_up()

    def _weights(self, step: int) -> list[Floats]:
        """Weights of 0, 1, ... copies that take part, for the states where so many may."""
        products = self._products[step]
        if self._weighted and np.array_equal(self._products[self._weighted[0]], products):
            return self._weighted[1]
        met = np.append(products, 0.0)[self._ago].sum(1)
        weights = [
            np.exp(chances + products[0] * joining * (joining - 1) / 2 + joining * met[rows])
            for joining, (rows, chances) in enumerate(
                zip(self._rows, self._log_chances, strict=True)
            )
        ]
        self._weighted = step, weights
        return weights

    def _sum_up(self) -> float:
        after, log_scale = self._kept[self.steps], 0.0
        for step in range(self.steps - 1, -1, -1):
            after = self._before(step, after)
            largest = float(after.max())
            after /= largest
            log_scale += math.log(largest)
            if step % self._block == 0:
                self._kept[step] = after
        return log_scale + math.log(float(self._start @ after))

    def _before(self, step: int, after: Floats) -> Floats:
        """The sums from a step on, by those after it."""
        none, *some = self._weights(step)
        sums = none * after[self._next[0]]
        for rows, following, weights in zip(self._rows[1:], self._next[1:], some, strict=True):
            sums[rows] += weights * after[following]
        return sums

    def _sums(self) -> Iterator[tuple[Floats, Floats]]:
        """Sums after step 0, 1, ..., each up to a factor, and from it on; made anew in blocks."""
        for start in range(0, self.steps, self._block):
            end = min(start + self._block, self.steps)
            after, block = self._kept[end], []
            for step in range(end - 1, start - 1, -1):
                before = self._before(step, after)
                block.append((after, before))
                after = before / before.max()
            yield from reversed(block)

    def draw(self, samples: int, rng: np.random.Generator) -> sparse.csr_matrix:
        """How many copies of each tuple take part in each step; shape (samples, steps)."""
        first = np.cumsum(self._start * self._kept[0])
        state = np.searchsorted(first, rng.random(samples) * first[-1], side="right")
        state = np.minimum(state, len(first) - 1)
        steps, tuples, counts = [], [], []
        for step, (after, before) in enumerate(self._sums()):
            share = self._weights(step)[0] * after[self._next[0]] / before
            moved = np.flatnonzero(rng.random(samples) >= share[state])
            joining, following = self._moves(step, state[moved], after, rng)
            state = self._next[0][state]
            state[moved] = following
            steps.append(np.full(len(moved), step))
            tuples.append(moved)
            counts.append(joining)
        return sparse.csr_matrix(
            (np.concatenate(counts), (np.concatenate(tuples), np.concatenate(steps))),
            shape=(samples, self.steps),
        )

    def _moves(
        self, step: int, state: Integers, after: Floats, rng: np.random.Generator
    ) -> tuple[Integers, Integers]:
        """How many copies of each tuple take part, one at least, and the states after that."""
        chances = np.zeros((self.copies, len(state)))
        following = np.zeros((self.copies, len(state)), dtype=np.int64)
        for joining in range(1, self.copies + 1):
            rows = self._rows[joining]
            place = np.minimum(np.searchsorted(rows, state), len(rows) - 1)
            able = rows[place] == state
            following[joining - 1] = self._next[joining][place]
            weights = able * self._weights(step)[joining][place]
            chances[joining - 1] = weights * after[following[joining - 1]]
        cumulated = np.cumsum(chances, axis=0)
        chosen = (cumulated <= rng.random(len(state)) * cumulated[-1]).sum(0)
        # rounding must not choose what cannot be
        most = self.copies - 1 - np.argmax(chances[::-1] > 0, axis=0)
        chosen = np.minimum(chosen, most)
        return chosen + 1, following[chosen, np.arange(len(state))]
