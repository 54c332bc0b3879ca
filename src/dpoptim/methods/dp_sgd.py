"""DP-SGD: clip every record's gradient, sum, add noise, divide by the expected batch size (Abadi et al. 2016).

Das et al. Alg. 1, Fang et al. Alg. 1 and Zhang et al. Alg. 1 are this algorithm with the 1/B in three places.
"""

from dataclasses import dataclass
from functools import cached_property

import dp_accounting
from dp_accounting import NeighboringRelation

from dpoptim.clipping import Clipping, Style
from dpoptim.gate import GaussianSum
from dpoptim.plan import Basis, Plan, make_plan


@dataclass(frozen=True)
class DPSGD:
    """Differentially private SGD; Adam and all other first-order optimizers are post-processing of its noisy mean.

    Args:
        clip_norm: C, the largest norm that one record's gradient may have in the sum; > 0.
        clipping: ``"flat"`` (g min(1, C/|g|)) or ``"automatic"`` (C g / (|g| + 0.01)).
    """

    clip_norm: float
    clipping: Style = "flat"

    def __post_init__(self) -> None:
        _ = self.rule  # validates
        object.__setattr__(self, "clip_norm", float(self.clip_norm))  # numpy's numbers would not survive JSON

    @cached_property
    def rule(self) -> Clipping:
        """What the engine does with each record's gradient."""
        return Clipping(self.clip_norm, self.clipping)

    def step_event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        """The event of one step, before sampling."""
        return dp_accounting.GaussianDpEvent(noise_multiplier)

    def query(self, noise_multiplier: float) -> GaussianSum:
        """What each step asks of the gate."""
        return GaussianSum(float(self.clip_norm), noise_multiplier)

    def basis(self) -> tuple[Basis, ...]:
        """What this method contributes to the list of what a guarantee rests on."""
        return (
            Basis("enforced", f"each record adds at most {self.clip_norm:g} to the sum, rounding included"),
            Basis("enforced", "the noise comes from a cryptographic stream, right to 8 standard deviations"),
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
        neighboring: str | NeighboringRelation = "add-or-remove-one",
    ) -> Plan:
        """Decide everything about a private run before it starts.

        Args:
            n: number of records, a public number. Under add-or-remove-one it is nominal: never derived from the data.
            batch_size: expected size of a Poisson batch, 1 <= batch_size <= n; the noisy sum is divided by it.
            epochs, steps: how long to train; give one of the two. Epochs are rounded up to whole steps.
            epsilon, delta: the budget; the noise is calibrated so as not to exceed it. epsilon > 0, 1e-14 < delta < 1.
            noise_multiplier: instead of epsilon: noise std on the sum over the clip norm, the same for every relation.
                Still give delta, at which the guarantee is stated. 0 turns the noise off and promises nothing.
            neighboring: ``"add-or-remove-one"``, ``"zero-out"`` or ``"replace-one"``.

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
