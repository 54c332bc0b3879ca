"""The calls of a loop in every step: batches out, losses in."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from dpoptim.gradients.graphed_pass import GraphedPass
from dpoptim.losses import without_single_axes
from dpoptim.opacus_words import LOOP, hint_of_attribute, knows_opacus
from dpoptim.training.batches.epochs import Epoch, EpochEnds, epochs_of
from dpoptim.training.batches.loading import Batches, Collate, LoaderOptions
from dpoptim.training.batches.logical_steps import LogicalSteps
from dpoptim.training.losses.handed_over import HandedOver, vector_backward
from dpoptim.training.public_figures import PublicFigures


class BatchLoop(PublicFigures):
    """The loop's side of `PrivateTraining`."""

    _handed_over: HandedOver

    def __iter__(self) -> NoReturn:
        """Refuse to be a loader, or the three things that others return."""
        raise TypeError(LOOP)

    if not TYPE_CHECKING:  # which would let any name pass

        def __getattr__(self, name: str) -> NoReturn:
            """Say what others' words are called here."""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}."
                f"{hint_of_attribute(name)}"
            )

    @knows_opacus
    def batches(
        self,
        *,
        physical_batch_size: int | None = None,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        multiprocessing_context: Any = None,
        worker_init_fn: Callable[[int], None] | None = None,
        timeout: float = 0,
        fixed_shape: bool | None = None,
    ) -> Batches:
        """All batches of the remaining steps, by the plan's sampler, collated as DataLoader would.

        Args:
            physical_batch_size: rows that memory holds; a larger logical batch arrives in
                microbatches, and only the step after the last one moves the model. None: one. It
                changes speed and memory, not the update.
            num_workers: as what follows up to ``timeout``, of ``torch.utils.data.DataLoader``.
            collate_fn: give it to `attach` instead, with a loss, to have it checked; another one
                here is listed among what is taken on trust.
            fixed_shape: give every physical batch the same public number of rows: records take
                random slots, and what stays empty holds made-up records, which count as zero
                whatever the loss makes of them. Then nobody's rounding can depend on who else is
                there, and a mean needs no trust; shapes are static. A slot is told by its place: a
                collate_fn that sorts or shuffles records is refused, and a loop must not do so
                after it (without ``loss=`` for `attach`, that is on trust). It costs the empty
                slots' arithmetic: up to half as much time again up to an expected batch of 1,024,
                up to a quarter at 4,096, nothing at 16,384. None: where it costs under 5 % and all
                records have one shape for certain (a ``TensorDataset``, collated as usual).

        Returns:
            an iterator; ``len`` is the number of steps that remain, where each is one batch. One
            runs through the whole plan, all epochs; a second one goes on where the first stopped.
            An empty batch arrives as record 0 with weight zero: its step adds noise only. How many
                rows a batch has is private: do not log it.

        **Guarantee.** None for what is yielded: records are as private as the data set. Who takes
        part in a step is drawn once, and kept until that step's noisy sum is out, however often
        the loop is left and entered again.
        """
        options = LoaderOptions(
            num_workers,
            self._loader.collate(collate_fn),
            pin_memory,
            prefetch_factor,
            persistent_workers,
            multiprocessing_context,
            worker_init_fn,
            timeout,
        )
        self._require_attached()
        self._handed_over.cut = physical_batch_size is not None
        return self._loader.batches(physical_batch_size, options, fixed_shape)

    @knows_opacus
    def steps(
        self,
        *,
        physical_batch_size: int | None = None,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        multiprocessing_context: Any = None,
        worker_init_fn: Callable[[int], None] | None = None,
        timeout: float = 0,
        fixed_shape: bool | None = None,
    ) -> LogicalSteps:
        """The steps that remain, one item each, whatever memory holds: ``len`` is public.

        For loops that count: iterate over each item for its microbatches, hand their losses to
        `backward`, then call ``optimizer.step()`` once; schedulers and progress bars count steps
        of the plan. Items may be fetched ahead. Arguments and guarantee: as for `batches`.
        """
        batches = self.batches(
            physical_batch_size=physical_batch_size,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            multiprocessing_context=multiprocessing_context,
            worker_init_fn=worker_init_fn,
            timeout=timeout,
            fixed_shape=fixed_shape,
        )
        return LogicalSteps(self, batches, self.plan.steps)

    def epochs(self, count: int | None = None, batches: Batches | None = None) -> list[Epoch]:
        """The epochs that remain, for loops that do something after each.

        Iterate over each item for its batches. Of a resumed run, the first is what remains of the
        epoch in which it stopped; items have their ``number``, from 0. An epoch that is left early
        shortens the run.

        Args:
            count: epochs of the whole plan, from 1 to its steps. None: as many times as it goes
                through the data set on average, to the nearest.
            batches: that they consist of, such as ``private.batches(physical_batch_size=64)``.
                None: ``private.batches()``.

        **Guarantee.** As for `batches`. Where an epoch ends is public.
        """
        of_all = self.batches() if batches is None else batches
        if not isinstance(of_all, Batches):
            raise TypeError(
                f"batches must be private.batches(...), got {type(batches).__name__}: an epoch is "
                "made of the plan's own batches."
            )
        return epochs_of(self, of_all, EpochEnds.of(self.plan, count))

    def graphed(self, losses: Callable[..., Tensor]) -> GraphedPass:
        """A function that takes a batch forward and backward, on a GPU as one CUDA graph.

        Call it in the loop instead of ``private.backward(losses(*batch))``. Small steps on a GPU
        wait for Python; as a graph they do not. The first two batches run as usual, the third is
        captured, the fourth runs both ways and is compared; all later ones are replayed. They must
        have one shape: ``private.batches(fixed_shape=True)``. Batches of other shapes, all of them
        on a CPU, with several processes, with records that go alone, or where the clip norm is
        private, run as usual; ``.captured`` says whether there is a graph.

        Args:
            losses: given the batch's tensors, on the model's device, it runs the model and returns
                one loss for each record, shape (rows,). What it reads beside its arguments must
                stay as it is, and nothing in it may wait for the GPU (``.item()``, ``print``).

        Examples:
            >>> import dpoptim, torch
            >>> data = torch.utils.data.TensorDataset(torch.randn(64, 3), torch.randn(64))
            >>> model = torch.nn.Linear(3, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> plan = dpoptim.DPSGD(clip_norm=1.0).plan(
            ...     n=64, batch_size=16, steps=4, epsilon=3.0, delta=1e-3
            ... )
            >>> with dpoptim.attach(plan, model, optimizer, data) as private:
            ...     backward = private.graphed(lambda x, y: (model(x).squeeze(1) - y) ** 2)
            ...     for x, y in private.batches(fixed_shape=True):
            ...         backward(x, y)
            ...         optimizer.step()
            >>> private.steps_done, backward.captured
            (4, False)

        **Guarantee.** As for `backward`: a replay runs the kernels that it would run, on the rows
        that were delivered; see `gradients.graphed_pass`.
        """
        return GraphedPass(
            self._engine,
            lambda *batch: one_for_each(losses(*batch)),
            self.backward,
            lambda vector: vector_backward(self._engine, without_single_axes(vector)),
            # others take part in what a wrapper does, which has not been tried
            devices=["cuda"] if self._ranks.size == 1 else [],
        )

    @property
    def step_is_complete(self) -> bool:
        """Whether all microbatches of a step are delivered, and the step still to come. Private."""
        return self._steps.state == "complete"

    def backward(self, losses: Tensor) -> None:
        """Differentiate the batch's losses: clip each record's gradient, add it to the step's sum.

        Args:
            losses: one for each delivered record, shape (rows,) or (rows, 1): compute them with
                ``reduction="none"``. The sum over the records is taken here, so that there is no
                reduction to declare. A scalar is taken where its graph shows whether it is a mean
                or a sum of the records' losses, or where ``attach(..., loss_reduction=)`` says so.
                A sum that is divided or multiplied by a number: where ``loss=`` was checked, or
                ``loss_reduction="sum"`` declared and the number is the same in each batch.

        Raises:
            PrivacyError: these are not the losses of the rows that were delivered, or a scalar
                that is not what was declared.

        **Guarantee.** Each record adds a gradient of at most the clip norm, for every loss in
        which its term depends on that record alone. A vector's terms may still have been made of
        each other: ``attach(..., loss=)`` checks that of the function it is given, and not of what
        a loop does to its values afterwards (weights over their mean, a choice of the hardest, a
        sum over processes), which is listed among what is taken on trust.
        """
        self._require_attached()
        self._handed_over.backward(self._engine, losses)


def one_for_each(losses: Tensor) -> Tensor:
    """Losses that a graph may be made of: a scalar's factor could depend on the batch."""
    if losses.dim() == 0:
        raise ValueError(
            "private.graphed(losses) takes a function that returns one loss for each record, and "
            'got a scalar. Fix: reduction="none".'
        )
    return losses
