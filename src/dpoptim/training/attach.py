"""Attach a plan to a model, its optimizer and a data set: the training loop stays as it was."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.data import Dataset

from dpoptim.accounting.ledger import Ledger
from dpoptim.arguments import positive_number
from dpoptim.distributed.wrapping import ranks_of
from dpoptim.gradients.engine import Reduction
from dpoptim.gradients.isolation import Choice
from dpoptim.gradients.oracle import Loss
from dpoptim.opacus_words import knows_opacus
from dpoptim.plan import Plan
from dpoptim.training.batches.loading import Collate
from dpoptim.training.batches.streams import is_stream, records_of_stream
from dpoptim.training.losses.loss_argument import require_loss
from dpoptim.training.other_libraries import (
    innermost,
    refuse_accumulation,
    switch_scaler_off,
    uncompiled,
)
from dpoptim.training.private_training import PrivateTraining
from dpoptim.training.request import Request
from dpoptim.training.trials.loss_check import unwarned


@knows_opacus
def attach(
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    train_set: Dataset[Any],
    *,
    loss: Loss | None = None,
    collate_fn: Collate | None = None,
    loss_reduction: Reduction | None = None,
    ledger: Ledger | None = None,
    label: str = "training run",
    noise_seed: int | None = None,
    partial_backward: bool = False,
    resume: str | Path | None = None,
    checkpoint_key: bytes | None = None,
    rows_per_record: int = 1,
    rows_reduction: Reduction = "mean",
    persons: Sequence[Any] | None = None,
    isolation: Choice = "auto",
    batch_axis: int | None = None,
    process_group: ProcessGroup | None = None,
    sharded: bool = False,
    projection: float | None = None,
    random_iterate: bool = False,
) -> PrivateTraining:
    """Make training private by ``plan``: ``with dpoptim.attach(...) as private:``.

    Inside, ``private.backward(losses)`` hands clipped per-record sums to the engine (``.grad``
    stays None), and ``optimizer.step()`` lets the gate write the noisy mean into ``.grad`` before
    it moves; it stays there until ``zero_grad()`` or the next batch. Leaving ``with`` restores the
    model exactly; its class and state-dict keys never change.

    Args:
        plan: from ``dpoptim.DPSGD(...).plan(...)``.
        model: any module that does not mix records, compiled or not; parameters in float32,
            float64, bfloat16 or float16.
        optimizer: any torch optimizer over exactly the model's trainable parameters (LBFGS is
            refused), or several that share them out. The first of them to step lets the gate
            release; each may use its part of that release once, before the next batch.
        train_set: a map-style data set; or, for one pass of disjoint batches in the given order
            (``DPFTRL(..., order="given")``), a stream: an ``IterableDataset``, or what else is
            iterated over. Under add-or-remove-one its length is never compared with the plan's n.
        loss: ``loss(model, batch)``, as the loop computes it: one value a record, shape (rows,),
            or a scalar. It is checked here, as `check` does, on made-up records (also of unequal
            lengths) and on a few of ``train_set``, collated alone and with others: no record's
            gradient may depend on other records. What the loop does to its values afterwards is
            not (weights over their mean, a sum over processes), so do it in here. That it passed
            on the data set is one bit about the program, and listed as such. None: "loss not
            checked" heads what is taken on trust, and a warning says so.
        collate_fn: what makes a batch of a list of records, for ``private.batches``; checked with
            ``loss``, and otherwise listed among what is taken on trust. None: torch's.
        loss_reduction: for losses that are not handed over as one value a record: whether the
            scalar is the ``"mean"`` or the ``"sum"`` over the rows of a batch. None:
            ``private.backward`` reads it off the scalar's graph, or refuses; so does a loop's own
            ``loss.backward()``.
        ledger: where the run is charged; in memory by default.
        label: public text for the ledger's entry.
        noise_seed: makes noise and sampling repeatable, for tests; the guarantee is then marked as
            not for release.
        partial_backward: allow several backward passes over disjoint parts of a delivered batch.
            That the parts are disjoint is then taken on trust; without it every delivered batch
            takes one pass over all its rows.
        resume: a checkpoint that ``private.save(path)`` wrote: model, optimizers and all privacy
            state go on from there, and so does the run's charge. Noise is fresh (with a
            ``noise_seed``, in as many processes, that of the run without interruption). That
            nothing released after the checkpoint was looked at is taken on trust: those steps are
            done again; the ledger counts them. The file is a secret, and trusted as the program
            is; a ledger takes up only what it was told of.
        checkpoint_key: 32 bytes that seal what ``private.save`` writes and open ``resume``; nobody
            else can.
        rows_per_record: K, how many rows a record brings to a step: views of an image, segments of
            a document. An item of ``train_set`` then holds K rows: its tensors and arrays have
            them on their first axis, and what is a single value is shared by them. ``collate_fn``
            gets rows; the delivered batch has K of them for each record, one record's after the
            other's. Losses are one a row (or one a record, if the record's own rows are already
            reduced in it), ``physical_batch_size`` counts rows, and is at least K. `check` and the
            model see rows as records.
        rows_reduction: whether the gradient of a record, clipped once, is the ``"mean"`` or the
            ``"sum"`` over its rows.
        persons: the owner of each item of ``train_set``: whole numbers or strings. The guarantee is
            for persons then: they are sampled, the plan's n counts them, and each brings at most
            ``rows_per_record`` of their rows to a step, 1 unless told, drawn anew for each step by
            coins of their own, without a look at values. Whoever has fewer is filled up with rows
            that count as zero; losses are one a row.
        isolation: how records are kept apart. ``"rules"``: by hooks on layers, the fastest;
            modules without a rule are vectorised, or, where nobody can, run once for each record
            inside a batch's forward pass. ``"vmap"``: the model's forward pass is one
            vectorised call with a row of parameters for each record; numbers that it returns
            without an axis come back as one for each record. ``"alone"``: microbatches of one
            record, for any model and any loss. ``"auto"``: the fastest that gives each record its
            own gradient, for each part of the model, tried on made-up records (and for ``loss``, if
            given); where it is not rules for layers, a warning says why, what would be faster, and
            how much longer a step of the plan's expected batch takes.
        batch_axis: the records' axis in what the model is given: 0, or 1 for (time, batch, ...);
            None: found out.
        process_group: of the processes that train this model together, each calling `attach` in
            the same way. Default: all that ``torch.distributed`` knows of. See
            docs/guides/many-processes.md.
        sharded: whether ``train_set`` holds this process's records only, no record in two
            processes, and nobody's rows where there are ``persons``; the plan's n is the number in
            all of them, of which each stream has its equal part (the first ones one more). Default:
            every process has the same data set, in the same order: some records are compared.
        projection: radius of a ball around where the trained parameters start, as one vector: each
            step ends at the nearest point of it (Das et al. 2023, Algorithm 1). None: no ball.
        random_iterate: keep one of the points that steps are taken from, each with the same
            probability, by coins that know no record; ``private.swap_random_iterate()`` puts it in
            place. Costs a copy of the trained parameters.

    Returns:
        the private training, a context manager: loop over its ``batches()``.

    Raises:
        RankError: the processes do not agree on what to do, or one has failed; the message names
            it.
        PrivacyError: something in model or optimizer would break the guarantee; the message names
            it and the fix.
        LedgerError: the budget does not cover the plan; the run to resume was completed, or did
            not save this checkpoint.
        ValueError, FileNotFoundError: ``resume`` is no checkpoint of this plan.

    **Guarantee.** Everything that leaves through the optimizer is covered by ``plan.guarantee``,
    for every data set, model and loss, provided that each record's loss depends on that record
    alone. It hides any one record with all its rows, or any one person with all theirs.

    Examples:
        >>> import torch
        >>> import dpoptim
        >>> from torch.nn.functional import cross_entropy
        >>> data = torch.utils.data.TensorDataset(torch.randn(200, 5), torch.randint(2, (200,)))
        >>> model = torch.nn.Linear(5, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        ...     n=200, batch_size=50, steps=4, epsilon=4.0, delta=1e-3
        ... )
        >>> with dpoptim.attach(plan, model, optimizer, data) as private:
        ...     for x, y in private.batches():
        ...         private.backward(cross_entropy(model(x), y, reduction="none"))
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> private.spent().epsilon <= 4.0
        True
    """
    if loss is not None:
        require_loss(loss)
    optimizers = optimizer if isinstance(optimizer, Sequence) else (optimizer,)
    for each in optimizers:
        refuse_accumulation(each)
        switch_scaler_off(each)
    wrappers, optimizers = optimizers, [innermost(each) for each in optimizers]
    model = uncompiled(model)
    ranks = ranks_of(model, process_group)
    try:
        if isinstance(plan, Plan) and is_stream(train_set):
            part = (ranks.rank, ranks.size) if sharded else (0, 1)
            train_set = records_of_stream(plan, train_set, *part)
        request = Request(
            loss=loss,
            collate_fn=collate_fn,
            loss_reduction=loss_reduction,
            ledger=ledger,
            label=label,
            noise_seed=noise_seed,
            partial_backward=partial_backward,
            resume=resume,
            checkpoint_key=checkpoint_key,
            rows_per_record=rows_per_record,
            rows_reduction=rows_reduction,
            persons=persons,
            isolation=isolation,
            batch_axis=batch_axis,
            sharded=sharded,
            projection=None if projection is None else positive_number("projection", projection),
            random_iterate=random_iterate,
            wrappers=wrappers,
        )
        return PrivateTraining(plan, model, optimizers, train_set, request, ranks)
    except BaseException as error:
        if (lost := ranks.lost(error)) is not None:
            raise lost from error
        ranks.leave(0, failed=True)
        raise


# for this package's own losses, of which nobody need be told that they were not checked here
attach_own = unwarned()(attach)
