"""One step after another: from a batch's microbatches to what the gate releases of their sum."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor

from dpoptim.distributed.rank_signals import RELEASE
from dpoptim.distributed.ranks import Ranks, Shared
from dpoptim.errors import PrivacyError
from dpoptim.gate import Gate
from dpoptim.gradients.engine import Engine
from dpoptim.methods.sensitive_state import FixedClipNorm, NothingKept
from dpoptim.noise.few_rows import Vector
from dpoptim.plan import Plan
from dpoptim.training.batches.microbatches import BatchQueue, Microbatch
from dpoptim.training.engines import training_method

# "open" while a batch's microbatches arrive, "complete" when the last one has, "released" until
# all is written down.
State = Literal["idle", "open", "complete", "released"]


class Steps:
    """The run's place in its plan, and what it remembers from step to step.

    Args:
        plan: how many steps there are, and what each asks of the gate.
        engine: where microbatches are summed.
        queue: the batches, of which each is forgotten when its noisy sum is out.
        gate: what makes sums noisy.
        ranks: the processes that train together.

    Attributes:
        done: noisy steps taken so far (public), those that only looked for the clip norm included.
        moved: whether the last ``optimizer.step()`` moved the model.
        noise_std: of the noise in every entry of the last gradients that the gate released; before
            the first, of those to come; ``nan`` if the mechanism does not tell.
        noise_shares: each parameter's noise over that, where they differ; else None.

    **Guarantee.** Each batch's sum goes to the gate once, and nothing remembers a step before its
    noise is drawn.
    """

    def __init__(
        self, plan: Plan, engine: Engine, queue: BatchQueue, gate: Gate, ranks: Ranks
    ) -> None:
        self._plan, self._engine, self._queue, self.gate = plan, engine, queue, gate
        self.done, self.moved = 0, False
        self._ranks = ranks
        self._state: State = "idle"
        self.microbatches = 0  # of this step, delivered
        method = training_method(plan)
        self._memory = method.sensitive_state(plan) or NothingKept()
        units = engine.clipping.units(engine.layers)
        self._memory.attach(partial(engine.totals.by_unit, units), ranks)
        adaptive = method.adaptive_clip_norm(plan)
        self.clip_norm = adaptive or FixedClipNorm(engine.clipping)
        self.noise_std = self._noise_of(self.done, self.clip_norm.gain)
        self.clip_norm.meet(ranks)
        entries = [p.numel() for p in engine.parameters]
        self.clip_norm.see(entries, engine.totals.own_views, plan.query.released_deviation)
        self.noise_shares = self.clip_norm.shares
        engine.clipping = self.clip_norm.rule
        if adaptive is not None:  # norms of gradients are looked at for it alone
            engine.observer = adaptive.observe

    def end(self, *, refund: bool) -> None:
        """Take no further step; see `PrivateTraining.finish`."""
        self._engine.restart()
        if self._state != "released":
            self._state = "idle"
        if refund:
            self.gate.give_back(self._ranks.all_max)
        else:
            self.gate.close()
            self.gate.finish()  # no checkpoint goes on, the last one neither

    @property
    def state(self) -> State:
        return self._state

    def restart(self) -> None:
        """Begin a loop; a step left midway starts again with its records, nothing released."""
        self.refuse_interrupted()
        self._engine.restart()
        self.clip_norm.forget()
        self._state, self.microbatches = "idle", 0

    def begin(self, microbatch: Microbatch) -> None:
        """A part of the step's batch, or all of it, is delivered."""
        if self._engine.totals.travels:
            # before any sum leaves this rank, which is in a pass
            self._ranks.begin_microbatch(self.done, self.microbatches)
            self.gate.open()
        self.microbatches += 1
        self._engine.begin_microbatch(
            microbatch.records,
            null=microbatch.null,
            groups=microbatch.groups,
            present=microbatch.present,
        )
        self._state = "complete" if microbatch.last else "open"

    def release(self, shared: Shared) -> None:
        """Let the gate release this step's sums, and write the noisy mean into ``.grad``.

        Args:
            shared: by all ranks, which compare it.

        Nothing remembers the step before its noise is drawn: if drawing is interrupted, the step
        is done again. `settle` ends the step.
        """
        self._ranks.begin(RELEASE, self.done, shared)
        self.gate.open()  # first: a refusal must leave the sums as they were
        sums, query = self._sums_and_query()
        trains = self.clip_norm.found
        noisy = self.gate.release_sum(query)
        # if what follows is interrupted, the run is over: the step must not happen twice
        self._state = "released"
        if trains:
            self._memory.released(sums)
        else:
            self._memory.skipped()
        gain, shares = self.clip_norm.gain, self.clip_norm.shares
        released = self.clip_norm.answer(noisy)
        self._engine.clipping = self.clip_norm.rule
        self._queue.released()
        self.done += 1
        # else the step was for the clip norm: optimizers find no gradients, and move nothing
        if released is not None:
            self._engine.write_means(released, self._plan.expected_batch(self.done - 1))
            self.noise_std = self._noise_of(self.done - 1, gain)
            self.noise_shares = shares
            self.moved = True

    def settle(self) -> None:
        """End the step: an update that fails is done again from what was released."""
        self._state, self.microbatches = "idle", 0

    def _sums_and_query(self) -> tuple[list[list[Tensor]], Sequence[Vector]]:
        """This step's sums where something but the gate reads them, and what the gate gets."""
        if self.gate.joined:
            return [], self._engine.take_by_parameter()
        sums = self.clip_norm.scaled(self._engine.take_sums())
        query = self._memory.query(sums) if self.clip_norm.found else sums[0]
        return sums, self.clip_norm.query(query)

    def _noise_of(self, step: int, gain: float) -> float:
        return gain * self._plan.query.released_deviation(step) / self._plan.expected_batch(step)

    def refuse_interrupted(self) -> None:
        if self._state == "released":
            raise PrivacyError(
                "a step was interrupted just after its noisy sum was released, so it is unknown "
                "what the run remembers. Fix: go on from a checkpoint (private.save, attach(..., "
                "resume=...)), or start a new run."
            )

    def secret_state(self) -> dict[str, Any]:
        """State for a checkpoint between two steps. Secret."""
        self._queue.draw_ahead(self._ranks.all_max(self._queue.drawn_ahead))
        return {
            "steps_done": self.done,
            "queue": self._queue.secret_state(),
            "memory": self._memory.secret_state(),
            "clip_norm": self.clip_norm.state(),
            "noise": {
                "std": self.noise_std,
                "shares": None if self.noise_shares is None else list(self.noise_shares),
            },
            "gate": self.gate.secret_state(),
        }

    def restore(self, secret: dict[str, Any]) -> None:
        """Go on, freshly started, where `secret_state` was taken; the gate has its part."""
        self.done = secret["steps_done"]
        self._queue.restore(secret["queue"])
        self.noise_std, self.noise_shares = secret["noise"]["std"], secret["noise"]["shares"]
        self._memory.restore(secret["memory"])
        self.clip_norm.restore(secret["clip_norm"])
        self._engine.clipping = self.clip_norm.rule
