"""Answers about data for solvers: noisy gradients, norms and choices, each paid beforehand.

Prices are in ``rho = mu^2 / 2``. A solver sees only what this returns, so everything it computes
is post-processing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from dpoptim.accounting.filters import selection_epsilon
from dpoptim.accounting.guarantee import Guarantee
from dpoptim.accounting.ledger import Ledger
from dpoptim.distributed.rank_signals import RELEASE
from dpoptim.gate import FilteredGate
from dpoptim.gate.adaptive import accurate_norm
from dpoptim.noise.stream import key_stream
from dpoptim.solvers.budget import Budget
from dpoptim.solvers.objective import Objective
from dpoptim.solvers.problem import Terms
from dpoptim.statistics import guarantee_of

Kind = Literal["gradient", "difference", "norm", "selection", "statistics"]
# share of the budget that plans divide up, so that rounding cannot keep their last step out
PLANNED = 1 - 1e-10

SUREST_CHOICE = 40.0  # mu beyond which a selection has nothing left to gain


@dataclass(frozen=True)
class Step:
    """One release, all of it public.

    Attributes:
        kind: what was asked.
        rho: what it cost.
        noise: standard deviation on the mean over n records (of each coordinate; of the Gumbel
            noise for a selection).
        norm: Euclidean norm of the released vector, or the released number itself.
        step_size: how far the solver then went along it; 0 if it did not move.
    """

    kind: Kind
    rho: float
    noise: float
    norm: float
    step_size: float = 0.0


@dataclass(frozen=True)
class Result:
    """Result of a solver; all of it is covered by ``guarantee``, and may be published.

    Attributes:
        weights: float64, shape (d,).
        guarantee: of the whole budget, however much of it was spent; a ledger's budget gets the
            rest back.
        trace: every release, in order.
        iterates: the points visited, if the solver was asked to keep them.
    """

    weights: Tensor
    guarantee: Guarantee
    trace: tuple[Step, ...]
    iterates: tuple[Tensor, ...] = ()

    @property
    def rho_spent(self) -> float:
        """The sum of the prices; no guarantee where outputs decided when to stop."""
        return math.fsum(step.rho for step in self.trace)


class Releases:
    """Answers about one objective within one budget, which is reserved before the first of them.

    Args:
        objective: the private empirical risk.
        budget: what all answers together may cost.
        ledger: where it is charged; in memory by default.
        label: public text for the ledger's entry.
        noise_seed: makes the noise repeatable, for tests; the guarantee is then marked as not for
            release.

    **Guarantee.** All answers together are ``guarantee``, for every loss and however each question
    depends on earlier answers: the clipping bounds what a record can do to each, and the filter is
    asked before the noise is drawn.
    """

    def __init__(
        self,
        objective: Objective,
        budget: Budget,
        *,
        ledger: Ledger | None = None,
        label: str = "solver",
        noise_seed: int | None = None,
    ) -> None:
        self.objective, self.n, self.dimension = objective, objective.n, objective.dimension
        self.rho = budget.gdp**2 / 2 * PLANNED
        self.trace: list[Step] = []
        self._ranks = objective.ranks
        relation = objective.neighboring
        self._gate = FilteredGate(
            mu=budget.gdp,
            neighboring=relation,
            ledger=self._ranks.ledger(Ledger(neighboring=relation) if ledger is None else ledger),
            noise=key_stream(noise_seed, "gaussian noise"),
            label=label,
        )
        self.guarantee = guarantee_of(self._gate, budget.delta, noise_seed=noise_seed)
        self.neighbours_differ_by = self._gate.neighbours_differ_by  # m: 1, or 2 under replace-one
        self._asked: tuple[Terms, float, Tensor] | None = None  # of this process's records

    @property
    def rho_left(self) -> float:
        """The rest of the planned share. Public."""
        return max(0.0, self.rho - self._gate.filter.spent**2 / 2)

    def noise(self, bound: float, rho: float) -> float:
        """Standard deviation on the mean that a release with this bound and price will have."""
        return self._gate.deviation(bound, math.sqrt(2 * rho)) / self.n

    def price(self, bound: float, noise: float) -> float:
        """The rho that a standard deviation of ``noise`` on the mean costs; inverts `noise`."""
        return (self.neighbours_differ_by * bound / (self.n * noise)) ** 2 / 2

    def gradient(self, w: Tensor, *, lipschitz: float, rho: float) -> Tensor:
        """grad F(w) with noise, gradients clipped to ``lipschitz``; the public penalty on top."""
        released = self._mean("gradient", [(1.0, w)], lipschitz, rho)
        return released + self.objective.problem.penalty_gradient(w)

    def difference(self, new: Tensor, old: Tensor, *, bound: float, rho: float) -> Tensor:
        """grad F(new) - grad F(old) with noise, every record's difference clipped to ``bound``."""
        penalty = self.objective.problem.penalty_gradient
        released = self._mean("difference", [(1.0, new), (-1.0, old)], bound, rho)
        return released + penalty(new) - penalty(old)

    def gradient_norm(self, w: Tensor, *, lipschitz: float, rho: float) -> float:
        """|grad F(w)| with noise, gradients clipped to ``lipschitz``; may be negative."""
        public = self.n * self.objective.problem.penalty_gradient(w)
        bound, mu = lipschitz + rounding_of_norm(public), math.sqrt(2 * rho)
        released = self._answer(
            [[(1.0, w)]],
            lipschitz,
            mu,
            lambda sums: self._gate.release_norm(sums[0] + public, norm_bound=bound, mu=mu),
        )
        mean: float = released / self.n
        self.trace.append(Step("norm", rho, self.noise(bound, rho), mean))
        return mean

    def least_gradient(self, points: Sequence[Tensor], *, lipschitz: float, rho: float) -> int:
        """The index of a point of small gradient (Menart et al., Theorem 5), privately chosen."""
        mu = min(math.sqrt(2 * rho), SUREST_CHOICE)
        epsilon, rho = selection_epsilon(mu), mu**2 / 2
        public = [self.n * self.objective.problem.penalty_gradient(w) for w in points]
        bound = lipschitz + max(map(rounding_of_norm, public))

        def choose(sums: list[Tensor]) -> int:
            scores = [
                -accurate_norm(total + part) for total, part in zip(sums, public, strict=True)
            ]
            return self._gate.select(scores, norm_bound=bound, epsilon=epsilon)

        chosen: int = self._answer([[(1.0, w)] for w in points], lipschitz, mu, choose)
        scale = 2 * self.neighbours_differ_by * bound / (epsilon * self.n)
        self.trace.append(Step("selection", rho, scale * math.pi / math.sqrt(6), float(chosen)))
        return chosen

    def moved(self, step_size: float) -> None:
        """Note in the trace how far the solver went along the last release."""
        self.trace[-1] = replace(self.trace[-1], step_size=step_size)

    def result(self, weights: Tensor, iterates: Sequence[Tensor] = ()) -> Result:
        """Close the run."""
        self._asked = None
        self._gate.finish()
        return Result(weights, self.guarantee, tuple(self.trace), tuple(iterates))

    def _mean(self, kind: Kind, terms: Terms, bound: float, rho: float) -> Tensor:
        mu = math.sqrt(2 * rho)
        released = self._answer(
            [terms],
            bound,
            mu,
            lambda sums: self._gate.release_sum(sums[0], norm_bound=bound, mu=mu),
        )
        mean: Tensor = released / self.n
        self.trace.append(Step(kind, rho, self.noise(bound, rho), float(mean.norm())))
        return mean

    def _answer(
        self,
        questions: Sequence[Terms],
        bound: float,
        mu: float,
        release: Callable[[list[Tensor]], Any],
    ) -> Any:
        """The answer that ``release`` makes of the clipped sums over the records of all processes.

        In several, the questions and the bound are rank 0's, since another processor may round
        what was released otherwise; rank 0 alone has the sums, and draws. It has reserved the
        budget before a sum reaches it.
        """
        ranks, number = self._ranks, len(self.trace)
        if ranks.size == 1:
            return release([self._sum(terms, bound) for terms in questions])
        ranks.begin(RELEASE, number)
        questions, bound = ranks.from_first(lambda: (questions, bound))
        own = [self._sum(terms, bound) for terms in questions]
        ranks.begin(RELEASE, number)  # no rank has failed at its sum
        self._gate.open(mu)
        sums = [ranks.total(each) for each in own]
        answer = ranks.from_first(lambda: release(sums))
        if ranks.rank > 0:
            self._gate.count(mu)
        return answer

    def _sum(self, terms: Terms, bound: float) -> Tensor:
        """This process's clipped sum, private; kept, as norm and gradient often share one."""
        if self._asked is not None and same_question(self._asked[:2], (terms, bound)):
            return self._asked[2]
        total = self.objective.clipped_sum(terms, bound)
        self._asked = ([(c, w.clone()) for c, w in terms], bound, total)
        return total


def rounding_of_norm(public: Tensor) -> float:
    """Rounding's part in a record's effect on the norm of (a private sum + ``public``).

    The addition rounds each entry to 2^-53 of its value, and `accurate_norm` the norm to 2^-52: in
    two worlds 3 * 2^-52 of the length. Beside 10^17 a record that adds 1 can move a norm by 16.
    """
    return 2.0**-50 * accurate_norm(public)


def same_question(asked: tuple[Terms, float], now: tuple[Terms, float]) -> bool:
    """Whether two sums combine the same points, with the same bound; all public."""
    if asked[1] != now[1] or len(asked[0]) != len(now[0]):
        return False
    return all(
        c == b and torch.equal(w, v) for (c, w), (b, v) in zip(asked[0], now[0], strict=True)
    )


def starting_point(w0: Tensor | None, objective: Objective) -> Tensor:
    """``w0`` as a fresh float64 vector; the problem's own starting point by default.

    Raises:
        ValueError: a wrong shape, or entries that are not finite.
    """
    if w0 is None:
        return objective.problem.initial()
    if w0.shape != (objective.dimension,) or not bool(torch.isfinite(w0).all()):
        raise ValueError(
            f"w0 must be a finite vector of shape ({objective.dimension},), got shape "
            f"{tuple(w0.shape)}; it must not depend on the data."
        )
    return w0.double().clone()
