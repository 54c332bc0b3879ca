"""A training method: a sampler, clipping, a mechanism and what a run must remember."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from functools import cached_property
from typing import Any, ClassVar

from dp_accounting import NeighboringRelation

from dpoptim.accounting.public_numbers import doubts
from dpoptim.assumptions import NOISE, Assumption, bounded, enforced
from dpoptim.clipping import Clipping, ClippingRule, Groups, Style, style_of
from dpoptim.mechanisms.mechanism import RunShape, StepMechanism
from dpoptim.methods.planned_clip_norm import PlannedClipNorm
from dpoptim.methods.private_quantile import PrivateQuantile
from dpoptim.methods.scaled_clip_norm import ScaledClipNorm
from dpoptim.methods.sensitive_state import AdaptiveClipNorm, ClipNormPolicy, SensitiveState
from dpoptim.noise.correlated.workload import Rates
from dpoptim.opacus_words import KnowsOpacus, knows_opacus
from dpoptim.plan import Plan, make_plan
from dpoptim.sampling import Sampler

# told apart by their fields in a plan's JSON
CLIP_NORM_POLICIES: tuple[type[Any], ...] = (PrivateQuantile, PlannedClipNorm, ScaledClipNorm)


class TrainingMethod(KnowsOpacus, ABC):
    """Public settings of a training algorithm: a frozen dataclass whose fields JSON can hold.

    A method is registered by `dpoptim.registry.register_method`, or by an entry point in the group
    ``dpoptim.methods``; command line, JSON, estimators, audits, certificate and documents then
    know it.

    Attributes:
        name: on the command line. summary: one line for people.
        clip_norm: bound on a record's gradient, or a policy that moves it during the run.
        clipping: how the bound is kept; see `clipping`.
        value_bound: how gradients are bounded before they are computed (`ValueClippedSGD`); None:
            they are measured.
        decay: of the learning rate that the method's noise is fitted to, and that the loops of
            `dpoptim train` and of the estimators follow.
        trains: what it can train: ``"any model"`` by `dpoptim.attach`.
        for_tables: whether it needs tables of embeddings, so that a plan for a model of which only
            the size is known leaves it out, unless it is named.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    trains: ClassVar[str] = "any model"
    for_tables: ClassVar[bool] = False
    clip_norm: float | ClipNormPolicy
    clipping: Style | Groups = "flat"
    value_bound: str | None = None
    decay: Rates = "none"

    @abstractmethod
    def sampler(self, n: int, batch_size: int) -> Sampler:
        """Return how batches are drawn."""

    @property
    @abstractmethod
    def mechanism(self) -> StepMechanism:
        """How noise hides the records, and what that costs."""

    def rule_of(self, clip_norm: float) -> ClippingRule:
        """Return what the engine does with each record's gradient at this clip norm."""
        return Clipping(clip_norm, self.clipping)

    def sensitive_state(self, plan: Plan) -> SensitiveState | None:
        """Return a fresh state for one run; None if each step's clipped sum is all."""
        return None

    def method_assumptions(self) -> tuple[Assumption, ...]:
        """Return what else this method's guarantee rests on."""
        return ()

    @property
    def largest_share(self) -> float:
        """The largest share of the records that its theorem lets a step expect."""
        return 1.0

    # ---- what follows from these ----------------------------------------------------------------

    def check(self) -> None:
        """Check and normalise ``clip_norm`` and ``clipping``; for ``__post_init__``."""
        if isinstance(self.clip_norm, Mapping):  # from a plan's JSON
            object.__setattr__(self, "clip_norm", policy_of(self.clip_norm))
        if self.clipping != "flat":
            object.__setattr__(self, "clipping", style_of(self.clipping))
        if self.value_bound is not None and isinstance(self.policy, ScaledClipNorm):
            raise ValueError(
                "clip_norm=ScaledClipNorm(...) scales gradients tensor by tensor, of which value "
                "clipping bounds none by itself. Fix: a plain clip norm, or dpoptim.DPSGD."
            )
        if self.policy is None:
            refuse_unknown_policy(self.clip_norm)
            _ = Clipping(self.clip_norm)  # type: ignore[arg-type]  # validates
            object.__setattr__(self, "clip_norm", float(self.clip_norm))  # type: ignore[arg-type]  # no numpy's: JSON
        _ = self.rule

    @property
    def policy(self) -> ClipNormPolicy | None:
        """The policy that moves the clip norm during a run; None where it is fixed."""
        return self.clip_norm if isinstance(self.clip_norm, CLIP_NORM_POLICIES) else None

    @cached_property
    def rule(self) -> ClippingRule:
        """The engine's treatment of each record's gradient; at the start, if that changes."""
        policy = self.policy
        return self.rule_of(self.clip_norm if policy is None else policy.start)  # type: ignore[arg-type]

    @property
    def norm_bound(self) -> float:
        """The bound on a record's part of a release; moving clip norms divide sums by theirs."""
        return self.rule.norm if self.policy is None else 1.0

    def batch_within(self, batch_size: int, n: int) -> int:
        """Return a batch size that nobody told, or the largest that the method's theorem takes."""
        return max(1, min(batch_size, n, math.floor(self.largest_share * n)))

    def settled(
        self, run: RunShape, *, epsilon: float | None, delta: float | None
    ) -> "TrainingMethod":
        """Return the method with open choices made by the plan's public numbers; see `plan`."""
        return self

    def variants(self, n: int, batch_size: int) -> tuple["TrainingMethod", ...]:
        """Return what a planner should try at this batch size: the method, and its settings."""
        return (self,)

    def adaptive_clip_norm(self, plan: Plan) -> AdaptiveClipNorm | None:
        """Return a fresh start of what moves the clip norm; None where it is fixed."""
        policy = self.policy
        if policy is None:
            return None
        capacity = plan.sampler.capacity(plan.n)
        return policy.begin(
            self.rule_of, batch_size=plan.batch_size, steps=plan.steps, capacity=capacity
        )

    def assumptions(self, run: RunShape) -> tuple[Assumption, ...]:
        """Return what this method contributes to the list of what a guarantee rests on."""
        policy = self.policy
        if policy is None:
            bound: tuple[Assumption, ...] = (bounded(self.rule.norm),)
        else:
            moving = "each record adds at most the current clip norm to the sum, rounding included"
            bound = (enforced(moving), policy.assumption())
        return (*bound, *self.mechanism.assumptions(run), *self.method_assumptions(), NOISE)

    @knows_opacus
    def plan(
        self,
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
        """Decide everything about a private run before it starts.

        Args:
            n: number of records, a public number. Under add-or-remove-one it is nominal: never
                derived from the data.
            batch_size: expected size of a batch, 1 <= batch_size <= n; the noisy sum is divided by
                it.
            epochs, steps: how long to train; give one of the two. Epochs are rounded up to whole
                steps; over fixed batches they must be whole.
            epsilon, delta: the budget; the noise is calibrated so as not to exceed it. epsilon >
                0, 1e-14 < delta < 1.
            noise_multiplier: instead of epsilon: of the mechanism's event (`Plan.event`). With
                independent noise, noise std on the sum over the clip norm; where the whole run is
                one Gaussian, 1 / mu of that. The same for every relation. Still give delta, at
                which the guarantee is stated. 0 turns the noise off and promises nothing.
            neighboring: ``"add-or-remove-one"``, ``"zero-out"`` or ``"replace-one"``. Default: the
                first for which the sampler's events hold.

        Raises:
            ValueError, TypeError: naming the argument and the fix.

        Warns:
            UserWarning: delta is above 1/n.
        """
        plan = make_plan(
            self,
            n=n,
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            epsilon=epsilon,
            delta=delta,
            noise_multiplier=noise_multiplier,
            neighboring=neighboring,
        )
        if plan.noise_multiplier > 0 and plan.delta * plan.n > 1:
            (said,) = doubts(1.0, plan.delta, plan.n)  # of delta alone
            warnings.warn(f"{said}.", stacklevel=3)
        if self.policy is not None:
            self.policy.refuse_if_drowned(
                batch_size=plan.batch_size,
                steps=plan.steps,
                deviation=plan.query.standard_deviation,
            )
        return plan


def refuse_unknown_policy(clip_norm: object) -> None:
    """Refuse what looks like a policy and is of no class that there is, naming those."""
    if hasattr(clip_norm, "begin"):
        known = ", ".join(kind.__name__ for kind in CLIP_NORM_POLICIES)
        raise ValueError(
            f"clip_norm must be a number above 0, or one of {known}, or of a class derived from "
            f"one, got a {type(clip_norm).__name__}."
        )


def policy_of(settings: Mapping[str, Any]) -> ClipNormPolicy:
    """Read a policy from a plan's JSON.

    Raises:
        TypeError: the entries are those of none.
    """
    for kind in CLIP_NORM_POLICIES:
        if {field.name for field in fields(kind)} == set(settings):
            policy: ClipNormPolicy = kind(**settings)
            return policy
    raise TypeError(f"clip_norm has unknown entries {sorted(settings)}")
