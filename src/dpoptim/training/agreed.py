"""Agreement of all processes of a run before any of them gives a sum away."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from dpoptim.distributed.agreement import facts_of
from dpoptim.distributed.ranks import Ranks
from dpoptim.gradients.engine import Engine
from dpoptim.plan import Plan
from dpoptim.training.batches.persons_of_ranks import one_rank_a_person
from dpoptim.training.batches.privacy_units import Units
from dpoptim.training.batches.repeated_records import refuse_shared_records
from dpoptim.training.batches.same_order import refuse_another_order
from dpoptim.training.batches.streams import StreamRecords
from dpoptim.training.refusals import refuse_other_size


def agree_on_run(
    ranks: Ranks,
    plan: Plan,
    engine: Engine,
    optimizers: Sequence[torch.optim.Optimizer],
    train_set: Dataset[Any],
    units: Units,
    options: Mapping[str, Any],
    *,
    sharded: bool,
) -> int:
    """Refuse ranks that disagree on the run, or together hold another number of records.

    Args:
        options: others of `attach`, by name.
        sharded: whether ``train_set`` is this rank's part alone.

    Returns:
        the number of records, or persons, on all ranks. Private under add-or-remove-one.

    Raises:
        PrivacyError: ranks differ, or have the same records, or rows of one person, where each
            should have its own; the message names what, and the rank. ValueError: not the plan's
            number of records.
    """
    own = {
        "rows_per_record": units.rows,
        "isolation": engine.isolation,
    }
    ranks.agree(facts_of(plan, engine, optimizers, train_set, sharded=sharded, **options, **own))
    if not (sharded or isinstance(train_set, StreamRecords)):
        refuse_another_order(ranks, train_set)
    one_rank_a_person(ranks, units.persons, sharded=sharded)
    count = ranks.all_sum(units.count) if sharded else units.count
    refuse_other_size(plan, count, units.name)
    if sharded and not isinstance(train_set, StreamRecords):
        refuse_shared_records(ranks, train_set)
    return count
