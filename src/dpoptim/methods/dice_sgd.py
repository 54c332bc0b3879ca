"""DiceSGD: SGD whose clipping error is fed back (Zhang et al. 2024), in a version with a proof.

The paper's privacy theorem is false: one record with a huge gradient, drawn once, saturates the hidden state and shifts
every later step; where epsilon 1 is claimed, it is 8 at least (tests/methods/test_dice_sgd.py). What is clipped away is
therefore clipped itself before it enters the state, and the run is charged by the theorem in `error_feedback`. The paper's
own accounting can be asked for by name, to reproduce it; it prints as unproven.

**Not amplified.** On Poisson batches, which steps a record joins is random; given these, the theorem holds with k their
number. To gain from the chance, one would have to bound a *mixture*, over sets of steps, of Gaussians whose shifts the
state carries on to later steps, by some fixed pair of distributions. For matrix mechanisms, whose shifts are linear in the
gradients, this is known (Choquette-Choo et al. 2024); through clip(e) the shifts depend on the other records and on what
was released, and no such pair is known.
"""

import math
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import dp_accounting
from dp_accounting import NeighboringRelation

from dpoptim.accounting.calibration import calibrate_noise_multiplier
from dpoptim.accounting.guarantee import Guarantee
from dpoptim.arguments import real_number
from dpoptim.clipping import AUTOMATIC_GAMMA, Clipping, SplitClipping, Style
from dpoptim.gate import GaussianSum, ShiftedSums
from dpoptim.methods.basis import NOISE
from dpoptim.methods.dice_paper import PublishedSplit, certain_event, product_of_epsilon_and_noise, published_guarantee
from dpoptim.methods.error_feedback import ErrorFeedback, run_sensitivity
from dpoptim.plan import Basis, Plan, make_plan
from dpoptim.sampling import FixedBatches, PoissonSampling, Sampler

Accounting = Literal["proven", "paper"]


@dataclass(frozen=True)
class DiceSGD:
    """Error feedback: ``v = mean clip(g_i, C1) + clip(e, C2)``, then ``e <- e + mean clip(g_i, R) - v``.

    Works with any first-order optimizer, which sees the noisy v (Zhang et al. Alg. 2; with Adam, their Alg. 3).

    Args:
        clip_norm: C1, the most that a record adds to a step directly; > 0.
        feedback_clip: C2, the most that the state adds to the *mean*; >= 0. Default: C1.
        residual_clip: R >= C1: gradients are clipped to it before anything else, so that what enters the state is at most
            R - C1. Default: 2 C1, the best ratio for one pass. ``inf`` loses nothing of a gradient, but the noise must then
            hide 2 C2 in every step.
        clipping: ``"flat"``, or ``"automatic"``: gradients are scaled to R g / (|g| + 0.01) first.
        reset_each_epoch: set the state to zero after every pass; costs the feedback of a pass's last steps, and lets the
            noise grow with the root of the passes instead of with their number.
        accounting: ``"proven"``, or ``"paper"`` (Theorem 3.7; with automatic clipping App. C.4) for reproducing the paper:
            its guarantee is false, and prints so. It takes Poisson batches, R = inf and no reset.

    Fixed batches: zero-out or replace-one only, n public and exact.
    """

    clip_norm: float
    feedback_clip: float | None = None
    residual_clip: float | None = None
    clipping: Style = "flat"
    reset_each_epoch: bool = True
    accounting: Accounting = "proven"

    def __post_init__(self) -> None:
        if self.accounting not in get_args(Accounting):
            choices = ", ".join(map(repr, get_args(Accounting)))
            raise ValueError(f"accounting must be one of {choices}, got {self.accounting!r}.")
        _ = Clipping(self.clip_norm)  # validates
        paper = self.accounting == "paper"
        residual = (math.inf if paper else 2 * self.clip_norm) if self.residual_clip is None else self.residual_clip
        feedback = self.clip_norm if self.feedback_clip is None else real_number("feedback_clip", self.feedback_clip)
        if not 0 <= feedback < math.inf:
            raise ValueError(f"feedback_clip must be a finite number of at least 0, got {feedback!r}.")
        # numpy's numbers would not survive JSON
        object.__setattr__(self, "clip_norm", float(self.clip_norm))
        object.__setattr__(self, "feedback_clip", feedback)
        object.__setattr__(self, "residual_clip", real_number("residual_clip", residual))
        if paper:
            self._check_paper()
        _ = self.rule

    def _check_paper(self) -> None:
        object.__setattr__(self, "reset_each_epoch", False)
        if not math.isinf(self._residual):
            raise ValueError(f"residual_clip={self.residual_clip!r}: the paper has none; leave it out, or use 'proven'.")
        if self._feedback == 0:
            raise ValueError("feedback_clip=0 leaves nothing of the paper's method; use dpoptim.DPSGD.")
        if self.clipping == "automatic" and not self.clip_norm == self._feedback == 1:
            raise ValueError(
                "App. C.4 of the paper is for clip_norm = feedback_clip = 1 only; use those, or clipping='flat'."
            )
        warnings.warn(
            "DiceSGD(accounting='paper'): the paper's privacy theorem is false; its guarantee prints as unproven. "
            "Use accounting='proven' for anything but reproducing the paper.",
            UserWarning,
            stacklevel=4,
        )

    @property
    def _feedback(self) -> float:
        assert self.feedback_clip is not None
        return self.feedback_clip

    @property
    def _residual(self) -> float:
        assert self.residual_clip is not None
        return self.residual_clip

    @cached_property
    def rule(self) -> SplitClipping | PublishedSplit:
        """The clipped part of each gradient, and the rest of it."""
        if self.accounting == "paper" and self.clipping == "automatic":
            return PublishedSplit(self.clip_norm)
        return SplitClipping(self.clip_norm, self._residual, self.clipping)

    def sampler(self, n: int, batch_size: int) -> Sampler:
        return PoissonSampling(batch_size / n) if self.accounting == "paper" else FixedBatches(n, batch_size)

    def sensitivity(self, batches: FixedBatches, steps: int) -> float:
        """S of the theorem in `error_feedback`, on the sum, under zero-out."""
        passes = batches.participations(steps)
        kept = 1 if self.reset_each_epoch else passes
        return run_sensitivity(
            clip=self.clip_norm,
            residual=self._residual - self.clip_norm,
            feedback=self._feedback * batches.batch_size,
            passes=passes,
            steps_per_pass=batches.steps_per_pass,
            reset=self.reset_each_epoch,
            held=kept * batches.n * self._residual,
        )

    def calibrate(self, *, n: int, batch_size: int, steps: int, epsilon: float, delta: float, neighboring: str) -> float:
        if self.accounting == "paper":
            return self._published_product(n, batch_size, steps, delta) / epsilon
        return calibrate_noise_multiplier(sample_rate=1, steps=1, epsilon=epsilon, delta=delta, neighboring=neighboring)

    def event(self, plan: Plan) -> dp_accounting.DpEvent:
        """One Gaussian for the whole run; with the paper's accounting, what is certain nevertheless."""
        if self.accounting == "paper":
            return certain_event(
                noise_multiplier=plan.noise_multiplier,
                clip=self.clip_norm,
                feedback=self._feedback * plan.batch_size,
                steps=plan.steps,
            )
        return dp_accounting.GaussianDpEvent(plan.noise_multiplier)

    def query(self, plan: Plan) -> GaussianSum | ShiftedSums:
        if self.accounting == "paper":
            return GaussianSum(self.clip_norm, plan.noise_multiplier)
        assert isinstance(plan.sampler, FixedBatches)
        return ShiftedSums(self.sensitivity(plan.sampler, plan.steps), plan.noise_multiplier)

    def private_side(self, plan: Plan) -> ErrorFeedback:
        pass_steps = plan.sampler.steps_per_pass if isinstance(plan.sampler, FixedBatches) else None
        softened = self.accounting == "paper" and self.clipping == "automatic"
        return ErrorFeedback(
            self._feedback * plan.batch_size,
            pass_steps if self.reset_each_epoch else None,
            softening=AUTOMATIC_GAMMA * plan.batch_size if softened else 0.0,
        )

    def norm_choice(self, plan: Plan) -> None:
        return None

    def unproven_guarantee(self, plan: Plan, delta: float) -> Guarantee | None:
        if self.accounting == "proven":
            return None
        epsilon = self._published_product(plan.n, plan.batch_size, plan.steps, delta) / plan.noise_multiplier
        return published_guarantee(epsilon, delta, plan.neighboring, automatic=self.clipping == "automatic")

    def _published_product(self, n: int, batch_size: int, steps: int, delta: float) -> float:
        return product_of_epsilon_and_noise(
            clip=self.clip_norm,
            feedback=self._feedback * batch_size,
            sample_rate=batch_size / n,
            steps=steps,
            delta=delta,
            automatic=self.clipping == "automatic",
        )

    def basis(self, plan: Plan) -> tuple[Basis, ...]:
        if self.accounting == "paper":
            return (
                Basis("unproven", "the paper's Theorem 3.7, which audits refute: the true epsilon is several times larger"),
            )
        reset = "at the end of every pass" if self.reset_each_epoch else "never"
        return (
            Basis("enforced", f"each record adds at most {self.clip_norm:g} to a sum, rounding included"),
            Basis("enforced", f"and at most {self._residual - self.clip_norm:g} to the error state, which is reset {reset}"),
            Basis("enforced", "the error state stays left of the gate: it is fed back clipped, never saved or shown"),
            NOISE,
        )

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
        neighboring: str | NeighboringRelation = "zero-out",
    ) -> Plan:
        """Decide everything about a private run before it starts; arguments as for `DPSGD.plan`, but for two.

        Args:
            n: the number of records, exact and public.
            epochs: whole passes over fixed batches.
            noise_multiplier: noise std over the run's sensitivity S, so that the run is one Gaussian of this noise
                multiplier; with ``accounting="paper"``, noise std on the sum over clip_norm.
            neighboring: ``"zero-out"`` or ``"replace-one"``.

        Raises:
            ValueError, TypeError: naming the argument and the fix.
        """
        return make_plan(
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
