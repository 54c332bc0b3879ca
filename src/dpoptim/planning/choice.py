"""From a question to one setting with its exact noise, and what should give pause."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dpoptim.accounting.guarantee import Guarantee, rounded_up
from dpoptim.plan import Plan, make_plan
from dpoptim.planning.heuristic import noise_to_signal, predicted_error
from dpoptim.planning.sweep import Question, Setting, sweep
from dpoptim.planning.targets import EpsilonAtMost, exact_noise

CLOSE = 1.05  # predicted errors that count as equal: between these the cheapest is taken
LARGE_EPSILON = 10.0
SMALL_EPSILON = 0.05
MOST_NOISE = 0.1  # over the longest gradient, averaged over the run


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
    effective = noise * setting.method.mechanism.prefix_noise(setting.run)
    ratio = noise_to_signal(effective, question.parameters, setting.run.batch_size)
    chosen = replace(
        setting,
        noise_multiplier=noise,
        noise_to_signal=ratio,
        error=predicted_error(ratio, setting.run.batch_size, setting.run.steps),
    )
    warnings = warnings_about(question, plan.guarantee, chosen)
    return Plans(question, tuple(settings), chosen, plan, warnings)


def usual_delta(n: int) -> float:
    """At most 1e-5, and one over ten times the number of records, rounded down to a power of
    ten.
    """
    return float(min(1e-5, 10.0 ** -math.ceil(math.log10(n) + 1)))


def cheapest_of_the_best(settings: Sequence[Setting]) -> Setting:
    """Of the settings, best first, that are within 5 % of the best: the one that takes least time,
    or gradients.
    """
    good = [each for each in settings if each.error <= CLOSE * settings[0].error]
    return min(good, key=lambda each: (each.seconds or 0.0, each.records, each.error))


def warnings_about(question: Question, guarantee: Guarantee, chosen: Setting) -> tuple[str, ...]:
    """What a person should know before relying on the plan; public."""
    found = []
    epsilon, n = guarantee.epsilon, question.n
    if epsilon > LARGE_EPSILON:
        found.append(
            f"epsilon {rounded_up(epsilon)} promises next to nothing: an attacker's odds may "
            "change by the factor e^epsilon. Fix: 8 or less, better 1 to 4."
        )
    if epsilon < SMALL_EPSILON:
        found.append(
            f"epsilon {rounded_up(epsilon, 3)} is far below what anyone asks for, and takes very "
            "many records to learn anything. Usual: 0.1 to 8."
        )
    if guarantee.delta * n > 1:
        found.append(
            f"delta {guarantee.delta:g} is above 1/n = {1 / n:.2g}: publishing one record at "
            f"random would satisfy it. Fix: at most {0.1 / n:.1g}."
        )
    remaining = chosen.noise_to_signal / chosen.run.steps**0.5
    if remaining > MOST_NOISE:
        records = n * remaining / MOST_NOISE
        found.append(
            f"n = {n:,} is small for {question.parameters:,} parameters: averaged over the whole "
            f"run the noise is still {remaining:.2f} of the longest gradient. Fix: about "
            f"{rounded_records(records)} records, fewer parameters, or a larger epsilon."
        )
    return tuple(found)


def rounded_records(records: float) -> str:
    """Two digits of a number of records."""
    return f"{float(f'{records:.2g}'):,.0f}"
