"""Passes of batches of one shape as a CUDA graph.

A small step on a GPU waits for Python: for hooks, rules and autograd's bookkeeping. What they ask
of the GPU is the same in every batch of one shape, so it is recorded once, and replayed by one
call.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpoptim.errors import PrivacyError
from dpoptim.gradients.accumulation.sums import Sums
from dpoptim.gradients.accumulation.totals import Totals
from dpoptim.gradients.arithmetic.triton_calls import keeping_tables
from dpoptim.gradients.engine import Engine
from dpoptim.gradients.hooks.hook_manager import HookManager
from dpoptim.runtime.torch_internals import pytree

WARM = 2  # passes as usual before one is captured: kernels are compiled and chosen in them
# by how much the sums of a captured pass and of the usual one may differ, of their length: some
# kernels add in any order, in bfloat16
ALIKE = 2.0**-5

Terms = list[Tensor | None]
Replay = Callable[[], None]


class Capture(Protocol):
    """Records what a function asks of a device, without doing it.

    Returns:
        what the function returned, memory that a replay writes, and the replay.
    """

    def __call__(self, work: Callable[[], Terms]) -> tuple[Terms, Replay]: ...


class CudaGraphs:
    """Captures work as CUDA graphs that share their memory; see `Capture`."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, work: Callable[[], Terms]) -> tuple[Terms, Replay]:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph, generator = torch.cuda.CUDAGraph(), cuda_generator()
        state = generator.clone_state()
        torch.clear_autocast_cache()
        try:
            with keeping_tables() as tables, torch.cuda.graph(graph, pool=self._pool):
                found = work()
        except BaseException:
            generator.graphsafe_set_state(state)  # else it waits for the end of the capture
            raise
        finally:
            torch.clear_autocast_cache()  # of casts that were made in the graph

        def replay() -> None:
            assert tables is not None  # which the graph reads
            graph.replay()

        return found, replay


def cuda_generator() -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device()]


@dataclass
class Captured:
    """A captured pass.

    Attributes:
        key: what it depends on besides the numbers of a batch.
        given: memory that it reads batches from.
        present: memory for which rows are there, or None.
        replay: writes `terms`.
        terms: what it adds to each parameter's sum; None where it adds nothing.
        compared: whether it was seen to add what one of another batch adds.
    """

    key: tuple[Any, ...]
    given: list[Tensor]
    present: Tensor | None
    replay: Replay
    terms: Terms
    compared: bool = False


class GraphedPass:
    """Runs batches forward and backward: as a CUDA graph, once several have had one shape.

    Args:
        engine: that is attached.
        losses: computes the losses of a batch, one for each record. What it reads beside its
            arguments must stay as it is.
        backward: has the engine differentiate losses, after a look at them.
        captured_backward: the same without the look, which waits for the device.
        capture: how work on a device is captured.
        devices: kinds of device that it is for.

    **Guarantee.** That of the engine, whose kernels a replay runs again on the rows that were
    delivered, as long as all that decides what they do is what it was: `key` is compared in every
    pass, another one runs as usual. A captured pass must add what the usual one adds. What
    ``losses`` reads beside its arguments would stay as it was: so the pass is captured with the
    next batch as well, and the two must add the same, or it is refused.
    (tests/gradients/test_graphed_pass.py tries to falsify it.)
    """

    def __init__(
        self,
        engine: Engine,
        losses: Callable[..., Tensor],
        backward: Callable[[Tensor], None],
        captured_backward: Callable[[Tensor], None],
        *,
        capture: Capture | None = None,
        devices: Sequence[str] = ("cuda",),
    ) -> None:
        self._engine, self._losses, self._devices = engine, losses, devices
        self._backward, self._captured_backward = backward, captured_backward
        self._capture = CudaGraphs() if capture is None else capture
        self._captured: Captured | None = None
        self._last: tuple[Any, ...] | None = None
        self._alike = 0  # passes in a row with one key

    @property
    def captured(self) -> bool:
        """Whether a pass is captured, for batches like it."""
        return self._captured is not None

    def __call__(self, *batch: Any) -> None:
        """Take a delivered batch forward and backward; its tensors on the parameters' device.

        Raises:
            PrivacyError: a captured pass adds something else than the usual one.
            RuntimeError: the work cannot be captured.
        """
        if not self._serves():
            self._backward(self._losses(*batch))
            return
        leaves, structure = pytree.tree_flatten(batch)
        key = (structure, *map(self._form, leaves), *settings(self._engine))
        tensors, present = [x for x in leaves if isinstance(x, Tensor)], self._present()
        if self._captured is not None and self._captured.key == key:
            if not self._captured.compared:
                self._capture_again(self._captured, leaves, structure, present)
            else:
                self._fill(self._captured, tensors, present)
                self._captured.replay()
                self._engine.close_delivered()
            self._add(self._captured)
            return
        self._alike = self._alike + 1 if key == self._last else 1
        self._last = key
        if self._alike <= WARM:
            self._backward(self._losses(*batch))
            return
        self._captured = None  # frees its memory
        records = self._engine.rows_open // self._engine.rows.per_record
        with self._same_numbers(), own_sums(self._engine) as sums:
            self._backward(self._losses(*batch))
            usual = [each.take()[0] for each in sums]
        self._deliver_again(records)
        self._captured = captured = self._capture_pass(key, leaves, structure, present)
        captured.replay()
        self._require_same(captured.terms, usual)
        self._add(captured)

    def _serves(self) -> bool:
        """Whether this pass of the engine can be captured."""
        engine = self._engine
        return (
            type(engine) is Engine
            and engine.parameters[0].device.type in self._devices
            and not engine.null
            and isinstance(engine.hooks, HookManager)
            and not engine.hooks.iterates  # in new memory, which a graph would not see
            and not engine.placement.used
            and not engine.isolation.alone
            and not engine.partial_backward
            and engine.observer is None
            and type(engine.totals) is Totals
            and all(sums.count == 1 for sums in engine.totals.sums)
        )

    def _form(self, leaf: Any) -> tuple[Any, ...]:
        """Form of one of the arguments, on which a captured pass depends."""
        if not isinstance(leaf, Tensor):
            if leaf is None or isinstance(leaf, bool | int | float | str):
                return (leaf,)
            raise TypeError(
                f"a batch of a graphed pass has a {type(leaf).__name__}, whose numbers nobody "
                "could replace. Fix: tensors, and numbers that stay the same."
            )
        device = self._engine.parameters[0].device
        if leaf.device != device:
            raise ValueError(
                f"a batch of a graphed pass has a tensor on {leaf.device}. Fix: "
                f"batch.to({str(device)!r}) before it is given to the pass."
            )
        return leaf.shape, leaf.dtype, leaf.requires_grad

    def _present(self) -> Tensor | None:
        present = self._engine.present
        if present is None:
            return None
        return present.to(self._engine.parameters[0].device, non_blocking=True)

    def _deliver_again(self, records: int) -> None:
        """Open the delivered rows again, which went through a pass whose sums were not added."""
        engine = self._engine
        engine.begin_microbatch(records, groups=engine.groups, present=engine.present)

    def _capture_pass(
        self, key: tuple[Any, ...], leaves: Sequence[Any], structure: Any, present: Tensor | None
    ) -> Captured:
        """Capture the pass of a delivered batch, and close its rows; memory holds that batch."""
        engine = self._engine
        memory = [copy_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        given = [own for own in memory if isinstance(own, Tensor)]
        place = None if present is None else present.clone()

        def work() -> Terms:
            engine.present = place
            with own_sums(engine) as sums:
                self._captured_backward(self._losses(*pytree.tree_unflatten(memory, structure)))
                return [each.take()[0] for each in sums]

        try:
            terms, replay = self._capture(work)
        except (PrivacyError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # drivers raise their own kinds
            raise RuntimeError(
                "the losses of a batch could not be captured as a CUDA graph "
                f"({type(error).__name__}). Fix: compute them without .item(), .cpu(), print or "
                "branches on what tensors hold, and without tensors that are made on the CPU; or "
                "call private.backward(losses) instead, as for large tables that are looked up."
            ) from error
        return Captured(key, given, place, replay, terms)

    def _capture_again(
        self, first: Captured, leaves: Sequence[Any], structure: Any, present: Tensor | None
    ) -> None:
        """Capture the pass of another batch, which must add what the first one adds."""
        self._captured = None
        again = self._capture_pass(first.key, leaves, structure, present)
        self._fill(first, again.given, again.present)
        with self._same_numbers():
            first.replay()
        again.replay()
        self._require_same(again.terms, first.terms)
        again.compared, self._captured = True, again

    def _same_numbers(self) -> AbstractContextManager[None]:
        """Have what is drawn meanwhile be drawn once more after it."""
        device = self._engine.parameters[0].device
        return torch.random.fork_rng([] if device.type == "cpu" else [device])

    def _require_same(self, terms: Terms, others: Terms) -> None:
        if not agree(terms, others):
            self._captured = None
            raise PrivacyError(
                "a captured pass adds something else than the usual pass on the same batch: the "
                "function reads something beside its arguments that changes from batch to batch, "
                "and would be left as it was. Fix: hand over all of it as arguments; or call "
                "private.backward(losses) instead."
            )

    def _fill(self, captured: Captured, tensors: Sequence[Tensor], present: Tensor | None) -> None:
        """Put a batch where the captured pass reads it."""
        with torch.no_grad():
            for own, new in zip(captured.given, tensors, strict=True):
                own.copy_(new, non_blocking=True)
            if captured.present is not None and present is not None:
                captured.present.copy_(present, non_blocking=True)

    def _add(self, captured: Captured) -> None:
        """Add to the engine's sums what a replay has left."""
        for sums, term in zip(self._engine.totals.sums, captured.terms, strict=True):
            if term is not None:  # in new memory: noise and gradients will have it
                sums.add(term.clone())


@contextmanager
def own_sums(engine: Engine) -> Iterator[Sequence[Sums]]:
    """Have an engine add to sums of their own meanwhile; what was added before stays."""
    before = engine.totals.sums
    engine.totals.sums = [Sums(each.shape, each.device, each.directions) for each in before]
    try:
        yield engine.totals.sums
    finally:
        engine.totals.sums = before


def settings(engine: Engine) -> tuple[Any, ...]:
    """All that decides what a pass does, besides the numbers of the batch and of the model."""
    kind, model = engine.parameters[0].device.type, engine.model
    present = None if engine.present is None else engine.present.shape
    return (
        *(engine.capacity, engine.physical_records, engine.rows_open, engine.fixed_shape),
        *(engine.clipping, engine.reduction, engine.groups, engine.null, present),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        engine.hooks,  # held with the graph, which reads memory of theirs: others may come
        tuple(module.training for module in model.modules()),
        tuple(lies(tensor) for tensor in (*model.parameters(), *model.buffers())),
        # one that was put in the place of another would leave the graph with freed memory
        tuple(lies(x) for m in model.modules() for x in vars(m).values() if isinstance(x, Tensor)),
    )


def copy_of(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def lies(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.requires_grad, isinstance(tensor, nn.Parameter)


def agree(terms: Terms, usual: Terms) -> bool:
    """Whether sums are the same but for rounding."""
    if [each is None for each in terms] != [each is None for each in usual]:
        return False
    pairs = [
        (each.double(), other.double())
        for each, other in zip(terms, usual, strict=True)
        if each is not None and other is not None
    ]
    if not pairs:
        return True
    apart = sum((each - other).square().sum() for each, other in pairs)
    length = sum(other.square().sum() for _, other in pairs)
    return bool(apart <= ALIKE**2 * length)
