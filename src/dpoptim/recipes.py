"""Defaults from public numbers: by the heuristic of `dpoptim plan`, or found on public images."""

import math
from dataclasses import dataclass, replace

from dpoptim.gate.queries import CorrelatedSum
from dpoptim.methods.method import TrainingMethod
from dpoptim.optimizers import OptimizerSettings
from dpoptim.plan import Plan
from dpoptim.planning.choice import cheapest_of_the_best, taken_back
from dpoptim.planning.ranking import REACH, adaptive_learning_rate, learning_rate
from dpoptim.planning.sweep import MOST_STEPS as MOST
from dpoptim.planning.sweep import Question, candidates
from dpoptim.planning.targets import EpsilonAtMost, NotEstimatedError

GREY_FEATURES = 81 * 7 * 7  # scattering features of an image of 28 x 28, by which rates were found
MOST_STEPS = 1_000  # of a planned default: more gain little, and take their time


@dataclass(frozen=True)
class Recipe:
    """How to train a model well under a budget.

    Attributes:
        batch_size: expected batch; large batches make the noise small relative to the sum.
        epochs: passes over the data.
        clip_norm: bound on each record's gradient, which ``learning_rate`` is for.
        learning_rate, momentum: of SGD; other optimizers have rates of their own (`rate_of`).
        walk: the farthest that a run's noise may move a weight, one standard deviation; see
            `steady_rate`.
        reach: how far it moves all weights together by an adaptive optimizer; see `rate_of`.
        averaged: share of the last steps whose iterates are averaged into the result
            (post-processing, free).
        physical_batch_size: rows at a time; None: the whole batch.
    """

    batch_size: int
    epochs: float
    clip_norm: float
    learning_rate: float
    momentum: float
    averaged: float
    physical_batch_size: int | None
    walk: float = math.inf
    reach: float = REACH


def recipe(
    model: str, n: int, features: str | None = None, views: int = 1, size: int = GREY_FEATURES
) -> Recipe:
    """The defaults for a softmax, mlp or cnn model on ``n`` records (n is public).

    Tuned on Fashion-MNIST (public), and on made-up colour images (`choose_scattering.py`). The
    batch is a fixed share of n, and larger on small data.

    Args:
        features: ``"scattering"``: of images, large and of similar norms, so that nearly every
            gradient is clipped.
        views: of each image; what several show takes longer to learn.
        size: numbers in a record. Scattering features, brought to deviation 1, have a norm of
            about its root; weights of linear models are as small as rows are long, and the CNN's,
            which are more, take steps as small.
    """

    def part(share: int) -> int:
        return min(n, max(512, n // share))

    shorter = math.sqrt(GREY_FEATURES / size)
    if model == "softmax" and features == "scattering":
        return Recipe(
            batch_size=part(7),
            epochs=40,
            clip_norm=1.0,
            learning_rate=float(f"{0.75 * shorter:.2g}"),
            momentum=0.9,
            averaged=0.2,
            physical_batch_size=None,
            walk=0.1 * shorter,
        )
    if model == "softmax":
        return Recipe(part(15), 40, 1.0, 2.0, 0.9, 0.5, None, reach=2 * REACH)
    if model == "mlp":
        return Recipe(part(15), 40, 1.0, 1.0, 0.9, 0.5, None, reach=2 * REACH)
    rate = float(f"{min(1.0, shorter):.2g}") if features == "scattering" else 1.0
    # views take more steps to learn, so each is of fewer images
    share = 15 if views == 1 else 20
    return Recipe(part(share), 30, 1.0, rate, 0.9, 0.3, max(512, views), walk=0.3)


def steady_rate(base: Recipe, plan: Plan) -> float:
    """The learning rate of ``base``, or less where the plan's noise would move weights too far.

    On few records the noise of a mean is large; a rate that suits many lets it drown what is
    learnt. Public numbers only: batch, steps, noise, momentum. Two digits, where it is less.

    Args:
        base: whose rate is for a clip norm of 1.
        plan: of a method that trains step by step.
    """
    moved = noise_walk(plan) / (1 - base.momentum)
    if math.isnan(moved) or base.learning_rate * moved <= base.walk:
        return base.learning_rate  # also where nothing is known
    return float(f"{base.walk / moved:.2g}")


def rate_of(base: Recipe, plan: Plan, by: OptimizerSettings, parameters: int) -> float:
    """The learning rate of an optimizer, from public numbers.

    Args:
        base: whose rate is of SGD, for its momentum and a clip norm of 1.
        plan: of a method that trains step by step.
        parameters: numbers that are trained.
    """
    if by.kind.adaptive:
        reach = min(base.reach, base.walk * math.sqrt(parameters))
        return adaptive_learning_rate(parameters, plan.steps, taken_back(plan), reach)
    return steady_rate(base, plan)


def for_numbers(base: Recipe, parameters: int) -> Recipe:
    """``base`` for a number to predict: noise may move all weights together an eighth as far.

    Weights that noise has moved far cost a squared loss more than they cost cross-entropy. The
    eighth was chosen on made-up tables (`benchmarks/choose_rates.py`).
    """
    return replace(base, walk=min(base.walk, REACH / 8 / math.sqrt(parameters)))


def noise_walk(plan: Plan) -> float:
    """How far noise has moved each weight after the last step, at rate 1 without momentum.

    ``nan`` for another package's correlated noise that does not say what it leaves.
    """
    query = plan.query
    if isinstance(query, CorrelatedSum):
        if not hasattr(query.strategy, "prefix_std"):
            return math.nan
        # stated for 1-GDP of one participation, with the noise that this takes
        left = float(query.strategy.prefix_std(plan.steps)[-1])
        left /= query.strategy.sensitivity(plan.steps)
        return query.standard_deviation * left / plan.batch_size
    return math.hypot(
        *(query.deviation(step) / plan.expected_batch(step) for step in range(plan.steps))
    )


def planned(
    base: Recipe,
    method: TrainingMethod,
    n: int,
    parameters: int,
    target: EpsilonAtMost,
    *,
    clip_norm: float = 1.0,
    batch_size: int | None = None,
    epochs: float | None = None,
) -> Recipe:
    """``base`` with batch size, epochs, learning rate as `dpoptim plan` has for linear models.

    In simulations on five public and made-up tables at epsilon 1, without the limit on steps, it
    was from 1 point below ``base`` to 11 above.

    Args:
        method: by which it is trained.
        n, parameters, target: public.
        clip_norm: other than 1, it divides the learning rate: only their product matters.
        batch_size, epochs: where they are given; the learning rate follows them.
    """
    question = Question(
        n,
        parameters,
        target,
        batch_size=batch_size,
        epochs=epochs,
        most_steps=MOST_STEPS if batch_size is None or epochs is None else MOST,
    )
    try:
        found = [each for each in candidates(question, method) if each.method == method]
    except NotEstimatedError:  # there is nothing to plan with
        return base
    if not found:
        return base
    chosen = cheapest_of_the_best(sorted(found, key=lambda setting: setting.error))
    rate = learning_rate(
        chosen.noise_to_signal, chosen.run.batch_size, chosen.run.steps, base.momentum
    )
    return replace(
        base,
        batch_size=chosen.run.batch_size,
        epochs=chosen.epochs if epochs is None else epochs,
        clip_norm=clip_norm,
        learning_rate=rate / clip_norm,
    )
