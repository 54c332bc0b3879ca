"""Refusals of losses whose batches have other gradients than their records alone."""

from dpoptim.errors import SamplesInteractError
from dpoptim.training.losses.coupled_losses import OWN_PAIRS

EACH = "dpoptim.per_sample(loss), which takes it of each record by itself"
# Clamped by the libraries that these are of, so that nothing is divided by none alone.
INSIDE = (
    "Models of a library that do so inside (detectors: DETR, YOLOS; forecasters: "
    'TimeSeriesTransformer, Informer): isolation="alone", in which each record goes by its own.'
)


class NothingAloneError(SamplesInteractError):
    """A batch has a gradient, and no record that is alone in one."""


class NoneFiniteError(SamplesInteractError):
    """No record that is alone in a batch has a finite gradient."""


def nothing_alone() -> NothingAloneError:
    """The refusal of a loss that only several records make a gradient of."""
    return NothingAloneError(
        "no record alone has a gradient by this loss, which compares the records of a batch "
        "(contrastive ones, as in SimCLR and CLIP; Cox's risk sets): one record would move the "
        "gradients of all, and with records alone nothing would be learnt. Fix: let each record's "
        f"loss depend on that record alone, by {OWN_PAIRS}."
    )


def nothing_to_learn() -> SamplesInteractError:
    """The refusal of a loss by which no record that was tried has a gradient, in whatever way."""
    return SamplesInteractError(
        "no record that was tried, made up or of the data set, has a gradient by this loss, so "
        "that budget would be spent on noise. Usual causes: a loss that compares the records of a "
        "batch (contrastive ones, triplets in the batch, Cox's risk sets), of which nothing is "
        "left for a record by itself, also by dpoptim.per_sample; a record 0 with nothing to learn "
        "from, such as no label and no box, whose form made-up records have; weights of zero "
        "(attach with the weight of the first step, above 0), or layers that pass nothing on. Fix: "
        "let each record's loss depend on that record alone, by "
        f"{OWN_PAIRS}; put a record that has labels first."
    )


def none_finite() -> NoneFiniteError:
    """The refusal of a loss where no record's own gradient is finite."""
    return NoneFiniteError(
        "no record by itself has a finite gradient, as where several are needed (standardising by "
        "the mean and deviation of the batch, an unbiased variance, a correlation), or where a "
        "record without any token that counts is divided by how many it has (preds[mask > 0], a "
        "mean over a mask of zeros). Fix: let each record's loss depend on that record alone; "
        "standardise by public numbers, or with dpoptim.preprocessing before training; clamp the "
        "count, (losses * mask).sum() / mask.sum().clamp(min=1)."
    )


def weighted_mean() -> SamplesInteractError:
    """The refusal of a loss by whose weights, which add up to 1, records are averaged."""
    return SamplesInteractError(
        "the loss is a weighted mean over the records of a batch, and how much a record "
        "weighs depends on the others: a mean over the tokens of the whole batch that is "
        "made by hand (masks, padding), or class weights in one; of cross_entropy and "
        "nll_loss they are served, where labels come one record's after another's. Fix: "
        "average over each record's own tokens first, "
        'dpoptim.losses.per_sample_mean(losses, mask), of losses with reduction="none", '
        f"which may have class weights in them; or use {EACH}."
    )


def weighed_by_others() -> SamplesInteractError:
    """The refusal of a loss by whose weights records are added up."""
    return SamplesInteractError(
        "how much a record weighs in the loss depends on the others: a root, ratio or "
        "limit of sums over the batch (RMSE, a mean by a count of what is in it). Fix: of "
        'each record, one loss a record, such as F.mse_loss(..., reduction="none"); or '
        f"{EACH}."
    )


def mixed_records(records: int, most: str) -> SamplesInteractError:
    """The refusal of a loss that mixes them in no way that is known.

    Args:
        records: of a batch that was tried.
        most: at which parameter it shows, in words.
    """
    return SamplesInteractError(
        "records are mixed, or the first axis of some layer is not the record: the "
        f"clipped sum of a batch of {records} differs from that of its records taken alone"
        f"{most}. Usual causes: a loss averaged over the tokens of the whole batch (average in "
        "each record first), a maximum or dice over it, a term of the batch's mean (a balance of "
        "experts, the entropy of the mean prediction), an in-batch contrastive loss, class "
        "weights in a mean made by hand, batch statistics, a number of the whole batch by which "
        "the model branches or scales (a residual that ends an iteration, an adaptive step size, "
        "the mean of all series in place of one of which nothing was observed, a count of all "
        "boxes), positions of shape (T,) instead "
        "of (1, T), a (T, B, ...) layout. Fix: make each record's loss depend on that record "
        f"alone, or use {EACH}. {INSIDE}"
    )
