"""Try to falsify ``|sum(D) - sum(D')| <= C``: neighbours, noise off, any model, loss and data.

The bound is a theorem about what is computed, so there are no statistics here: one ratio above 1
refutes it. What cannot be covered is said in `products`: the *forward* pass may round
other records differently beside others; pass float64 data and model, or ``tolerance``, where
that matters.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpoptim.clipping import Clipping
from dpoptim.gradients.engine import Engine, Reduction

Batch = Sequence[Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]

KINDS = ("plain", "huge", "largest", "tiny", "zero", "nan", "inf", "copy", "flipped", "random")


@dataclass(frozen=True)
class SensitivityResult:
    """The worst that was found.

    Attributes:
        largest_ratio: ``|sum(D) - sum(D')| / C`` at its largest; infinite if a sum was not finite.
        worst: what was done to the record that gave it.
        trials: pairs of data sets tried.
        tolerance: ratio above 1 that is put down to the rounding of the forward pass.
    """

    largest_ratio: float
    worst: str
    trials: int
    tolerance: float

    @property
    def verdict(self) -> str:
        """``"refuted"`` if one record moved the sum by more than C, else ``"consistent"``."""
        return "consistent" if self.largest_ratio <= 1 + self.tolerance else "refuted"

    def __str__(self) -> str:
        return (
            f"{self.verdict}: one record moved the clipped sum by at most {self.largest_ratio:.7g} "
            f"C in {self.trials} trials (worst: {self.worst})"
        )


def audit_sensitivity(
    model: nn.Module,
    batch: Batch,
    loss: Loss,
    clip_norm: float | Clipping,
    *,
    reduction: Reduction = "sum",
    kinds: Sequence[str] = KINDS,
    records: int | None = None,
    microbatches: int = 1,
    seed: int = 0,
    tolerance: float = 0.0,
) -> SensitivityResult:
    """Remove records, plain and distorted, one at a time, and measure the clipped sum's moves.

    Args:
        model: not attached; it is attached and detached here, and its parameters stay as they are.
        batch: tensors of the same length N >= 2 on their first axis; floating-point ones are
            distorted.
        loss: called as ``loss(model, batch)``; the ``reduction`` over records of one term each.
        clip_norm: C, or a whole clipping rule.
        reduction: of the loss, ``"mean"`` or ``"sum"``.
        kinds: what is done to the record, from `KINDS`.
        records: how many of the N records are tried, the first ones; all by default.
        microbatches: physical batches that the logical batch is cut to.
        seed: of the "random" records.
        tolerance: see the module.

    Returns:
        the finding, with a verdict.

    Raises:
        ValueError: an unknown kind, or a batch too short.
        PrivacyError: what attaching the model or its backward pass raises; that is a refusal, not
            a finding.
    """
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"kinds {sorted(unknown)} are unknown; choose from {', '.join(KINDS)}.")
    N = len(batch[0])
    if N < 2 or any(len(part) != N for part in batch):
        raise ValueError("batch must hold tensors of one common length of at least 2 records.")
    rule = clip_norm if isinstance(clip_norm, Clipping) else Clipping(clip_norm)
    generator = torch.Generator().manual_seed(seed)
    largest, worst, trials = 0.0, "none", 0

    def sums(parts: Batch) -> list[Tensor]:
        return clipped_sums(
            model, parts, loss, rule, capacity=N, reduction=reduction, microbatches=microbatches
        )

    for kind in kinds:
        for place in range(N if records is None else min(records, N)):
            whole = [distort(part, place, kind, generator) for part in batch]
            others = [torch.cat([part[:place], part[place + 1 :]]) for part in whole]
            ratio = joint_distance(sums(whole), sums(others)) / rule.norm
            trials += 1
            if ratio > largest:
                largest, worst = ratio, f"{kind} record {place}"
    return SensitivityResult(largest, worst, trials, tolerance)


def clipped_sums(
    model: nn.Module,
    batch: Batch,
    loss: Loss,
    rule: Clipping,
    *,
    capacity: int,
    reduction: Reduction = "sum",
    microbatches: int = 1,
) -> list[Tensor]:
    """A logical batch's clipped sums, noiseless and private: a float64 tensor a parameter."""
    engine = Engine(model, rule, capacity=capacity, reduction=reduction)
    engine.attach()
    try:
        for parts in cut(batch, microbatches):
            engine.begin_microbatch(len(parts[0]))
            loss(model, parts).backward()
        engine.require_all_closed()
        return engine.split(engine.take())
    finally:
        engine.detach()
        for p in engine.parameters:
            p.grad = None


def cut(batch: Batch, microbatches: int) -> Iterator[Batch]:
    yield from zip(*(part.chunk(microbatches) for part in batch), strict=True)


def joint_distance(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Euclidean distance of lists of tensors as vectors; infinite where it is no number."""
    squares = [(a - b).double().square().sum() for a, b in zip(first, second, strict=True)]
    distance = float(torch.stack(squares).sum().sqrt())
    return float("inf") if math.isnan(distance) else distance


def distort(x: Tensor, place: int, kind: str, generator: torch.Generator) -> Tensor:
    """A copy of ``x`` with record ``place`` adversarial; integers are left or copied."""
    x = x.clone()
    if kind == "copy":
        x[place] = x[place - 1]
    if not x.is_floating_point():
        return x
    match kind:
        case "huge":
            x[place] *= 1e4
        case "largest":
            x[place] = torch.finfo(x.dtype).max / 4
        case "tiny":
            x[place] *= 1e-20
        case "zero":
            x[place] = 0
        case "nan":
            x[place] = float("nan")
        case "inf":
            x[place] = float("inf")
        case "flipped":
            x[place] = -x[place - 1]
        case "random":
            x[place] = 3 * torch.randn(x[place].shape, generator=generator, dtype=x.dtype)
    return x
