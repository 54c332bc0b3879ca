"""Do records see each other? Compare a batch with its records taken one at a time."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpoptim.clipping import Clipping
from dpoptim.errors import SamplesInteractError
from dpoptim.gradients.engine import Reduction
from dpoptim.gradients.hook_manager import watch_batch_statistics
from dpoptim.gradients.oracle import (
    Loss,
    clipped_sums,
    engine_sums,
    gradients_alone,
    squared_norms,
    trainable,
    worst_mismatch,
)
from dpoptim.training.fixed_noise import FixedNoise
from dpoptim.training.made_up import odd_batch_size

COPIED_PARAMETERS = 1 << 26
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}  # of the bound, for each record


@dataclass(frozen=True)
class CheckResult:
    """What `check` found: the reduction to pass to `attach`, and how many records it compared."""

    loss_reduction: Reduction
    records: int


def check(model: nn.Module, loss: Loss, batch: Any) -> CheckResult:
    """Test that model and loss treat the records of a batch independently, and find the loss's reduction.

    The engine's clipped sum over a batch is compared with the sum over micro-batches of one. Dropout is off meanwhile (a
    model that draws random numbers otherwise is tested in evaluation mode); nothing about the model changes.

    Args:
        model: the model that will be attached (not attached yet).
        loss: ``loss(model, batch) -> scalar tensor``, as the training loop computes it.
        batch: tensors (in any nest of tuples, lists and dicts) whose first axis is the record, at least two records; every
            one takes a backward pass of its own, so some tens will do. Have different lengths, classes and masks among
            them. Use public or made-up records: pass or fail is not private.

    Returns:
        the reduction, ``"mean"`` or ``"sum"``.

    Raises:
        SamplesInteractError: the gradient of a record depends on the others, or a layer's first axis is not the record:
            the message names the parameter where it shows.
        ValueError: a batch without a common first axis.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in leaves}
    if len(sizes) != 1 or min(sizes) < 2:
        raise ValueError(
            f"batch must hold tensors, in tuples, lists and dicts, with one common first axis of at least 2 records; got a "
            f"{type(batch).__name__} with first axes {sorted(sizes)}. A mapping of another type: dict(batch)."
        )
    given = sizes.pop()
    rows = odd_batch_size(model, leaves, least=given)

    def take(indices: list[int]) -> Any:
        return pytree.tree_map(lambda leaf: leaf[indices] if isinstance(leaf, Tensor) else leaf, batch)

    order = [i % given for i in range(rows)]
    compare = Comparison(model, loss, [take([i]) for i in order], take(order), rows)
    watch_batch_statistics(model)
    with quiet(model, lambda: [loss(model, compare.together)]):
        return CheckResult(compare.reduction(("mean", "sum")), rows)


class Comparison:
    """One batch, and the same records one at a time: under a bound that really clips, and under one that does not.

    Clipping shows whether the norms are each record's own; without it, a sum read as a mean is off by the batch size.
    """

    def __init__(self, model: nn.Module, loss: Loss, alone: list[Any], together: Any, rows: int) -> None:
        self.model, self.loss, self.alone, self.together, self.rows = model, loss, alone, together, rows

    def reduction(self, candidates: tuple[Reduction, ...]) -> Reduction:
        """The candidate under which engine and truth agree.

        Raises:
            SamplesInteractError: none does.
        """
        gradients = gradients_alone(self.model, self.loss, self.alone)
        norms = squared_norms(gradients).sqrt()
        bounds = [max(float(norms.median()) / 2, 1e-6), max(2 * float(norms.max()), 1e-6)]
        worst = ""
        for candidate in candidates:
            worst = next(filter(None, (self._mismatch(gradients, C, candidate) for C in bounds)), "")
            if not worst:
                return candidate
        if self._weighs_records(gradients):
            raise SamplesInteractError(
                "the loss is a weighted mean over the records of a batch, and how much a record weighs depends on the "
                "others: a mean over the tokens of the whole batch (ignore_index, padding; the loss inside a Hugging Face "
                "model), or class weights inside a mean. Fix: average over each record's own tokens first, "
                'dpoptim.losses.per_sample_mean(losses, mask), of losses with reduction="none"; multiply class weights '
                "yourself."
            )
        raise SamplesInteractError(
            f"records see each other, or the first axis of some layer is not the record: the clipped sum of a batch of "
            f"{self.rows} differs from that of its records taken alone, most at parameter {worst!r}. Usual causes: a "
            "loss averaged over the tokens of the whole batch (average in each record first), an in-batch contrastive "
            "loss, class weights inside a mean, batch statistics, positions of shape (T,) instead of (1, T), a "
            "(T, B, ...) layout. Fix: make each record's loss depend on that record alone."
        )

    def _weighs_records(self, gradients: list[Tensor]) -> bool:
        """Whether the batch's gradient is made of the records' own, with weights that add up to 1."""
        parameters = list(trainable(self.model).values())
        found = torch.autograd.grad(self.loss(self.model, self.together), parameters, allow_unused=True)
        whole = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
        rows = torch.cat([g.double().reshape(self.rows, -1).cpu() for g in gradients], 1)
        target = torch.cat([g.double().flatten().cpu() for g in whole])
        weights = torch.linalg.pinv(rows @ rows.T, hermitian=True, rtol=1e-9) @ (rows @ target)
        explained = float((weights @ rows - target).norm()) <= 1e-3 * float(target.norm())
        return explained and bool((weights > 0).all()) and abs(float(weights.sum()) - 1) < 1e-3

    def _mismatch(self, gradients: list[Tensor], clip_norm: float, reduction: Reduction) -> str:
        """The parameter where engine and truth differ most under this bound; empty if they agree."""
        clipping = Clipping(clip_norm)
        named = trainable(self.model)
        truth = clipped_sums(gradients, clipping, self.rows, reduction)
        ours = engine_sums(self.model, self.loss, self.together, self.rows, clipping, reduction)
        worst, distance = worst_mismatch(named, ours, truth)
        allowed = clip_norm * self.rows * max(TOLERANCE[p.dtype] for p in named.values())
        return "" if distance <= allowed else worst


@contextmanager
def quiet(model: nn.Module, run: Callable[[], list[Tensor]]) -> Iterator[None]:
    """Make the model deterministic, in training mode if that can be; everything is put back.

    Dropout layers are switched off. If ``run`` still draws random numbers, they are always the same; where that cannot be
    done, the whole model goes to evaluation mode.
    Buffers, the parameters of all but very large models, and the global random generator are restored afterwards.
    """
    modes = {module: module.training for module in model.modules()}
    copied = list(model.buffers())
    if sum(p.numel() for p in model.parameters()) <= COPIED_PARAMETERS:  # of larger ones there may be no room for two
        copied += model.parameters()
    before = {t: t.detach().clone() for t in copied}
    elsewhere = {p.device for p in model.parameters() if p.device.type != "cpu"}
    try:
        with ExitStack() as generators, torch.enable_grad():
            generators.enter_context(torch.random.fork_rng([]))
            for device in elsewhere:
                generators.enter_context(torch.random.fork_rng([device.index or 0], device_type=device.type))
            for module in modes:
                if isinstance(module, nn.modules.dropout._DropoutNd):
                    module.eval()
            if draws_random_numbers(run):
                generators.enter_context(FixedNoise())
            if draws_random_numbers(run):
                model.eval()
            yield
    finally:
        for module, training in modes.items():
            module.training = training
        with torch.no_grad():
            for t, value in before.items():
                if not torch.equal(t, value):
                    t.copy_(value)


@torch.no_grad()
def draws_random_numbers(run: Callable[[], list[Tensor]]) -> bool:
    outputs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        outputs.append(run())
    return any(not torch.equal(a, b) for a, b in zip(*outputs, strict=True))
