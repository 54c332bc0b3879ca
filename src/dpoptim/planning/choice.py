"""From a question to one setting with its exact noise, and what should give pause."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dpoptim.accounting.guarantee import Guarantee
from dpoptim.accounting.public_numbers import doubts, usual_delta
from dpoptim.mechanisms.mechanism import StepMechanism
from dpoptim.plan import Plan, make_plan
from dpoptim.planning.ranking import noise_to_signal, predicted_error
from dpoptim.planning.sweep import Question, Setting, sweep
from dpoptim.planning.targets import EpsilonAtMost, exact_noise

CLOSE = 1.05  # predicted errors that count as equal: between these the cheapest is taken
MOST_NOISE = 0.1  # over the longest gradient, averaged over the run
FEW = 500  # records; below, predicted ranks hardly agree with measured ones
# of measured and predicted ranks (docs/guides/settings.md)
PREDICTED = (
    "Ranks are predicted: from 1,000 records on their correlation with measured ones was 0.4 to 1, "
    "and the predicted best setting 1.4 points short of the best at most"
)


@dataclass(frozen=True)
class Plans:
    """The answer.

    Attributes:
        question: what was asked.
        settings: all of them, best predicted first.
        chosen: the cheapest whose predicted error is within 5 % of the best, with its exact noise.
        plan: the chosen setting as a plan. warnings: for people.
    """

    question: Question
    settings: tuple[Setting, ...]
    chosen: Setting
    plan: Plan
    warnings: tuple[str, ...]

    @property
    def best_of_each(self) -> tuple[Setting, ...]:
        """The best predicted setting of every method and way of sampling."""
        found: dict[str, Setting] = {}
        for setting in self.settings:
            found.setdefault(setting.name, setting)
        return tuple(found.values())


def choose(question: Question, *, delta: float | None = None) -> Plans:
    """Compare all settings by estimates, take one, and calibrate that one exactly.

    Args:
        delta: where the plan's guarantee is stated; None: the target's own, or one over ten
            times the number of records, rounded down to a power of ten.

    Raises:
        ValueError: nothing is left to choose from, or the target cannot be met.
    """
    if delta is None:
        target = question.target
        delta = target.delta if isinstance(target, EpsilonAtMost) else usual_delta(question.n)
    settings = sweep(question)
    setting = cheapest_of_the_best(settings)
    noise = exact_noise(question.target, setting.method.mechanism, setting.run)
    plan = make_plan(
        setting.method,
        n=question.n,
        batch_size=setting.run.batch_size,
        steps=setting.run.steps,
        noise_multiplier=noise,
        delta=delta,
        neighboring=setting.run.neighboring,
    )
    plan = replace(plan, unit=question.unit)
    effective = noise * setting.method.mechanism.prefix_noise(setting.run)
    ratio = noise_to_signal(effective, question.parameters, setting.run.batch_size)
    chosen = replace(
        setting,
        noise_multiplier=noise,
        noise_to_signal=ratio,
        error=predicted_error(ratio, setting.run.batch_size, setting.run.steps),
    )
    remaining = ratio / setting.run.steps**0.5
    warnings = warnings_about(plan.guarantee, question.n, question.parameters, remaining)
    if question.n < FEW:
        warnings.append(
            f"below {FEW} {question.unit.name}s ranks are hardly better than a guess (correlation "
            "with measured ones -0.2 to 0.7), and the predicted best was up to 4.3 points short of "
            "the best setting. Fix: compare settings on public data like yours (dpoptim tune "
            "--public-data)"
        )
    return Plans(question, tuple(settings), chosen, plan, tuple(warnings))


def cheapest_of_the_best(settings: Sequence[Setting]) -> Setting:
    """The quickest setting, by time or gradients, within 5 % of the best, which comes first."""
    good = [each for each in settings if each.error <= CLOSE * settings[0].error]
    return min(good, key=lambda each: (each.seconds or 0.0, each.records, each.error))


def warnings_about(guarantee: Guarantee, n: int, parameters: int, remaining: float) -> list[str]:
    """Warnings that a person should read before relying on a plan; public.

    Args:
        remaining: noise-to-signal ratio of the whole run: of a step, over the root of their number.
    """
    found = list(doubts(guarantee.epsilon, guarantee.delta, n))
    if remaining > MOST_NOISE:
        records = n * remaining / MOST_NOISE
        found.append(
            f"n = {n:,} is small for {parameters:,} parameters: averaged over the whole "
            f"run the noise is still {remaining:.2f} of the longest gradient. Fix: about "
            f"{rounded_records(records)} records, fewer parameters, or a larger epsilon"
        )
    return found


def warnings_about_plan(plan: Plan, parameters: int) -> list[str]:
    """`warnings_about` a plan that trains so many parameters; none without noise."""
    if plan.noise_multiplier == 0:
        return []
    ratio = noise_to_signal(effective_noise(plan), parameters, plan.batch_size)
    return warnings_about(plan.guarantee, plan.n, parameters, ratio / plan.steps**0.5)


def effective_noise(plan: Plan) -> float:
    """The noise of a step over the clip norm that, drawn anew in each, leaves as much in sums.

    For mechanisms that correlate steps, and those whose whole run is one Gaussian, it differs from
    the plan's noise multiplier.
    """
    mechanism = plan.mechanism
    if isinstance(mechanism, StepMechanism):
        return plan.noise_multiplier * mechanism.prefix_noise(plan.shape)
    return plan.noise_multiplier


def taken_back(plan: Plan) -> float:
    """Noise of a step as it is drawn, over that of `effective_noise`: 1 where steps are apart.

    Above 1 where later steps take noise back; ``nan`` where the mechanism does not tell.
    """
    assert isinstance(plan.mechanism, StepMechanism)
    query = plan.mechanism.query(plan.shape, 1.0, 1.0)
    drawn = math.hypot(*map(query.released_deviation, range(plan.steps))) / math.sqrt(plan.steps)
    return drawn / plan.mechanism.prefix_noise(plan.shape)


def rounded_records(records: float) -> str:
    """Two digits of a number of records."""
    return f"{float(f'{records:.2g}'):,.0f}"
