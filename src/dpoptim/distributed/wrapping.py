"""How a model is spread over processes, and what its wrapper may send.

No wrapper sends gradients around the gate.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dpoptim.distributed.process_group import ProcessGroup
from dpoptim.distributed.ranks import Ranks
from dpoptim.errors import PrivacyError
from dpoptim.gate.one_process import is_alone
from dpoptim.gradients.accumulation.boxes import whole
from dpoptim.gradients.accumulation.totals import MakeTotals
from dpoptim.gradients.placement import Placement
from dpoptim.runtime.torch_internals import delays_gradients, running_wrapper, wrappers_of

Row = TypeVar("Row")
SENDING = ("require_backward_grad_sync", "require_forward_param_sync")


def ranks_of(model: nn.Module | None, group: dist.ProcessGroup | None) -> Ranks:
    """The processes that train ``model``, or fit something else, together.

    Those of ``group``, of the model's wrapper, or all there are; one where it works `alone`.

    Raises:
        ValueError: ``group`` was given without `torch.distributed`, or this process is not in it.
    """
    if group is None and is_alone():
        return Ranks()
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise ValueError(
                "process_group was given, but torch.distributed.init_process_group was not called."
            )
        return Ranks()
    if group is None:
        group = group_of(model) or dist.group.WORLD
    if group is None or dist.get_rank(group) < 0:
        raise ValueError(
            "process_group: this process is not in it. Fix: attach in the group's processes alone."
        )
    return Ranks() if dist.get_world_size(group) == 1 else ProcessGroup(group)


def group_of(model: nn.Module | None) -> dist.ProcessGroup | None:
    """The processes of the model's wrapper; None if it is bare."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        own: dist.ProcessGroup = model.process_group
        return own
    if model is not None and is_sharded(model):
        from dpoptim.distributed.fsdp_internals import group_of_shards

        return group_of_shards(model)
    return None


def is_sharded(model: nn.Module) -> bool:
    """Whether each process has a part of a parameter only."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(p, DTensor) for p in model.parameters())


class Wrapping(Placement, ABC):
    """A wrapper: what it does by itself, and where it keeps parameters; here, whole ones.

    Attributes:
        module: the bare model.
    """

    module: nn.Module

    def trying(self, ranks: Ranks) -> AbstractContextManager[None]:
        """A ``with`` to run the model on made-up records, entered by all ranks together.

        Raises:
            RankError: the model raised on some ranks alone.
        """
        return nullcontext()

    def trial_rows(self, rows: list[Row], ranks: Ranks) -> list[Row]:
        """Rows on which a model is tried, of what each rank would take.

        The same on all ranks, where passes have collectives.
        """
        return rows

    def totals(self, ranks: Ranks) -> MakeTotals:
        """Totals that make the sums of this rank's records those of all ranks'."""
        return ranks.totals

    @abstractmethod
    def switch_off(self) -> Self:
        """Keep the wrapper from sending gradients."""

    @abstractmethod
    def restore(self) -> None:
        """As it was before `switch_off`. Harmless when repeated."""

    def in_boxes(self, state: Any) -> Any:
        """A state dict, or a nest of them, with `Boxes` of what no process has whole."""
        return state

    def model_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a checkpoint's model state, or of tensors by the same names."""
        return dict(whole(saved))

    def optimizer_state(self, parameters: list[Tensor], saved: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of an optimizer's state, whose parameters these are."""
        return dict(whole(saved))


def wrapping_of(model: nn.Module) -> Wrapping:
    """How a model is spread over processes.

    Raises:
        PrivacyError: in a way that is not supported, by name.
    """
    if not is_sharded(model):
        return OwnSynchronisation(model)
    from dpoptim.distributed.fully_sharded import FullySharded  # slow to import

    return FullySharded(model)


class OwnSynchronisation(Wrapping):
    """A model that is whole in each process, also under `DistributedDataParallel`.

    What the wrapper would send by itself is off while attached, and as it was afterwards; also
    where the bare model was attached, and a wrapper of it is called.

    Args:
        model: wrapped or bare.

    Attributes:
        module: the bare model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.module: nn.Module = model
        if isinstance(model, nn.parallel.DistributedDataParallel):
            self.module = model.module
        self._before: dict[nn.parallel.DistributedDataParallel, dict[str, bool]] = {}
        self._watch: RemovableHandle | None = None

    def switch_off(self) -> Self:
        if dist.is_available() and dist.is_initialized():
            for wrapper in wrappers_of(self.module):
                self._silence(wrapper)
            self._watch = self.module.register_forward_pre_hook(self._silence_caller)
            self.hooks = (self._watch.id,)
        return self

    def _silence_caller(self, module: nn.Module, inputs: Any) -> None:
        """Before a forward pass: what calls it decides afterwards whether to send."""
        caller = running_wrapper()
        if caller is not None and caller.module is module and caller not in self._before:
            self._silence(caller)

    def _silence(self, wrapper: nn.parallel.DistributedDataParallel) -> None:
        if delays_gradients(wrapper):
            raise PrivacyError(
                "the DistributedDataParallel wrapper delays gradients of some parameters "
                "(delay_all_reduce_named_params), which it sends whatever attach says. Fix: wrap "
                "the model without it."
            )
        if wrapper.static_graph:
            raise PrivacyError(
                "the DistributedDataParallel wrapper has static_graph=True, which counts every "
                "backward pass to learn what to send, those of attach included. Fix: wrap the "
                "model without it."
            )
        self._before[wrapper] = {name: getattr(wrapper, name) for name in SENDING}
        for name in SENDING:
            setattr(wrapper, name, False)

    def restore(self) -> None:
        if self._watch is not None:
            self._watch.remove()
            self._watch, self.hooks = None, ()
        for wrapper, before in self._before.items():
            for name, value in before.items():
                setattr(wrapper, name, value)
        self._before = {}
