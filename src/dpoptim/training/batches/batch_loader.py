"""A run's batches, one microbatch after the other, and whose turn it is."""

import atexit
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils.data import Dataset, TensorDataset

from dpoptim.arguments import whole_number
from dpoptim.distributed.ranks import Ranks
from dpoptim.errors import PrivacyError
from dpoptim.gradients.accumulation.summation_groups import number_of_groups
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.oracle import Loss
from dpoptim.noise.stream import KeyStream
from dpoptim.plan import Plan
from dpoptim.training.batches.epochs import EpochEnds
from dpoptim.training.batches.loading import Batches, Collate, LoaderOptions, load_microbatches
from dpoptim.training.batches.microbatches import BatchQueue, MicrobatchSampler
from dpoptim.training.batches.privacy_units import Units
from dpoptim.training.batches.slots import Slots, SlotSampler, costs_little
from dpoptim.training.randomness.generators import generators_in
from dpoptim.training.randomness.run_streams import RunStreams
from dpoptim.training.randomness.saved_states import own_states_saved
from dpoptim.training.randomness.secret_randomness import SecretInWorker, secret_randomness
from dpoptim.training.released_gradients import ReleasedGradients
from dpoptim.training.steps import Steps
from dpoptim.training.trials.loss_check import LossCheck


class BatchLoader:
    """Hands out the batches of the steps that remain, and tells engine and steps of each.

    Args:
        plan: what is sampled, and how long.
        train_set: what records are read from; private.
        collate: what `attach` was given, with whether it was checked; None: torch's.
        units: what an index stands for.
        queue: the drawn batches.
        engine, steps, gradients: told of what is delivered.
        ranks: the processes that train together.
        loss: that `attach` checked; it may hold random generators.
        streams: of the coins that deal records into groups.
        check: what `attach` found of the loss, if it was given one.

    Attributes:
        collates_unchecked: whether a collate function was used that `attach` did not check.
        apart: a ``with`` for trials of the model, in which it is not attached.
        shapes_vary: whether a physical batch had, or may have, a number of rows that others decide.
    """

    def __init__(
        self,
        plan: Plan,
        train_set: Dataset[Any],
        collate: Collate | None,
        units: Units,
        queue: BatchQueue,
        engine: Engine,
        steps: Steps,
        gradients: ReleasedGradients,
        ranks: Ranks,
        streams: RunStreams,
        *,
        sharded: bool,
        check: LossCheck | None,
        loss: Loss | None,
    ) -> None:
        self._plan, self._train_set, self._collate_fn, self._units = plan, train_set, collate, units
        self._length, self._ends = len(train_set), EpochEnds.of(plan)  # type: ignore[arg-type]
        self.queue = queue
        self._engine = engine
        self._steps = steps
        self._gradients = gradients
        self._ranks, self._sharded = ranks, sharded
        self._checked, self._loss = None if check is None else check.collate_fn, loss
        self._lengths = None if check is None else check.lengths
        self.apart: Callable[[], AbstractContextManager[object]] = nullcontext
        # those of a step, which may be dealt ahead and again
        self._group_coins = streams.of_steps("summation groups")
        self._seeded, self._randomness = streams.seed is not None, KeyStream()
        self._hidden = ExitStack()  # what `restore_randomness` closes
        self._loop, self._varies = 0, False  # calls of `batches`
        self.collates_unchecked = collate is not None and loss is None

    @property
    def shapes_vary(self) -> bool:
        return self._varies or not self._loop

    def collate(self, collate_fn: Collate | None) -> Collate | None:
        """The collate function: the one given now, or the one that `attach` was given."""
        if collate_fn is not None:
            self.collates_unchecked |= self._loss is None or collate_fn is not self._checked
            self._collate_fn = collate_fn
        return self._collate_fn

    def batches(
        self, physical_batch_size: int | None, options: LoaderOptions, fixed_shape: bool | None
    ) -> Batches:
        """See `PrivateTraining.batches`."""
        if physical_batch_size is not None:
            K = self._units.rows.per_record
            physical_batch_size = whole_number("physical_batch_size", physical_batch_size, least=1)
            if physical_batch_size < K:
                raise ValueError(
                    f"physical_batch_size={physical_batch_size} does not hold the {K} rows of a "
                    f"record, which are delivered together. Fix: at least {K}, or a smaller "
                    "rows_per_record."
                )
            physical_batch_size //= K
        if self._engine.isolation.alone:
            physical_batch_size = 1
        left = self._plan.steps - self._steps.done if physical_batch_size is None else None
        return Batches(self._in_secret(physical_batch_size, options, fixed_shape), left)

    def _in_secret(
        self, physical_batch_size: int | None, options: LoaderOptions, fixed_shape: bool | None
    ) -> Iterator[Any]:
        """`_deliver`, with random numbers that nobody can foretell, unless the run is seeded."""
        self.restore_randomness()
        with ExitStack() as hidden:
            self._hidden = hidden
            if not self._seeded:
                # a loop that is still open when Python ends has no modules left to close it with
                atexit.register(hidden.close)
                hidden.callback(atexit.unregister, hidden.close)
                program = (self._engine.model, self._train_set, self._collate_fn)
                found = [*generators_in(*program), *generators_in(self._loss)]
                own = list({id(each): each for each in found}.values())
                hidden.enter_context(secret_randomness(self._randomness, own))
                hidden.enter_context(own_states_saved())
                options = self._secret_in_workers(options)
            yield from self._deliver(physical_batch_size, options, fixed_shape)

    def _secret_in_workers(self, options: LoaderOptions) -> LoaderOptions:
        if options.num_workers == 0:
            return options
        parts = (self._train_set, options.collate_fn)
        seeds = SecretInWorker.drawn(self._randomness, parts, options.worker_init_fn)
        return replace(options, worker_init_fn=seeds)

    def restore_randomness(self) -> None:
        """Give the program its own random numbers back: a loop is over, or another one begins.

        A loop that was left, but is still held somewhere, must not do so later, when it is
        forgotten in the middle of another.
        """
        self._hidden.close()

    def _deliver(
        self, physical_batch_size: int | None, options: LoaderOptions, fixed_shape: bool | None
    ) -> Iterator[Any]:
        if self._nothing_left():
            return
        self._engine.refuse_changes()
        self._steps.restart()
        if fixed_shape is None:
            same_shape = type(self._train_set) is TensorDataset and options.plain
            alone = self._ranks.size == 1 and not self._engine.partial_backward
            fixed_shape = same_shape and alone and costs_little(self._plan)
        microbatches, fixed_items = self._microbatches(physical_batch_size, fixed_shape)
        epoch = -1
        self._loop = loop = self._loop + 1
        for batch, microbatch in load_microbatches(
            self._train_set, microbatches, options, self._units.stacked, fixed_items
        ):
            if self._ended():
                return
            if loop != self._loop:
                raise PrivacyError(
                    "private.batches() was called again meanwhile. Fix: use one loop over it at a "
                    "time."
                )
            if self._steps.state == "complete":
                raise PrivacyError(
                    "a batch was delivered, but optimizer.step() was not called after it. Fix: "
                    "call private.backward(losses), and step() of the optimizer that attach was "
                    "given, once for every batch; a loop that fetches batches ahead takes "
                    "private.steps(), and one that accumulates gradients of several batches takes "
                    "larger ones, cut by private.batches(physical_batch_size=...). A record whose "
                    "loss is NaN counts as zero: leave out a check that skips such batches. After "
                    "an error in the loop, start it again: private.batches() goes on with the same "
                    "batch."
                )
            self._gradients.drop()
            if epoch != (epoch := self._ends.number(self._steps.done)):
                self._refuse_other_length()
            self._try_lengths(batch, options)
            self._steps.begin(microbatch)
            yield batch
        if self._steps.state == "complete" and not self._ended():
            raise PrivacyError(
                "the last batch was delivered, but optimizer.step() was not called after it."
            )

    def _try_lengths(self, batch: Any, options: LoaderOptions) -> None:
        """Try lengths that were not tried, of what the collate function makes that was checked.

        Raises:
            SamplesInteractError: beside records of such a length others have other gradients.
        """
        if self._lengths is not None and options.collate_fn is self._checked:
            self._lengths.see(batch, self.apart)

    def _refuse_other_length(self) -> None:
        if len(self._train_set) != self._length:  # type: ignore[arg-type]
            raise PrivacyError(
                "train_set has another length than when it was attached: items that came later are "
                "never drawn, and what was taken out moves others to other places. Fix: a data set "
                "that stays as it is, attached once it is complete."
            )

    def _nothing_left(self) -> bool:
        """Whether the run was taken up after its last step, and this is its first loop.

        Whatever starts a killed program again may do so then: its loop has nothing to do.

        Raises:
            PrivacyError: this is a further loop, or one after `PrivateTraining.finish`.
        """
        if self._ended():
            raise PrivacyError(
                "private.finish() has ended this run. Fix: draw batches before, or attach a new "
                "plan."
            )
        if self._steps.done < self._plan.steps:
            return False
        if self._loop:
            raise PrivacyError(
                f"all {self._plan.steps} planned steps are done: one loop over private.batches() "
                "runs through all of them, epochs included. Fix: no outer loop over epochs; or "
                "`for epoch in private.epochs(): for batch in epoch: ...`."
            )
        self._loop += 1
        return True

    def _ended(self) -> bool:
        """Whether `PrivateTraining.finish` has been called."""
        return self._steps.gate.ended

    def _microbatches(
        self, physical_records: int | None, fixed_shape: bool
    ) -> tuple[MicrobatchSampler | SlotSampler, int | None]:
        """The sampler that cuts batches, and each microbatch's number of items, if public."""
        engine = self._engine
        together = [self._ranks.all_max] if engine.totals.travels else []
        engine.fixed_shape, self._varies = fixed_shape, self._varies or not fixed_shape
        if fixed_shape:
            if engine.partial_backward:
                raise ValueError(
                    "fixed_shape=True is for one backward pass over each physical batch. Fix: "
                    "leave it out, or attach without partial_backward=True."
                )
            slots = Slots.of(self._plan, physical_records, self._ranks.size, sharded=self._sharded)
            engine.physical_records = slots.rows
            rows = self._units.rows.per_record
            sampler = SlotSampler(self.queue, slots, self._group_coins, rows, *together)
            return sampler, self._units.items_of(slots.rows)
        engine.physical_records = min(engine.capacity, physical_records or engine.capacity)
        expected = self._plan.batch_size * self._plan.sampler.largest_relative_batch
        groups = number_of_groups(expected / self._ranks.size, physical_records)
        return (
            MicrobatchSampler(self.queue, groups, self._group_coins, physical_records, *together),
            None,
        )


def queue_of(
    plan: Plan, units: Units, ranks: Ranks, streams: RunStreams, *, sharded: bool
) -> BatchQueue:
    """This rank's part of the plan's batches.

    Coins for one thing never share a key with those for another.

    Args:
        units: of this rank's data set.
        sharded: whether they are this rank's only.
    """
    bring = partial(units.bring, streams.own("rows of persons"))
    if sharded:
        coins = streams.own("poisson coins")
        own = plan.sampler.shard(units.count)
        return BatchQueue(own, coins, units.count, plan.steps, bring, together=1)
    coins = streams.common("poisson coins")
    deal = ranks.dealer(streams.common("ranks of records"))
    return BatchQueue(
        plan.sampler, coins, units.count, plan.steps, lambda batch: bring(deal(batch))
    )
