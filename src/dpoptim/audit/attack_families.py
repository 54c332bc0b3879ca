"""Attacks by families of mechanisms: each plan is attacked by the family that its mechanism names.

An attack replays the plan's own sampling and noise on canary records, through `dpoptim.attach` or
the solver; the run's data is not needed. A third party's mechanism names one of these, or a
function of its own, ``"package.module:function"``, which is imported when it is needed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import ClassVar

from dpoptim import registry
from dpoptim.audit.error_feedback import dice_sgd_as_published, dice_sgd_plan
from dpoptim.audit.finding import DELTA, MU, Finding
from dpoptim.audit.named_audits import AUDITS, Audit
from dpoptim.audit.own_parts import with_own_parts
from dpoptim.audit.selected_rows import selected_rows
from dpoptim.audit.side_by_side import RUNS, without_canary
from dpoptim.audit.solvers import adaptive, solver, srgd, sums
from dpoptim.audit.step_methods import (
    BY_BINS,
    BY_PATTERNS,
    BY_TURNS,
    fixed_order_plan,
    mu_of,
    two_worlds_finding,
)
from dpoptim.clipping import Clipping, ClippingRule
from dpoptim.mechanisms.mechanism import StepMechanism
from dpoptim.methods import TrainingMethod, WholeRun
from dpoptim.methods.sensitive_state import SensitiveState
from dpoptim.origins import of_this_library
from dpoptim.plan import Plan
from dpoptim.sampling import FixedBatches, PoissonSampling, Sampler

Attack = Callable[[Plan, int, int], Finding]  # (plan, trials, seed)


@dataclass(frozen=True)
class PlainlyClipped(TrainingMethod):
    """A method's sampler and mechanism with flat clipping, to attack these alone.

    Rule and state of other code are kept: nobody else attacks them.

    Args:
        method: whose they are. clip_norm: its norm bound.
        given_order: fixed batches come in the data set's own order, so that canaries know their
            place.
        everybody: all records take part in each step, whatever the sampler.
    """

    method: TrainingMethod
    clip_norm: float
    given_order: bool = False
    everybody: bool = False
    name: ClassVar[str] = "plainly clipped"
    summary: ClassVar[str] = "for audits"

    def sampler(self, n: int, batch_size: int) -> Sampler:
        if self.everybody:
            return PoissonSampling(1.0)
        sampler = self.method.sampler(n, batch_size)
        return (
            replace(sampler, order="given")
            if self.given_order and isinstance(sampler, FixedBatches)
            else sampler
        )

    @property
    def mechanism(self) -> StepMechanism:
        return self.method.mechanism

    def rule_of(self, clip_norm: float) -> ClippingRule:
        if not own_rule(self.method):
            return Clipping(clip_norm)
        moves = self.method.policy is not None
        return self.method.rule_of(clip_norm) if moves else self.method.rule

    def sensitive_state(self, plan: Plan) -> SensitiveState | None:
        if of_this_library(type(self.method)):
            return None
        return self.method.sensitive_state(replace(plan, method=self.method))


def own_rule(method: TrainingMethod) -> bool:
    """Whether a method of other code clips by more than the usual rule, which others attack."""
    return not of_this_library(type(method)) and type(method.rule) is not Clipping


def with_flat_clipping(plan: Plan, *, given_order: bool = False, everybody: bool = False) -> Plan:
    """Return the plan with flat clipping, but for rules and states of other code."""
    assert isinstance(plan.method, TrainingMethod)
    norm_bound = plan.method.norm_bound
    return replace(plan, method=PlainlyClipped(plan.method, norm_bound, given_order, everybody))


def attack(plan: Plan, trials: int, seed: int) -> Finding:
    """Attack a plan by its mechanism's family, at the plan's own noise, steps and relation.

    Clipping rules and states of other code are run as they are: on the canaries, and on adversarial
    records with the noise off (`audit.own_parts`).

    Returns:
        the finding; its notes name what was not attacked.

    Raises:
        ValueError: the family is unknown, so nothing can be said.
    """
    family = plan.mechanism.audit_family(plan.shape)
    known = FAMILIES.get(family) or attack_elsewhere(family)
    if known is None:
        raise ValueError(
            f"{type(plan.mechanism).__name__}.audit_family names {family!r}, which is none of "
            f"{', '.join(map(repr, FAMILIES))}. Fix: name one of them, or an attack of your own as "
            "'package.module:function'."
        )
    return with_own_parts(known(plan, trials, seed), plan, seed)


def attack_elsewhere(family: str) -> Attack | None:
    """Import an attack that a mechanism names as ``"package.module:function"``; None: no such."""
    module, _, function = family.partition(":")
    try:
        found: Attack | None = getattr(import_module(module), function) if function else None
    except (ImportError, AttributeError):
        return None
    return found


def two_worlds(plan: Plan, trials: int, seed: int) -> Finding:
    """Independent noise on Poisson batches, ``trials`` canaries at once; see `audit.two_worlds`."""
    scaled = replace(
        with_flat_clipping(plan),
        n=trials,
        batch_size=max(1, round(plan.batch_size / plan.n * trials)),
    )
    return two_worlds_finding(scaled, seed)


def fixed_order(plan: Plan, trials: int, seed: int) -> Finding:
    """Canaries that take part as early and as often as they can; the claim is one Gaussian."""
    return fixed_order_plan(with_flat_clipping(plan, given_order=True), trials, seed)


def everybody(plan: Plan, trials: int, seed: int) -> Finding:
    """Clipping and noise of a plan whose sampler no attack here knows: all take part in each step.

    So many of its steps as cost about `MU` then, at the price of that; the sampler is not attacked.
    """
    apart = 1 - without_canary(plan.neighboring)  # of the two worlds, in norm bounds
    steps = max(1, min(plan.steps, int((MU * plan.noise_multiplier / apart) ** 2)))
    scaled = replace(with_flat_clipping(plan, everybody=True), n=trials, batch_size=trials)
    found = two_worlds_finding(replace(scaled, steps=steps), seed)
    sampler = type(plan.sampler).__name__
    unknown = f"not attacked: who takes part, by {sampler}; here all did in each of {steps} steps"
    return replace(found, notes=(f"{unknown}, at the price of that",))


def sampled_by_turns(plan: Plan, trials: int, seed: int) -> Finding:
    """Banded noise on batches sampled by turns; see `audit.banded`."""
    parts = plan.sampler.separation
    n = trials - trials % parts
    scaled = replace(
        with_flat_clipping(plan), n=n, batch_size=max(1, int(plan.batch_size / plan.n * n))
    )
    return two_worlds_finding(scaled, seed, BY_TURNS)


def balls_in_bins(plan: Plan, trials: int, seed: int) -> Finding:
    """Banded noise on balls in bins; see `audit.banded`."""
    bins = plan.sampler.separation
    n = trials - trials % bins
    return two_worlds_finding(
        replace(with_flat_clipping(plan), n=n, batch_size=n // bins), seed, BY_BINS
    )


def sampled_apart(plan: Plan, trials: int, seed: int) -> Finding:
    """Banded noise on b-min-sep batches; see `audit.min_separation`."""
    share = plan.batch_size / plan.n
    n = max(trials, plan.sampler.separation + 1)
    scaled = replace(with_flat_clipping(plan), n=n, batch_size=max(1, int(share * n)))
    return two_worlds_finding(scaled, seed, BY_PATTERNS)


def error_feedback(plan: Plan, trials: int, seed: int) -> Finding:
    """One record is like another: the first, followed through the true run."""
    return dice_sgd_plan(plan, [0], seed)


def error_feedback_as_published(plan: Plan, trials: int, seed: int) -> Finding:
    """The counterexample, whatever the plan: the paper's theorem is false."""
    return dice_sgd_as_published(trials, seed)


def whole_run(plan: Plan, trials: int, seed: int) -> Finding:
    """A solver at the plan's budget."""
    assert isinstance(plan.method, WholeRun)
    own = {"adaptive-gd": adaptive, "accelerated-srgd": srgd, "sufficient-statistics": sums}
    run = own.get(plan.method.solver, partial(solver, plan.method.solver))
    return run(trials, seed, mu=mu_of(plan), neighboring=plan.neighboring)


FAMILIES: dict[str, Attack] = {
    "two worlds": two_worlds,
    "fixed order": fixed_order,
    "everybody": everybody,
    "selected rows": selected_rows,
    "sampled by turns": sampled_by_turns,
    "balls in bins": balls_in_bins,
    "sampled apart": sampled_apart,
    "error feedback": error_feedback,
    "error feedback as published": error_feedback_as_published,
    "whole run": whole_run,
}


def audits() -> dict[str, Audit]:
    """Return all methods' audits by name: `AUDITS`, and other registered methods at defaults."""
    covered = {name.partition(",")[0] for name in AUDITS}
    others = [name for name in registry.entries() if name not in covered]
    return {**AUDITS, **{name: partial(at_defaults, name) for name in others}}


def at_defaults(name: str, trials: int, seed: int) -> Finding:
    """Attack a method at its default settings, in a short run at epsilon 6 under zero-out.

    One pass over six fixed batches; of methods that sample, four full batches, which show most of
    a claim.
    """
    method = registry.entry(name).make(clip_norm=1.0)
    batch_size, epochs = (100, 1) if method.sampler(600, 100).whole_passes else (600, 4)
    plan = method.plan(
        n=600,
        batch_size=batch_size,
        epochs=epochs,
        epsilon=6.0,
        delta=DELTA,
        neighboring="zero-out",
    )
    return attack(plan, trials, seed)


def run_audits(
    names: Sequence[str],
    *,
    trials: int = RUNS,
    seed: int = 0,
    on_done: Callable[[Finding], None] | None = None,
) -> list[Finding]:
    """The named audits, in this order.

    Args:
        names: keys of `audits`.
        trials: of each attack's certifying half, about; thousands are needed to show most of a
            claim.
        seed: of coins and noise, so that a finding repeats.
        on_done: told each finding.

    Returns:
        one finding for each name.

    Examples:
        >>> from dpoptim.audit import run_audits
        >>> [finding] = run_audits(["dp-sgd"], trials=500)
        >>> finding.verdict == "refuted"
        False
    """
    known, found = audits(), []
    for name in names:
        started = time.perf_counter()
        result = replace(known[name](trials, seed), method=name)
        found.append(replace(result, seconds=time.perf_counter() - started))
        if on_done is not None:
            on_done(found[-1])
    return found
