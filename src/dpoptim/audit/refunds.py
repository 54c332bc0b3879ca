"""An attack on ended runs' refunds: pick good ends, resume the killed, spend all that is left.

Every entry of the released sums is a trial of its own: a canary adds 1 to all sums, or is not
there. The attacker may stop by anything that was released; given where runs stopped, each trial is
one Gaussian, so that the errors of guessing give a certified lower bound on epsilon.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpoptim.accounting import gdp_epsilon
from dpoptim.accounting.ledger import BudgetExceeded, Ledger
from dpoptim.audit.bounds import Errors, gdp_lower_bound
from dpoptim.errors import LedgerError, PrivacyError
from dpoptim.gate import FilteredGate, Gate
from dpoptim.methods import DPSGD
from dpoptim.noise.stream import KeyStream
from dpoptim.plan import Plan

EPSILON, DELTA = 2.0, 1e-5  # the budget
STEPS, NOISE, LOOKS, AT_MOST = 160, 30.0, 3, 10
LOOKS_GOOD = 0.5  # of the first canary's released values over their noise
DIGEST = "0" * 64


@dataclass(frozen=True)
class RefundResult:
    """Leak of everything released under a budget.

    Attributes:
        epsilon: a certified lower bound on it.
        claimed: what the filter promises where all releases are Gaussian: their squared shifts
            stay within its bound on every path, so together they are one Gaussian.
        budget: the epsilon of the budget; it promises no less than the filter keeps.
        runs, released: admitted, and noisy sums of all of them.
    """

    epsilon: float
    claimed: float
    budget: float
    runs: int
    released: int

    @property
    def verdict(self) -> str:
        """``"refuted"`` if more leaked than the filter allows, else ``"consistent"``."""
        return "refuted" if self.epsilon > self.claimed else "consistent"

    def __str__(self) -> str:
        return (
            f"{self.verdict}: {self.runs} runs, ended early, leak at least epsilon="
            f"{self.epsilon:.4g}; the filter of a budget of {self.budget:g} keeps them within "
            f"{self.claimed:.4g}"
        )


def audit_refunds(
    *,
    canaries: int = 200_000,
    confidence: float = 0.95,
    adaptive: bool = False,
) -> RefundResult:
    """Spend a whole budget on runs that are stopped, killed, taken up and ended.

    Args:
        canaries: trials; half of them are there.
        confidence: of the lower bound.
        adaptive: by runs whose prices are chosen on the way (`FilteredGate`), as solvers' are; they
            have no checkpoints. False: by planned ones.
    """
    present = torch.arange(canaries, dtype=torch.float64) % 2
    with Ledger(epsilon=EPSILON, delta=DELTA) as ledger:
        attacker = Attacker(ledger, present)
        steps = STEPS
        while steps >= 1:
            try:
                (attacker.run_adaptively if adaptive else attacker.run)(steps)
            except BudgetExceeded:
                steps //= 2
        runs = len(ledger.entries())
        assert ledger.budget is not None
        assert ledger.budget.order is not None
        kept = math.sqrt(2 * ledger.budget.limit / ledger.budget.order)
    wrong = (attacker.seen / attacker.released > 0.5).double() != present
    half = canaries // 2
    errors = Errors(
        int((wrong & (present == 0)).sum()),
        canaries - half,
        int((wrong & (present == 1)).sum()),
        half,
    )
    mu = gdp_lower_bound(errors, confidence)
    found = 0.0 if mu <= 0 else gdp_epsilon(mu, DELTA)
    claimed = gdp_epsilon(kept, DELTA)
    return RefundResult(found, claimed, EPSILON, runs, attacker.released)


class Attacker:
    """Adds up whatever the library lets go of.

    Attributes:
        seen: the sum of all released sums, float64, shape (canaries,).
        released: how many there are.
    """

    def __init__(self, ledger: Ledger, present: Tensor) -> None:
        self.seen, self.released = torch.zeros_like(present), 0
        self._ledger, self._present = ledger, present
        self._runs = self._seed = 0

    def run(self, steps: int) -> None:
        """One run: looked at, every other one killed, taken up, looked at, and ended early."""
        self._runs += 1
        plan = DPSGD(clip_norm=1.0).plan(
            n=10, batch_size=10, steps=steps, noise_multiplier=NOISE, delta=1e-5
        )
        first = gate = self._gate(plan)
        self._until_it_looks_good(gate, gate.releases)
        if steps >= 2 * AT_MOST and self._runs % 2:
            state = gate.secret_state()
            gate.note_checkpoint(DIGEST)
            self._take(gate)  # killed after this
            gate = self._gate(plan, resume=state)
            self._until_it_looks_good(gate, gate.releases - gate.released)
            self._all_of(first)  # which did not die after all
        gate.give_back()
        self._all_of(gate)

    def run_adaptively(self, steps: int) -> None:
        """One run with a budget for so many releases: looked at, ended, and tried again."""
        self._seed += 1
        gate = FilteredGate(
            mu=math.sqrt(steps) / NOISE,
            neighboring="add-or-remove-one",
            ledger=self._ledger,
            noise=KeyStream.from_seed(self._seed, "audit of refunds"),
            label="stopped when it looks good",
        )
        self._until_it_looks_good(gate, steps)
        gate.finish()
        self._all_of(gate)

    def _gate(self, plan: Plan, resume: dict[str, object] | None = None) -> Gate:
        self._seed += 1
        return Gate(
            event=plan.event,
            neighboring=plan.neighboring,
            query=plan.query,
            releases=plan.steps,
            ledger=self._ledger,
            noise=KeyStream.from_seed(self._seed, "audit of refunds"),
            label="stopped when it looks good",
            resume=resume,
            checkpoint="" if resume is None else DIGEST,
            part_of=plan.event_of_part,
        )

    def _until_it_looks_good(self, gate: Gate | FilteredGate, left: int) -> None:
        """A few releases, or fewer if the first canary looks as if it were there."""
        for _ in range(min(LOOKS, left)):
            if self._take(gate) > LOOKS_GOOD * NOISE:
                return

    def _take(self, gate: Gate | FilteredGate) -> float:
        if isinstance(gate, FilteredGate):
            noisy = gate.release_sum(self._present, norm_bound=1.0, mu=1 / NOISE)
        else:
            (noisy,) = gate.release_sum([self._present.clone()])
        self.seen += noisy
        self.released += 1
        return float(noisy[0])

    def _all_of(self, gate: Gate | FilteredGate) -> None:
        """A few more releases, or as many as a gate lets go of."""
        for _ in range(AT_MOST):
            try:
                self._take(gate)
            except (PrivacyError, LedgerError):
                return


def refunds(*, adaptive: bool = False) -> str:
    """The detector: what is refuted."""
    canaries = 50_000 if adaptive else 200_000
    result = audit_refunds(confidence=1 - 1e-6, canaries=canaries, adaptive=adaptive)
    return str(result) if result.verdict == "refuted" else ""
