"""Refusals of losses that are not the records' own, before their gradients are compared."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.errors import NotByThisWayError, PrivacyError, SamplesInteractError
from dpoptim.gradients.watch.values import Values
from dpoptim.training.batches.user_code import shows_private
from dpoptim.training.losses.meeting_places import refuse_meeting
from dpoptim.training.randomness.secret_randomness import seed_torch
from dpoptim.training.trials.compared_batches import Batches, shapes_in
from dpoptim.training.trials.first_passes import refuse_written

LOSSES_AGREE = 1e-3  # within this share
DRAWS_ELSEWHERE = (
    "it draws from numpy's or Python's random generators, so that nobody can tell whether records "
    "are mixed (with records alone none is: mixup would mix each with itself, and you would train "
    "without mixup)"
)

OF_OTHERS = "losses of the records depend on other records of the batch"
PADDED = (
    ", to whose length they are padded. The shortest fix: let collate_fn pad each record to one "
    "public length, F.pad(x, (0, LENGTH - x.shape[1])). If you average over the padded length, "
    "divide by each record's own count: dpoptim.losses.per_sample_mean(losses, mask). Else "
)
CAUSES = (
    "usual causes are mixup, pairs inside the batch (CLIP, SigLIP), a count, mean or maximum over "
    "the batch (weights by class counts, standardising, mining), random numbers drawn for the "
    "whole batch at once (stratified or antithetic times: draw each record's own), positions "
    "behind a record's own"
)
OWN_LOSSES = (
    "Fix: one loss a record, at the place where the record was delivered, made of that record "
    "alone."
)


def refuse_draws_elsewhere() -> None:
    """Refuse a loss of which no two runs can be compared.

    Raises:
        NotByThisWayError: no other record meets one that passes alone.
    """
    raise NotByThisWayError(
        f"loss cannot be checked: {DRAWS_ELSEWHERE}. Fix: draw from torch's generator, "
        'torch.rand(()) for random.random() or np.random.rand(); or isolation="alone", in which '
        "no record meets another.",
        reason=DRAWS_ELSEWHERE,
        fix="draw from torch's generator, torch.rand(()) for random.random() or np.random.rand()",
    )


def refuse_other_losses(losses: Tensor, allowed: Sequence[int], *, on_private: bool) -> None:
    """Refuse losses that are not one for each of so many records.

    Args:
        on_private: whether the records are; how many losses there are may then be a count of some.
    """
    if losses.dim() != 1 or len(losses) not in allowed:
        shape = "another shape" if on_private else f"shape {tuple(losses.shape)}"
        raise SamplesInteractError(
            "loss must return one value for each record, shape (rows,), or a scalar; of "
            f'{allowed[0]} records it returned {shape}. Fix: reduction="none", and '
            "dpoptim.losses.per_sample_mean where a record has "
            "several losses."
        )


@contextmanager
def single_failures_refused(
    many: Callable[[], object], count: int, *, on_private: bool
) -> Iterator[None]:
    """Around what takes records alone: refuse a loss that takes many, but not one of them.

    Args:
        many: takes a batch of ``count`` the same way; what fails there, too, is raised as it is.
        on_private: whether the records are; ``count`` may then be read off their lengths.
    """
    try:
        yield
    except PrivacyError:
        raise
    except Exception as error:  # whatever the user's code raises; what it says might quote a record
        many()
        several = "several" if on_private else count
        raise SamplesInteractError(
            f"the loss of {several} records was computed, but {type(error).__name__} was raised on "
            "a batch of one of them: squeeze() without an axis drops the first axis of a batch of "
            "one, which sampling delivers, too (squeeze(-1) names one); or the loss needs others, "
            "as where it standardises by the batch or compares records. Fix: let each record's "
            "loss depend on that record alone, in batches of any size, one included."
        ) from (error if shows_private() else None)


def refuse_losses_lost_beside_others(losses: Tensor, alone: Sequence[Tensor]) -> None:
    """Refuse losses that are finite of records alone, and not beside others.

    Args:
        losses: of a batch, of which few are finite, or the scalar.
        alone: of its records.
    """
    finite = [bool(each.isfinite().all()) for each in alone]
    # one record without a finite loss leaves a scalar none
    if all(finite) or (losses.dim() and sum(finite) > 1):
        raise SamplesInteractError(
            "losses are finite of records alone, and not beside another one: that record would "
            "take away what is learnt from others, as where exponents are scaled by the largest "
            "score of a batch. Fix: by the largest of each record's own, scores - "
            "scores.amax(1, keepdim=True), or torch's cross_entropy and logsumexp."
        )


def refuse_other_order(
    losses: Tensor,
    alone: Sequence[Tensor],
    batches: Batches,
    tolerance: float,
    *,
    on_private: bool,
) -> None:
    """Refuse losses that are not the records' own, in the order of delivery.

    Args:
        alone: of the records alone.
        tolerance: `tolerance_of` the model: a batch rounds otherwise than a record alone.
        on_private: whether the records are.

    **Guarantee.** Of private records one refusal says all that is said: whether their losses are
    permuted, or theirs are padded, which may be a matter of these records, is not told.
    """
    own = torch.stack([each.detach().reshape(-1) for each in alone])[batches.order].reshape(-1)
    found, within = losses.detach(), max(LOSSES_AGREE, tolerance)
    if agree(found, own, within):
        return
    if on_private:
        raise SamplesInteractError(f"{OF_OTHERS}, or come in another order: {CAUSES}. {OWN_LOSSES}")
    refuse_meeting(losses, len(batches.order))
    if agree(found.sort().values, own.sort().values, within):
        raise SamplesInteractError(
            "losses are those of the records, but not in their order: the batch is sorted or "
            "shuffled on the way (by collate_fn, say). Fix: leave each record's loss at the place "
            'where it was delivered; or isolation="alone", in which no record meets another.'
        )
    padded = padding_adds(batches)
    raise SamplesInteractError(f"{OF_OTHERS}{PADDED if padded else ': '}{CAUSES}. {OWN_LOSSES}")


def padding_adds(batches: Batches) -> bool:
    """Whether some record's tensors are longer in the batch than in one of it alone."""
    together = [shape[1:] for shape in shapes_in(batches.together)]
    return any([shape[1:] for shape in shapes_in(each)] != together for each in batches.alone)


def refuse_losses_moved(losses: Tensor, loss: Callable[[Any], Tensor], batches: Batches) -> None:
    """Refuse losses that others' records move, by less than few digits round.

    Args:
        losses: of all of them together.
        loss: of a batch.

    **Guarantee.** In whatever digits: batches of one shape round a record's row alike, so that
    losses which differ by more than `LOSSES_AGREE` are refused.
    """
    together = losses.detach().reshape(len(batches.order), -1)
    for kept, batch in batches.beside_others():
        found = loss(batch).detach().reshape(together.shape)
        if not agree(together[kept], found[kept], LOSSES_AGREE):
            raise SamplesInteractError(f"{OF_OTHERS}: {CAUSES}. {OWN_LOSSES}")


def agree(losses: Tensor, others: Tensor, tolerance: float) -> bool:
    """Whether losses are the same, within a share of each, and of the largest."""
    finite = others[others.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    return torch.allclose(losses, others, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def same_losses(
    model: nn.Module, run: Callable[[], Tensor], seen: Sequence[Tensor], values: Values
) -> Tensor:
    """The losses of a batch, of a model that keeps nothing of it, and has the same for it later.

    Args:
        seen: losses that were the same twice, if there are some.
        values: what the model's buffers and parameters held before.

    Raises:
        SamplesInteractError: it does not.
    """
    if seen:
        refuse_written(values, model)
        return seen[0]

    def losses() -> Tensor:
        seed_torch(0)
        found = run()
        refuse_written(values, model)
        return found

    first, second = losses().detach(), losses()
    if not torch.allclose(first, second.detach(), rtol=1e-4, atol=1e-6, equal_nan=True):
        raise SamplesInteractError(
            "the same batch has another loss the second time: model or loss remember what they "
            "saw, so that records see each other; or the loss changes its batch in place. Fix: "
            "keep nothing from batch to batch; draw random numbers from torch's generator alone; "
            "x = x / 255 in the place of x.div_(255)."
        )
    return second
