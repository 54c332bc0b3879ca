"""The promise: all of a private run that is decided beforehand, in one frozen object."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol

import dp_accounting
from dp_accounting import NeighboringRelation

from dpoptim.accounting.accountant import compute_epsilon
from dpoptim.accounting.guarantee import Guarantee, neighboring_name, parse_neighboring
from dpoptim.accounting.public_numbers import doubts, large_delta
from dpoptim.arguments import real_number, whole_number
from dpoptim.assumptions import CODE_OF_OTHERS, ONE_RECORD_A_PERSON, OWNERS_ARE_NAMED, Assumption
from dpoptim.clipping import ClippingRule
from dpoptim.gate import Query
from dpoptim.mechanisms.mechanism import Mechanism, RunShape, StepMechanism
from dpoptim.notebook import as_table
from dpoptim.origins import of_this_library
from dpoptim.plan.code import CODE, code_in, kind_listed, packages_of_others, refuse_other_code
from dpoptim.plan.text import (
    basis_of,
    plan_in_words,
    read_text,
    refuse_other_promise,
    say_the_same,
    settings_in,
    text_of,
)
from dpoptim.privacy_unit import RECORD, Unit
from dpoptim.sampling import Sampler
from dpoptim.sampling.sampler import number_of_steps

SMALLEST_NOISE = 0.01  # below it epsilon has no meaningful number


class Method(Protocol):
    """An algorithm's public settings: a frozen dataclass, as JSON; see `TrainingMethod`."""

    @property
    def name(self) -> str:
        """As `dpoptim.registry` lists it."""
        ...

    @property
    def rule(self) -> ClippingRule:
        """How each record's gradient is clipped, at the start of the run."""
        ...

    @property
    def norm_bound(self) -> float:
        """The bound on a record's own part of what a step releases."""
        ...

    @property
    def mechanism(self) -> Mechanism:
        """How noise hides the records, and what that costs."""
        ...

    def sampler(self, n: int, batch_size: int) -> Sampler:
        """Return how batches are drawn."""
        ...

    def settled(self, run: RunShape, *, epsilon: float | None, delta: float | None) -> "Method":
        """Return the method with open choices made by the plan's public numbers."""
        ...

    def assumptions(self, run: RunShape) -> tuple[Assumption, ...]:
        """Return what this method contributes to the list of what a guarantee rests on."""
        ...


@dataclass(frozen=True)
class Plan:
    """Promise of a run, made by a method's ``plan(...)``; drives sampler, clipping and noise.

    Attributes:
        method: the algorithm and its settings, e.g. `DPSGD`.
        n: nominal (add-or-remove-one) or exact (zero-out, replace-one) number of records; public.
        batch_size: expected batch size, the public number that noisy sums are divided by.
        steps: noisy sums in the run.
        noise_multiplier: noise std on the sum over the clip norm.
        neighboring: the relation, by name.
        delta: where the guarantee is stated.

    Everything else follows from these, so that a changed copy cannot keep an old promise.

    Raises:
        ValueError: there is no guarantee under this relation for the way in which the method draws
            batches.

    Examples:
        >>> import dpoptim
        >>> plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        ...     n=10_000, batch_size=500, epochs=2, epsilon=4.0, delta=1e-6
        ... )
        >>> dpoptim.Plan.from_json(plan.to_json()) == plan
        True
    """

    method: Method
    n: int
    batch_size: int
    steps: int
    noise_multiplier: float
    neighboring: str
    delta: float
    unit: Unit = RECORD

    def __post_init__(self) -> None:
        if self.neighboring not in self.sampler.relations:
            raise ValueError(
                f"neighboring={self.neighboring!r}: for these batches ({self.sampler.promise()}) "
                f"no guarantee under it is known. Use one of "
                f"{', '.join(map(repr, self.sampler.relations))}."
            )

    @cached_property
    def sampler(self) -> Sampler:
        """How batches are drawn."""
        return self.method.sampler(self.n, self.batch_size)

    def expected_batch(self, step: int) -> float:
        """The expected size of a step's batch, counted from 0: what its noisy sum is divided by."""
        return self.batch_size * self.sampler.relative_batch(step)

    @cached_property
    def shape(self) -> RunShape:
        """The run's public numbers, its noise apart: what the mechanism computes from."""
        return RunShape(self.sampler, self.n, self.batch_size, self.steps, self.neighboring)

    @property
    def mechanism(self) -> Mechanism:
        """How noise hides the records, and what that costs."""
        return self.method.mechanism

    @property
    def event(self) -> dp_accounting.DpEvent:
        """The cost of the whole run; without noise, an event without a number."""
        if self.noise_multiplier == 0:
            return dp_accounting.NonPrivateDpEvent()
        return self.mechanism.event(self.shape, self.noise_multiplier)

    def event_of_part(self, released: int, repeated: int = 0) -> dp_accounting.DpEvent:
        """The charge of a run ended for good after so many steps; see `Mechanism.event_of_part`.

        The whole event, where only that has a price. For budgets: the run's own `guarantee` keeps
        the whole plan.
        """
        whole = self.event
        if self.noise_multiplier == 0 or released + repeated >= self.steps:
            return whole
        of_part = partial(self.mechanism.event_of_part, self.shape, self.noise_multiplier)
        if of_part(released=self.steps, repeated=0) != whole:
            return whole  # no parts, or a mechanism that changed `event` alone
        part = of_part(released=released, repeated=repeated)
        return whole if part is None else part

    @cached_property
    def query(self) -> Query:
        """The steps' request to the gate.

        Raises:
            TypeError: the method has no steps of its own.
        """
        if not isinstance(self.mechanism, StepMechanism):
            raise TypeError(
                f"a plan for {self.method.name!r} is carried out by dpoptim.solvers, not by "
                "dpoptim.attach."
            )
        return self.mechanism.query(self.shape, self.noise_multiplier, self.method.norm_bound)

    @cached_property
    def guarantee(self) -> Guarantee:
        """The guarantee of the whole run."""
        guarantee = self.guarantee_at(self.delta)
        if self.noise_multiplier > 0 and large_delta(self.delta, self.n):
            said = doubts(1.0, self.delta, self.n)  # of delta alone
            guarantee = replace(guarantee, notes=(*guarantee.notes, *said))
        return guarantee

    def guarantee_at(self, delta: float) -> Guarantee:
        """The guarantee of the whole run at another delta, 1e-14 < delta < 1."""
        if self.noise_multiplier == 0:
            return Guarantee.without_noise(self.neighboring, delta, self.unit.name)
        unproven = self.mechanism.claim(self.shape, self.noise_multiplier, delta)
        found = (
            compute_epsilon(self.event, delta, self.neighboring) if unproven is None else unproven
        )
        origins = (CODE_OF_OTHERS.format(package) for package in packages_of_others(self))
        return replace(found, unit=self.unit.name, notes=(*found.notes, *origins))

    @property
    def rests_on_places(self) -> bool:
        """Whether a record's place in the data set may say when it takes part."""
        sampler = self.sampler
        own_ways = not of_this_library(type(sampler)) and sampler.by_places(sharded=False)
        return own_ways or sampler.participations(self.steps) < self.steps

    @property
    def epochs(self) -> float:
        """Expected passes over the data."""
        return self.sampler.passes(self.steps)

    @property
    def basis(self) -> tuple[Assumption, ...]:
        """The guarantee's basis by the plan; `attach` and the certificate add to it."""
        return basis_of(self)

    @property
    def unit_assumption(self) -> Assumption:
        """Assumptions on trust about records and their owners."""
        return ONE_RECORD_A_PERSON if self.unit == RECORD else OWNERS_ARE_NAMED

    def epsilon(self, delta: float) -> float:
        """Epsilon of the whole run at another delta, 1e-14 < delta < 1."""
        return self.guarantee_at(delta).epsilon

    def describe(self, basis: Sequence[Assumption] | None = None) -> str:
        """The plan for a person: what will happen, what it guarantees, on what that rests.

        Args:
            basis: what is known of that by now (``private.describe()`` gives it); None: `basis`,
                from the plan alone.
        """
        return plan_in_words(self, self.basis if basis is None else basis)

    def _repr_html_(self) -> str:
        """For notebooks: `describe` as a table."""
        return as_table(self.describe())

    def to_json(self) -> str:
        """The plan as a JSON document that `from_json` turns back into an equal plan."""
        return text_of(self)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read a plan, its guarantee computed again; files that promise another are refused.

        Raises:
            ValueError: not a plan, one that was changed since it was written, a guarantee that is
                not its settings', or a method or part of other code, whose class is not registered
                here, or not the one that was meant.
        """
        data = read_text(text)
        try:
            method, code = settings_in(data), code_in(data)
            plan = make_plan(
                kind_listed(method.pop("name"), code)(**method),
                n=data["n"],
                batch_size=data["batch_size"],
                steps=data["steps"],
                noise_multiplier=data["noise_multiplier"],
                delta=data["guarantee"]["delta"],
                neighboring=data["neighboring"],
            )
            plan = replace(plan, unit=Unit(**data["unit"])) if "unit" in data else plan
            stored = Guarantee.from_json(data["guarantee"])
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"text is a damaged plan: {error}; make a new plan.") from None
        refuse_other_code(code, stored, plan)
        refuse_other_promise(stored, plan.guarantee)
        return plan


def make_plan(
    method: Method,
    *,
    n: int,
    batch_size: int,
    epochs: float | None = None,
    steps: int | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    noise_multiplier: float | None = None,
    neighboring: str | NeighboringRelation | None = None,
) -> Plan:
    """Check the numbers, calibrate noise to a budget, state the guarantee: `DPSGD.plan`."""
    n = whole_number("n", n, least=1)
    batch_size = whole_number("batch_size", batch_size, least=1)
    if batch_size > n:
        raise ValueError(
            f"batch_size={batch_size} is larger than n={n}; a batch holds at most every record: "
            f"use batch_size <= {n}."
        )
    sampler = method.sampler(n, batch_size)
    steps = number_of_steps(sampler, epochs, steps)
    relation = (
        sampler.relations[0]
        if neighboring is None
        else neighboring_name(parse_neighboring(neighboring))
    )
    epsilon = None if epsilon is None else real_number("epsilon", epsilon)
    delta = None if delta is None else real_number("delta", delta)
    noise_multiplier = (
        None if noise_multiplier is None else real_number("noise_multiplier", noise_multiplier)
    )
    if (epsilon is None) == (noise_multiplier is None):
        raise ValueError(
            "give either epsilon (the noise is calibrated to it) or noise_multiplier, and not both."
        )
    if delta is None:
        raise ValueError(
            "delta is missing: the guarantee is stated at it. Choose it well below 1/n, e.g. "
            f"delta={min(1e-5, 10.0 ** -math.ceil(math.log10(n) + 1)):g}; it must not depend on "
            "the data."
        )
    open_run = RunShape(sampler, n, batch_size, steps, relation)
    method = method.settled(open_run, epsilon=epsilon, delta=delta)
    sampler = method.sampler(n, batch_size)
    if epsilon is not None:
        shape = RunShape(sampler, n, batch_size, steps, relation)
        noise_multiplier = method.mechanism.calibrate(shape, epsilon=epsilon, delta=delta)
    assert noise_multiplier is not None
    if noise_multiplier != 0 and not SMALLEST_NOISE <= noise_multiplier < math.inf:
        raise ValueError(
            f"noise_multiplier must be finite and at least {SMALLEST_NOISE}, or 0 for no noise and "
            f"no promise, got {noise_multiplier!r}."
        )
    if noise_multiplier > 0 and math.isinf(method.rule.norm):
        raise ValueError(
            "clip_norm is infinite, so no noise can hide a record; give a finite clip_norm."
        )
    plan = Plan(method, n, batch_size, steps, noise_multiplier, relation, delta)
    _ = plan.guarantee  # refuses what no accountant can evaluate, here and not later
    return plan


def same_plan(theirs: str, ours: str) -> bool:
    """Whether a document is of this plan: made of the same classes, by the same settings.

    One that names no class may be of an earlier version, and is read. One that does is compared as
    it stands: its class need not be registered. ValueError if one stands for no plan here.
    """
    if CODE in read_text(theirs):
        return say_the_same(theirs, ours)
    return Plan.from_json(theirs) == Plan.from_json(ours)


def require_plan(plan: object) -> None:
    """Refuse what stands where a plan is expected: a method, or another argument."""
    if not isinstance(plan, Plan):
        raise TypeError(
            f"plan must be a dpoptim.Plan, got {type(plan).__name__}; make one with "
            "DPSGD(...).plan(...)."
        )
