"""Are records mixed? A training loop's model and loss, tried on records that the caller made up."""

from typing import Any

from torch import nn

from dpoptim.gradients.oracle import Loss
from dpoptim.opacus_words import knows_opacus
from dpoptim.runtime.torch_internals import checkpointing_served
from dpoptim.training.batches import records as forms
from dpoptim.training.batches.loading import Collate
from dpoptim.training.losses.loss_argument import require_loss
from dpoptim.training.other_libraries import refuse_nothing_to_train, uncompiled
from dpoptim.training.trials.deciding_numbers import refuse_deciding_numbers
from dpoptim.training.trials.program import CheckResult, Program, compare, compare_if_possible
from dpoptim.training.trials.variations import with_padding


@knows_opacus
@checkpointing_served()
def check(
    model: nn.Module, loss: Loss, batch: Any, *, collate_fn: Collate | None = None
) -> CheckResult:
    """Test that model and loss treat records independently, and find the loss's reduction.

    The engine's clipped sum over a batch is compared with the sum over micro-batches of one: of
    the records as they are, and of the same with padding that was made up (masks that end early,
    labels to be ignored; with ``collate_fn`` also shorter sequences), so that batches of equally
    long records show what they would do to others; then with other numbers where means, maxima and
    the like of the batch decide something (``if losses.mean() > 10``). Dropout is off meanwhile (a
    model that draws random numbers otherwise is tested in evaluation mode); nothing about the model
    changes.

    What this cannot find: a coupling that none of these records shows (of the rarest class, of
    records beyond some size), or that model and loss have in training only while they draw random
    numbers.

    Args:
        model: the model that will be attached (not attached yet).
        loss: ``loss(model, batch)``, as the training loop computes it: one loss a record, shape
            (rows,), or a scalar.
        batch: tensors (in any nest of tuples, lists and dicts) whose first axis is the record, at
            least two records; or, with ``collate_fn``, a list of records. Every one takes a
            backward pass of its own, so some tens will do. Have different lengths, classes and
            masks among them. Use public or made-up records: pass or fail is not private.
        collate_fn: what makes a batch of a list of records, if it is not torch's; it is tested as
            well.

    Returns:
        the reduction, and how many records were compared.

    Raises:
        TypeError: loss is no function of ``(model, batch)``.
        SamplesInteractError: the gradient of a record depends on the others, or a layer's first
            axis is not the record: the message names the parameter where it shows.
        ValueError: a batch without a common first axis.

    Examples:
        >>> import torch
        >>> import dpoptim
        >>> from torch.nn.functional import cross_entropy
        >>> def loss(model, batch):
        ...     x, y = batch
        ...     return cross_entropy(model(x), y, reduction="none")
        >>> batch = torch.randn(8, 5), torch.randint(2, (8,))
        >>> dpoptim.check(torch.nn.Linear(5, 2), loss, batch).records
        8
    """
    require_loss(loss)
    model = uncompiled(model)
    refuse_nothing_to_train(model)
    records, collate = (
        (forms.single_records(batch), forms.stacked)
        if collate_fn is None
        else (list(batch), collate_fn)
    )
    if len(records) < 2:
        raise ValueError(f"batch must hold at least 2 records, got {len(records)}.")
    units, program = [[record] for record in records], Program(model, loss, collate)
    found = compare(program, units)
    for changed in with_padding(units, sequences=collate_fn is not None):
        compare_if_possible(program, changed)
    refuse_deciding_numbers(program, units)
    return found
