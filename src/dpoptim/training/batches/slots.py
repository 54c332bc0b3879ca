"""Physical batches of a public number of rows: records in random slots, empty ones count zero.

**Theorem.** Suppose that forward pass, backward pass and the engine compute each row's part as a
function of that row, of its place, and of the shapes alone (deterministic kernels that treat rows
apart). Let every physical batch have the same public shape, let a batch of B records be placed by
a uniformly random injection into S >= B slots, and let empty slots hold made-up records whose
gradients count as exactly zero. Then, as long as no batch outgrows its slots, one record more or
less moves the sum by at most C, rounding included.

*Proof.* Deleting a given record from a uniformly random injection of B + 1 records leaves a
uniformly random injection of B. So the coins of two data sets that differ in one record can be
coupled such that every other record has the same slot in both, and the record's own slot is empty
in the one that lacks it. Then all shapes are equal, every other row is equal and in its place, and
so is all that is computed from it: conditions 1 to 3 of the theorem in `products` hold
(groups are runs of slots), for any such kernel. A mean is over a public number of rows, so its
factor is a constant. QED.

A batch outgrows its slots where at least S of the *other* records join, an event E that neither
the record nor anything released decides. Given the others' coins outside of E, each step is the
sampled Gaussian that was accounted, so by joint convexity of the hockey-stick divergence the run
is (epsilon(delta - P(E)), delta)-private. P(E) <= T P(Binomial(n - 1, q) >= S), if the data set
has at most n records: S is the smallest for which this is at most `SHARE` of delta, and the
guarantee is stated at what is left. Inside E one more physical batch of the same shape is made:
nothing is dropped, and nobody is told.

Each of R processes places its part of a batch into slots of its own. Records are dealt to processes
by coins of their own, so in both data sets every other record is in the same process, and the proof
holds for each of these. Of the others each joins and comes to a process with probability q / R, or
at most q where processes have shards of their own, and E adds up over processes.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.stats import binom

from dpoptim.accounting.guarantee import Guarantee
from dpoptim.assumptions import Assumption, enforced, trusted
from dpoptim.gradients.arithmetic.products import consecutive_groups
from dpoptim.noise.stream import KeyStream
from dpoptim.plan import Plan
from dpoptim.sampling import FixedBatches, Indices, PoissonSampling
from dpoptim.training.batches.microbatches import BatchQueue, Microbatch
from dpoptim.training.batches.privacy_units import NO_ROW, present_rows

# empty slots for each record, up to which steps were measured to take under 5 % longer
WORTH_PADDING = 0.06
SAME = (
    "shapes, and every record's place in them, are the same whether or not another record takes "
    "part"
)
SAME_SHAPES = enforced(SAME)
# what it moves is looked for on made-up records, and in the rows of empty slots: see `slot_places`
SAME_IF_COLLATED_SO = trusted(
    f"{SAME}, as collate_fn, which was not checked, leaves records in the order in which it gets "
    "them: an empty slot is told by its place"
)
SHARE = 2.0**-20  # of delta, for batches that outgrow their slots


@dataclass(frozen=True)
class Slots:
    """Slots of a logical batch; public.

    Attributes:
        rows: of each physical batch, in records.
        microbatches: physical batches.
    """

    rows: int
    microbatches: int

    @classmethod
    def of(
        cls,
        plan: Plan,
        physical_records: int | None,
        processes: int = 1,
        *,
        sharded: bool = False,
    ) -> "Slots":
        """For one process's part of a plan's batches, in as few physical ones as memory allows."""
        needed = slots_needed(plan, processes, sharded=sharded)
        microbatches = 1 if physical_records is None else math.ceil(needed / physical_records)
        return cls(math.ceil(needed / microbatches), microbatches)


def slots_needed(plan: Plan, processes: int = 1, *, sharded: bool = False) -> int:
    """The least S of the theorem: public, from the plan and the number of processes alone.

    Args:
        sharded: whether each process has records of its own, which may be any share of all.
    """
    sampler = plan.sampler
    if not isinstance(sampler, PoissonSampling | FixedBatches):
        raise ValueError(
            f"fixed_shape=True is not for batches drawn by {type(sampler).__name__}. Fix: leave it "
            "out."
        )
    if not isinstance(sampler, PoissonSampling) or sampler.sample_rate == 1:
        return sampler.capacity(plan.n)  # a batch holds no more
    allowed = math.log(lost_delta(plan) / plan.steps / processes)
    rate = sampler.sample_rate if sharded else sampler.sample_rate / processes

    def enough(slots: int) -> bool:
        return bool(binom.logsf(slots - 1, plan.n - 1, rate) <= allowed)

    return 1 + bisect_left(range(1, plan.n), True, key=enough)


def costs_little(plan: Plan) -> bool:
    """Whether steps take hardly longer with a fixed shape (``benchmarks/fixed_shape.py``)."""
    sampled = isinstance(plan.sampler, PoissonSampling) and plan.sampler.sample_rate < 1
    return sampled and slots_needed(plan) <= (1 + WORTH_PADDING) * plan.batch_size


def lost_delta(plan: Plan) -> float:
    """The part of delta left to batches that outgrow their slots, over the whole run."""
    sampled = isinstance(plan.sampler, PoissonSampling) and plan.sampler.sample_rate < 1
    return SHARE * plan.delta if sampled else 0.0


def less_lost_delta(plan: Plan, guarantee: Guarantee) -> Guarantee:
    """A run's guarantee at the same delta, of which `lost_delta` is not left to the noise."""
    lost = lost_delta(plan)
    if lost == 0:
        return guarantee
    if guarantee.delta <= 2 * lost:
        return replace(guarantee, epsilon=math.inf)
    return replace(guarantee, epsilon=plan.guarantee_at(guarantee.delta - lost).epsilon)


def basis_of_slots(plan: Plan, *, collate_checked: bool = True) -> tuple[Assumption, ...]:
    """Assumptions of a run whose physical batches all had a fixed shape.

    Args:
        collate_checked: whether no collate function was used that `attach` had not checked.
    """
    apart = "kernels are deterministic and treat the rows of a batch apart"
    most = (
        f"the data set has at most {plan.n} records, so that delta includes batches that outgrow "
        "their slots"
    )
    items = [SAME_SHAPES if collate_checked else SAME_IF_COLLATED_SO, trusted(apart)]
    return (*items, trusted(most)) if lost_delta(plan) else tuple(items)


def had_slots(basis: Mapping[str, Sequence[str]]) -> bool:
    """Whether a basis, as texts of each kind, is of such a run."""
    return any(item.text in basis[item.kind] for item in (SAME_SHAPES, SAME_IF_COLLATED_SO))


class SlotSampler:
    """Places batches into slots, yields each physical batch's items; `NO_ROW`: an empty slot.

    Args:
        batches: where the batches come from.
        slots: of each; one more physical batch where a batch outgrows them.
        coins: decide the slots; a step's, by its number.
        rows: of a record.
        microbatches_of_all: as for `MicrobatchSampler`.

    **Guarantee.** How many rows a physical batch has is public, and a record's slot is the
    uniformly random injection of the theorem above.
    """

    def __init__(
        self,
        batches: BatchQueue,
        slots: Slots,
        coins: Callable[[int], KeyStream],
        rows: int,
        microbatches_of_all: Callable[[int], int] = lambda own: own,
    ) -> None:
        self.batches, self._slots, self._coins, self._rows = batches, slots, coins, rows
        self._microbatches_of_all = microbatches_of_all
        self.drawn: deque[Microbatch] = deque()

    def microbatches(self) -> Iterator[Indices]:
        size = self._slots.rows
        groups = tuple(map(tuple, consecutive_groups(size)))
        for step, batch in enumerate(self.batches.ahead(), self.batches.steps_released):
            own = max(self._slots.microbatches, math.ceil(len(batch) / size))
            microbatches = self._microbatches_of_all(own)
            words = np.empty(microbatches * size, dtype=np.uint64)
            self._coins(step).words(words)
            placed = np.full((microbatches * size, *batch.shape[1:]), NO_ROW, dtype=np.int64)
            placed[np.argsort(words, kind="stable")[: len(batch)]] = batch
            for number, microbatch in enumerate(np.split(placed, microbatches), 1):
                items, present = present_rows(microbatch)
                if present is None:
                    present = torch.from_numpy(microbatch != NO_ROW)[:, None].expand(
                        size, self._rows
                    )
                self.drawn.append(
                    Microbatch(groups, null=False, last=number == microbatches, present=present)
                )
                yield items
