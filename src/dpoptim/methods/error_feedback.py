"""Clipped error feedback: what one record can do to a whole run, and the memory that does it.

A run of T steps releases ``v_t = c_t + clip(e_t)`` plus noise, where c_t sums what was clipped of
each gradient and ``e_{t+1} = e_t - clip(e_t) + r_t`` remembers the rest r_t. (All on the scale of
sums: e is batch_size times the paper's.) One record changes c_t by at most a and r_t by at most
rho, in the at most k steps that it takes part in. ``clip(., b)`` is the projection onto the ball
of radius b.

**Theorem.** Let S^2 be `squared_shifts`, whatever the losses. With independent Gaussian noise of
standard deviation sigma on v_t, the run is S/sigma-GDP, if who takes part is drawn without looking
at the data.

*Proof.* Fix that draw, and the released history: both worlds see the same parameters, so e and e'
are determined. Write d = e' - e at some step, delta = clip(e') - clip(e), h = d - delta, D = |d|,
and p, q for the record's change of c and r: the shift is delta + p, and then d becomes h + q.
Projections are firmly non-expansive: ``|delta|^2 <= <delta, d>``, so (i) ``<delta, h> >= 0`` and
``|delta|^2 + |h|^2 <= D^2``. For a ball, moreover, (ii) ``|delta|^2 <= 2 b (D - |h|)``. To see it,
write x = clip(e), y = clip(e'), e - x = s x and e' - y = t y with s, t >= 0, where s > 0 only if
|x| = b, and t > 0 only if |y| = b; so ``h = t y - s x``. If both are 0, h = 0. If only t > 0, then
``<delta, h> = t (b^2 - <x, y>) >= t |delta|^2 / 2 = |h| |delta|^2 / (2 b)``, as |x| <= b; likewise
s. If both, ``<delta, h> = (s + t)(b^2 - <x, y>) = (s + t) |delta|^2 / 2`` and ``|h| <= (s + t)
b``. In every case ``<delta, h> >= |h| |delta|^2 / (2 b)``, so ``D^2 = |delta|^2 + |h|^2 + 2
<delta, h> >= (|h| + |delta|^2 / (2 b))^2``, because ``|delta| <= 2 b``. d is 0 before the first
participation.

Leak: by (i), ``sqrt(sum of the |delta|^2 so far + D^2)`` grows only at participations, each time
by at most rho, so all
|delta|^2 add up to at most (k rho)^2; by (ii) they add up to at most 2 b k rho; and T - 1 of them,
each at most (2 b)^2, are not zero. Cross: shifts are at most |delta| + a at participations,
|delta| else. The first has delta = 0; those of the k - 1 others add up to at most ``sqrt(k - 1)``
times the root of all |delta|^2 so far, which is at most (k - 1) rho or sqrt(2 b (k - 1) rho)
because the last q comes after it; and the j-th is at most min(2 b, (j - 1) rho). So ``S^2 <= k a^2
+ leak + 2 a cross``. Joint: the squared shifts plus D^2 grow only at participations, by ``|delta +
p|^2 + |h + q|^2 - D^2 <= a^2 + rho^2 + 2 (<delta, p> + <h, q>)``. p and q are parallel, p = a' u
and q = rho' u, so the bracket is at most ``|a' delta + rho' h| <= max(a, rho) |delta + h| = max(a,
rho) D``, by (i); under replace-one they are two such pairs. And D <= (j - 1) rho at the j-th. So
``S^2 <= k (a^2 + rho^2) + k (k - 1) rho max(a, rho)``. If e is set to zero between passes, passes
are separate blocks with k = 1, where leak <= rho min(rho, 2 b) and cross = 0, and their squares
add up.

So the squared shifts add up to at most S^2 for *every* history. The log-likelihood ratio of the
run, padded by one independent Gaussian that makes up the difference, is exactly normal with
variance S^2/sigma^2 and half that mean: a pair of Gaussians S/sigma apart. QED.

**Layer by layer.** If every layer's part is clipped by itself, to C1 / sqrt(L) and R / sqrt(L),
and e is projected layer by layer onto balls of radius b / sqrt(L), then each layer is a run of the
theorem, for the same history. S is homogeneous in (a, rho, b), so the squared shifts of each layer
add up to at most S^2 / L, and those of all layers to S^2, as without.

**Clip norms that move.** If everything is divided by the step's own clip norm C_t before it is
remembered and released, a record changes c_t by at most 1 and r_t by at most R/C - 1 in every
step, whatever C_t, which both worlds read off the same history: the theorem holds in units of C_t.
A step that only measures releases another vector, of norm at most 1, in the place of c_t, and
leaves e as it was. Each bound grows by at least a^2 with one participation more, so a
participation in such a step costs no more than any other; and a count beside the gradients, both
scaled as `private_quantile` does, shifts by a part of a^2 at participations alone, with the rest
of S^2 scaled down by as much.

**Rounding.** e, its norm and its projection are float64, the norm to 2^-40 (`norm`), so each step
moves the quantities above by at most ``zeta = 2^-36 b + 2^-50 M`` more than in exact arithmetic, M
bounding all that e may hold. All bounds are Lipschitz in these: norms of shifts grow by at most
sqrt(2) zeta a step, D by as much, and what that adds to the square roots above is at most 4 (1 +
sqrt(k)) T zeta, which `run_sensitivity` adds to S. (For ``|delta| <= 2 b`` alone, 2^-30 of S is
enough.)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import dp_accounting
import torch
from torch import Tensor

from dpoptim.assumptions import Assumption, enforced
from dpoptim.gate import GaussianSum
from dpoptim.mechanisms.mechanism import RunShape, StepMechanism
from dpoptim.methods.sensitive_state import Peers
from dpoptim.sampling import FixedBatches

NORM_BLOCK = 4096  # entries whose squares are added before blocks are


def run_sensitivity(
    *,
    clip: float,
    residual: float,
    feedback: float,
    passes: int,
    steps_per_pass: int,
    reset: bool,
    held: float,
) -> float:
    """S of the theorem under zero-out, rounding included, for a record in one step of each pass.

    Args:
        clip: C1 = a, > 0.
        residual: R - C1 = rho, >= 0; infinite if nothing bounds what enters the state.
        feedback: b = B C2, >= 0 and finite: what the state may add to one sum.
        passes, steps_per_pass: k, and the steps that each of them has.
        reset: whether the state is set to zero after every pass.
        held: M of the theorem: a bound on all that enters the state between two resets; public.
    """
    if residual == 0:
        return math.sqrt(passes) * clip
    steps = passes * steps_per_pass
    blocks, k, length = (passes, 1, steps_per_pass) if reset else (1, passes, steps)
    by_steps = k * clip**2 + (length - 1) * (2 * feedback) ** 2 + 4 * clip * feedback * (k - 1)
    certain = math.sqrt(blocks * by_steps) * (1 + 2.0**-30)
    if math.isinf(residual):
        return certain
    exact = math.sqrt(blocks * squared_shifts(clip, residual, feedback, k, length))
    zeta = 2.0**-36 * feedback + 2.0**-50 * held
    return min(certain, exact + 4 * (1 + math.sqrt(passes)) * steps * zeta)


def squared_shifts(a: float, rho: float, b: float, participations: int, steps: int) -> float:
    """S^2 of the theorem for ``steps`` steps that start with e = 0; rho > 0 and finite."""
    k = participations
    leak = min((k * rho) ** 2, 2 * b * k * rho, (steps - 1) * (2 * b) ** 2)
    rising = min(k - 1, math.floor(2 * b / rho))  # participations before which 2 b does not bind
    one_by_one = rising * (rising + 1) / 2 * rho + (k - 1 - rising) * 2 * b
    cross = min((k - 1) ** 1.5 * rho, (k - 1) * math.sqrt(2 * b * rho), one_by_one)
    joint = k * (a**2 + rho**2) + k * (k - 1) * rho * max(a, rho)
    return min(k * a**2 + leak + 2 * a * cross, joint)


@dataclass(frozen=True)
class HiddenStateNoise(StepMechanism):
    """Independent noise that hides a record in all steps that the error state carries it into.

    **Guarantee.** The whole run is **one** Gaussian of the noise multiplier: the theorem of this
    module, on fixed batches.

    Args:
        clip, residual, feedback: C1, R - C1, and the most that the state adds to the mean, C2; in
            units of the norm bound that `query` is given. reset: whether the state is set to zero
            after every pass.
    """

    clip: float
    residual: float
    feedback: float
    reset: bool

    def sensitivity(self, batches: FixedBatches, steps: int) -> float:
        """S of the theorem, on the sum, under zero-out."""
        passes = batches.participations(steps)
        return run_sensitivity(
            clip=self.clip,
            residual=self.residual,
            feedback=self.feedback * batches.batch_size,
            passes=passes,
            steps_per_pass=batches.steps_per_pass,
            reset=self.reset,
            held=(1 if self.reset else passes) * batches.n * (self.clip + self.residual),
        )

    def audit_family(self, run: RunShape) -> str:
        return "error feedback"

    def event(self, run: RunShape, noise_multiplier: float) -> dp_accounting.DpEvent:
        return dp_accounting.GaussianDpEvent(noise_multiplier)

    def query(self, run: RunShape, noise_multiplier: float, norm_bound: float) -> GaussianSum:
        if not isinstance(run.sampler, FixedBatches):
            raise TypeError(
                f"error feedback is proved on fixed batches, got {type(run.sampler).__name__}."
            )
        rounding = 1 + 2.0**-40  # of the units that the sensitivity is in
        return GaussianSum(
            norm_bound * self.sensitivity(run.sampler, run.steps) * rounding, noise_multiplier
        )

    def assumptions(self, run: RunShape) -> tuple[Assumption, ...]:
        reset = "at the end of every pass" if self.reset else "never"
        share = f"{self.residual / self.clip:g} times that"
        return (
            enforced(f"and at most {share} to the error state, which is reset {reset}"),
            enforced(
                "the error state is private: it is fed back clipped, never shown, and saved in "
                "secret checkpoints alone"
            ),
        )


class ErrorFeedback:
    """The private state e of a run: what clipping took off and has not been fed back yet.

    Args:
        feedback: b, the most that it adds to one sum, in Euclidean norm.
        pass_steps: steps after which it is set to zero; None: never.
        softening: 0 feeds back the projection of e onto the ball of radius b; above 0, ``b e /
            (|e| + softening)``, which is what the paper's automatic variant does (with 0.01, for
            which the theorem above does not hold).

    The part of each unit of the clipping rule (`SensitiveState.attach`) is projected by itself.
    """

    def __init__(self, feedback: float, pass_steps: int | None, softening: float = 0.0) -> None:
        self._feedback, self._pass_steps, self._softening = feedback, pass_steps, softening
        self._units: Callable[[list[Tensor]], list[list[Tensor]]] = lambda sums: [sums]
        self._error: list[Tensor] | None = None
        self._norm: Callable[[Sequence[Tensor]], float] = norm
        self._fed: list[float] = []  # shares of its units that the last query fed back
        self._steps = 0

    def attach(self, by_unit: Callable[[list[Tensor]], list[list[Tensor]]], peers: Peers) -> None:
        self._norm, self._units = peers.norm, by_unit

    def query(self, sums: list[list[Tensor]]) -> list[Tensor]:
        """Add the fed-back part to the clipped sum, in place; the state stays until `released`.

        **Guarantee.** The theorem of this module, if a record moves the first sum by at most C1
        and the second by at most R - C1, in parallel, and if `released` follows every release,
        with the same sums.
        """
        clipped, _ = sums
        if self._error is None or (
            self._pass_steps is not None and self._steps % self._pass_steps == 0
        ):
            self._error = [torch.zeros_like(part) for part in clipped]
        self._error = [
            error.to(total.device) for error, total in zip(self._error, clipped, strict=True)
        ]  # after a resume
        errors = self._units(self._error)
        radius = self._feedback / math.sqrt(len(errors))
        self._fed = [self._share(self._norm(unit), radius) for unit in errors]
        for unit, totals, share in zip(errors, self._units(clipped), self._fed, strict=True):
            for error, total in zip(unit, totals, strict=True):
                total.add_(error, alpha=share)
        return clipped

    def released(self, sums: list[list[Tensor]]) -> None:
        """Update the state after `query`'s release: less what was fed back, plus the residual."""
        assert self._error is not None
        for unit, rests, share in zip(
            self._units(self._error), self._units(sums[1]), self._fed, strict=True
        ):
            for error, rest in zip(unit, rests, strict=True):
                torch.add(rest, error, alpha=1 - share, out=error)
        self._steps += 1

    def skipped(self) -> None:
        self._steps += 1

    def _share(self, length: float, radius: float) -> float:
        """Return the share of e that is fed back."""
        if self._softening > 0:
            return radius / (length + self._softening)
        return radius / length if length > radius else 1.0

    def secret_state(self) -> dict[str, Any]:
        """For a checkpoint, secret: sums without noise. Copies; `restore` reads it."""
        error = self._error
        return {
            "error": None if error is None else [part.clone() for part in error],
            "steps": self._steps,
        }

    def restore(self, secret: dict[str, Any]) -> None:
        """Go on, from a fresh state, where `secret_state` was taken."""
        error = secret["error"]
        self._error = None if error is None else [part.clone() for part in error]
        self._steps = secret["steps"]

    def __repr__(self) -> str:
        return "<ErrorFeedback: private>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("the error state cannot be pickled or copied: it holds sums without noise.")


def norm(tensors: Sequence[Tensor]) -> float:
    """Norm of float64 tensors together, to 2^-40 of it for 2^36 entries, on any backend."""
    squares = []
    for tensor in tensors:
        entries = tensor.flatten()
        whole = entries.numel() // NORM_BLOCK * NORM_BLOCK
        for part in (entries[:whole].view(-1, NORM_BLOCK), entries[None, whole:]):
            squares += torch.linalg.vecdot(part, part).tolist()
    return math.sqrt(math.fsum(squares))
