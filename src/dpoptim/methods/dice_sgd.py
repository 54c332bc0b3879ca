"""DiceSGD: SGD whose clipping error is fed back (Zhang et al. 2024), in a version with a proof.

The paper's privacy theorem is false: one record with a huge gradient, drawn once, saturates the
hidden state and shifts every later step; where epsilon 1 is claimed, it is 8 at least
(tests/methods/test_dice_sgd.py). What is clipped away is therefore clipped itself before it enters
the state, and the run is charged by the theorem in `error_feedback`. The paper's own accounting
can be asked for by name, to reproduce it; it prints as unproven.

**Not amplified.** On Poisson batches, which steps a record joins is random; given these, the
theorem holds with k their number. To gain from the chance, one would have to bound a *mixture*,
over sets of steps, of Gaussians whose shifts the state carries on to later steps, by some fixed
pair of distributions. For matrix mechanisms, whose shifts are linear in the gradients, this is
known (Choquette-Choo et al. 2024); through clip(e) the shifts depend on the other records and on
what was released, and no such pair is known. What is proved is worse than with fixed batches
(`theory.error_feedback.sampled_delta`).
"""

import math
import warnings
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from dpoptim.arguments import number_from_zero, one_of, real_number
from dpoptim.assumptions import Assumption
from dpoptim.clipping import AUTOMATIC_GAMMA, ClippingRule, SplitClipping, Style
from dpoptim.mechanisms.mechanism import RunShape, StepMechanism
from dpoptim.methods.dice_paper import LARGEST_SHARE, PublishedNoise, PublishedSplit
from dpoptim.methods.error_feedback import ErrorFeedback, HiddenStateNoise
from dpoptim.methods.method import TrainingMethod
from dpoptim.methods.sensitive_state import ClipNormPolicy
from dpoptim.plan import Plan
from dpoptim.sampling import FixedBatches, PoissonSampling, Sampler

Accounting = Literal["proven", "paper"]


@dataclass(frozen=True)
class DiceSGD(TrainingMethod):
    """Error feedback: DP-SGD that remembers what clipping took away.

    ``v = mean clip(g_i, C1) + clip(e, C2)``, then ``e <- e + mean clip(g_i, R) - v``.

    Works with any first-order optimizer, which sees the noisy v (Zhang et al. Alg. 2; with Adam,
    their Alg. 3).

    Args:
        clip_norm: C1, the most that a record adds to a step directly; > 0. Or a `PrivateQuantile`;
            C2 and R are then given in units of C1, and what is remembered is in these units too.
        feedback_clip: C2, the most that the state adds to the *mean*; >= 0. Default: C1.
        residual_clip: R >= C1: gradients are clipped to it before anything else, so that what
            enters the state is at most R - C1. Default: 2 C1, the best ratio for one pass. ``inf``
            loses nothing of a gradient, but the noise must then hide 2 C2 in every step.
        clipping: ``"flat"``; ``"automatic"``: gradients are scaled to R g / (|g| + 0.01) first; or
            ``"per-layer"``: gradients and the state, each of the L layers by itself, with
            bounds sqrt(L) times smaller.
        reset_each_epoch: set the state to zero after every pass; costs the feedback of a pass's
            last steps, and lets the noise grow with the root of the passes instead of with their
            number.
        accounting: ``"proven"``, or ``"paper"`` (Theorem 3.7; with automatic clipping App. C.4) for
            reproducing the paper: its guarantee is false, and prints so. It takes Poisson batches,
            R = inf and no reset.

    Fixed batches: zero-out or replace-one only, n public and exact.

    Examples:
        >>> import dpoptim
        >>> method = dpoptim.DiceSGD(clip_norm=1.0, residual_clip=2.0)
        >>> plan = method.plan(
        ...     n=10_000, batch_size=500, epochs=2, epsilon=4.0, delta=1e-6, neighboring="zero-out"
        ... )
        >>> plan.guarantee.status
        'proven'
    """

    clip_norm: float | ClipNormPolicy
    feedback_clip: float | None = None
    residual_clip: float | None = None
    clipping: Style = "flat"
    reset_each_epoch: bool = True
    accounting: Accounting = "proven"
    name: ClassVar[str] = "dice-sgd"
    summary: ClassVar[str] = (
        "feeds back what clipping took off, on fixed batches (Zhang et al. 2024, with a proof)"
    )

    def __post_init__(self) -> None:
        one_of("accounting", self.accounting, get_args(Accounting))
        if self.residual_clip is not None:
            object.__setattr__(
                self, "residual_clip", real_number("residual_clip", self.residual_clip)
            )
        if self.feedback_clip is not None:
            object.__setattr__(
                self, "feedback_clip", number_from_zero("feedback_clip", self.feedback_clip)
            )
        if self.accounting == "paper":
            object.__setattr__(self, "reset_each_epoch", False)
        self.check()
        # What was left out is written down, so that a plan's JSON says it.
        object.__setattr__(self, "feedback_clip", self._feedback)
        object.__setattr__(self, "residual_clip", self._residual)
        if self.accounting == "paper":
            self._check_paper()

    def _check_paper(self) -> None:
        if self.policy is not None or self.clipping == "per-layer":
            raise ValueError(
                "accounting='paper' has a fixed clip_norm, for all layers together; use 'proven'."
            )
        if not math.isinf(self._residual):
            raise ValueError(
                f"residual_clip={self.residual_clip!r}: the paper has none; leave it out, or use "
                "'proven'."
            )
        if self._feedback == 0:
            raise ValueError(
                "feedback_clip=0 leaves nothing of the paper's method; use dpoptim.DPSGD."
            )
        if self.clipping == "automatic" and not self.clip_norm == self._feedback == 1:
            raise ValueError(
                "App. C.4 of the paper is for clip_norm = feedback_clip = 1 only; use those, or "
                "clipping='flat'."
            )
        warnings.warn(
            "DiceSGD(accounting='paper'): the paper's privacy theorem is false; its guarantee "
            "prints as unproven. Use accounting='proven' for anything but reproducing the paper.",
            UserWarning,
            stacklevel=4,
        )

    @property
    def _clip(self) -> float:
        """C1; 1 where it moves, and the others are in units of it."""
        return 1.0 if self.policy is not None else self.clip_norm  # type: ignore[return-value]

    @property
    def _feedback(self) -> float:
        return self._clip if self.feedback_clip is None else self.feedback_clip

    @property
    def _residual(self) -> float:
        if self.residual_clip is not None:
            return self.residual_clip
        return math.inf if self.accounting == "paper" else 2 * self._clip

    @property
    def largest_share(self) -> float:
        return LARGEST_SHARE if self.accounting == "paper" else 1.0

    def rule_of(self, clip_norm: float) -> ClippingRule:
        """Return the clipped part of each gradient, and the rest of it."""
        if self.accounting == "paper" and self.clipping == "automatic":
            return PublishedSplit(clip_norm)
        residual = self._residual if self.policy is None else self._residual * clip_norm
        return SplitClipping(clip_norm, residual, self.clipping)

    def sampler(self, n: int, batch_size: int) -> Sampler:
        return (
            PoissonSampling(batch_size / n)
            if self.accounting == "paper"
            else FixedBatches(n, batch_size)
        )

    @property
    def mechanism(self) -> StepMechanism:
        if self.accounting == "paper":
            return PublishedNoise(self._clip, self._feedback, self.clipping == "automatic")
        clip = self._clip
        return HiddenStateNoise(
            1.0, (self._residual - clip) / clip, self._feedback / clip, self.reset_each_epoch
        )

    def sensitive_state(self, plan: Plan) -> ErrorFeedback:
        pass_steps = plan.sampler.steps_per_pass if isinstance(plan.sampler, FixedBatches) else None
        softened = self.accounting == "paper" and self.clipping == "automatic"
        return ErrorFeedback(
            self._feedback * plan.batch_size,
            pass_steps if self.reset_each_epoch else None,
            softening=AUTOMATIC_GAMMA * plan.batch_size if softened else 0.0,
        )

    def assumptions(self, run: RunShape) -> tuple[Assumption, ...]:
        if self.accounting == "paper":
            return self.mechanism.assumptions(run)
        return super().assumptions(run)
