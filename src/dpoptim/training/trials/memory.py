"""How many rows a given amount of memory holds, measured on the engine that will run."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.arguments import whole_number
from dpoptim.gradients.oracle import Loss
from dpoptim.opacus_words import knows_opacus
from dpoptim.plan import Plan, require_plan
from dpoptim.runtime.torch_internals import DispatchMode, pytree
from dpoptim.training.engines import engine_for, reads_sums, training_method
from dpoptim.training.other_libraries import uncompiled
from dpoptim.training.refusals import refuse_model
from dpoptim.training.trials.compared_batches import own_containers
from dpoptim.training.trials.isolation import Chosen, choose_isolation

FEW = 6  # rows of a first trial pass
TRIALS = 16
ENOUGH = 0.97  # share of the memory that a found size should take


@knows_opacus
def physical_batch_size(
    plan: Plan, model: nn.Module, loss: Loss, batch: Any, *, max_memory: int
) -> int:
    """The most rows whose private forward and backward pass stays within ``max_memory`` bytes.

    Meant for ``private.batches(physical_batch_size=...)``, which changes speed and memory but not
    the update. Passes over a few rows give an estimate, which larger ones correct. The model is
    left as it was.

    Args:
        plan: of the run to come; not for `ValueClippedSGD`.
        model: not attached yet.
        loss: ``loss(model, batch)``, as the training loop computes it: one value a record, or a
            scalar.
        batch: tensors (in any nest of tuples, lists and dicts) whose first axis is the record. Use
            public or made-up records of the largest shape that occurs. Only shapes matter; the
            values are not used otherwise.
        max_memory: bytes above model, optimizer and data, on the device of the model. On a CPU
            this counts tensors, not what operations need inside.

    Returns:
        at least 1 and at most the largest batch that the plan's sampler draws.

    Raises:
        ValueError: a single row does not fit; the message says what it takes.

    Examples:
        >>> import torch
        >>> import dpoptim
        >>> plan = dpoptim.DPSGD(clip_norm=1.0).plan(
        ...     n=10_000, batch_size=500, epochs=1, epsilon=4.0, delta=1e-6
        ... )
        >>> def loss(model, batch):
        ...     return model(batch).square().sum(1)
        >>> rows = dpoptim.physical_batch_size(
        ...     plan, torch.nn.Linear(50, 10), loss, torch.randn(32, 50), max_memory=2**20
        ... )
        >>> rows >= 1
        True
    """
    limit = whole_number("max_memory", max_memory, least=1)
    require_plan(plan)
    model = uncompiled(model)
    refuse_model(model)
    if training_method(plan).value_bound is not None:
        raise ValueError(
            "physical_batch_size is not for value clipping, whose backward pass is the ordinary "
            "one."
        )
    most = plan.sampler.capacity(plan.n)

    chosen = isolation_for(model, rows_of(batch, 1))
    if chosen.isolation.alone:
        return 1  # row at a time, whatever fits

    def bytes_for(rows: int) -> int | None:
        """None: more than the device has."""
        try:
            return peak_memory(plan, model, loss, rows_of(batch, rows), rows, chosen)
        except (MemoryError, RuntimeError) as error:
            if is_out_of_memory(error):
                return None
            raise

    return most_rows(bytes_for, most, limit)


def most_rows(bytes_for: Callable[[int], int | None], most: int, limit: int) -> int:
    """The most rows, up to ``most``, that take at most ``limit`` bytes, or nearly as many.

    Args:
        bytes_for: measures; None where the device has not as many.

    Raises:
        ValueError: a single row takes more.
    """
    fits, too_many, out_of_memory = 0, most + 1, False
    known = [(rows, needed) for rows in (1, FEW) if (needed := bytes_for(rows)) is not None]
    for _ in range(TRIALS):
        guess = (fits + too_many) // 2 if out_of_memory else estimate(known, limit)
        rows = max(fits + 1, min(too_many - 1, guess))
        needed = bytes_for(rows)
        if needed is None:
            out_of_memory = True
        else:
            known.append((rows, needed))
        fits, too_many = (
            (rows, too_many) if needed is not None and needed <= limit else (fits, rows)
        )
        if too_many - fits <= 1 + fits // 50 or (fits == rows and known[-1][1] >= limit * ENOUGH):
            break
    if fits:
        return fits
    single = f"{known[0][1]} bytes" if known else "more than the device has"
    raise ValueError(
        f"max_memory={limit} is too little: a pass over a single row takes {single}. Fix: allow "
        "more, or use a smaller model or shorter records."
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, of Python, a device, or tensors on a CPU (no own error)."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def estimate(known: list[tuple[int, int]], limit: int) -> int:
    """Rows that take ``limit`` bytes, by a line through the least and last (rows, bytes)."""
    if len(known) < 2:
        return 1
    (few, first), (rows, needed) = known[0], known[-1]
    slope = max(1.0, (needed - first) / (rows - few)) if rows > few else max(1.0, needed / rows)
    return few + int((limit - first) / slope)


def rows_of(batch: Any, rows: int) -> Any:
    """So many rows, the given ones over and over."""
    if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(batch)):
        raise ValueError(
            f"batch must hold tensors, in tuples, lists and dicts, got {type(batch).__name__}. "
            "Fix: such as (x, y), or dict(batch) for a mapping of another type."
        )

    def repeat(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.dim() == 0 or not len(leaf):
            raise ValueError(
                "batch must hold tensors whose first axis is the record, with at least one record."
            )
        return leaf[torch.arange(rows, device=leaf.device) % len(leaf)]

    return pytree.tree_map(repeat, batch)


def isolation_for(model: nn.Module, batch: Any) -> Chosen:
    """How `attach` will keep the records of such batches apart."""
    record = pytree.tree_map(lambda leaf: leaf[0] if isinstance(leaf, Tensor) else leaf, batch)
    return choose_isolation(model, [record])  # type: ignore[arg-type]


def peak_memory(
    plan: Plan, model: nn.Module, loss: Loss, batch: Any, rows: int, chosen: Chosen | None = None
) -> int:
    """Bytes that one of several passes over ``batch`` of so many rows takes on top, at its peak."""
    device = next(model.parameters()).device
    chosen = chosen or isolation_for(model, batch)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

    @without_collector
    def run() -> None:
        engine = engine_for(plan, model, chosen, "mean")
        engine.attach()
        try:
            # after a first one, which leaves sums behind
            for part, size in ((rows_of(batch, 1), 1), (batch, rows)):
                engine.begin_microbatch(size)
                loss(model, own_containers(part)).sum().backward()
            _ = engine.take_sums() if reads_sums(plan) else engine.take_by_parameter()
        finally:
            engine.detach()
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)

    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            run()
            return torch.cuda.max_memory_allocated(device) - before
        with LiveTensors() as live:
            run()
        return live.peak


def without_collector(run: Callable[[], None]) -> Callable[[], None]:
    """Run it as if Python never collected cycles, which would lower the peak by accident."""

    def alone() -> None:
        was_enabled = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            run()
        finally:
            if was_enabled:
                gc.enable()

    return alone


class LiveTensors(DispatchMode):
    """Counts the bytes of the storages that operations make, while they live.

    Attributes:
        peak: the most at any time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = {
            id(leaf.untyped_storage())
            for leaf in pytree.tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage(), given)
        return out

    def _see(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key, size = id(storage), storage.nbytes()
        if key in given or key in self._known:  # a view, or written in place
            return

        def gone(_: Any) -> None:
            self._now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self._now += size
        self.peak = max(self.peak, self._now)
