"""Models under ``fully_shard`` (FSDP2): where their parameters are, and what travels."""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any, Self

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dpoptim.distributed import fsdp_internals as fsdp
from dpoptim.distributed.ranks import Ranks
from dpoptim.distributed.sharded import ShardedTotals
from dpoptim.distributed.stored import Stored, changed, note
from dpoptim.errors import PrivacyError
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.totals import MakeTotals


class FullySharded:
    """A model under ``fully_shard``, as a whole or in parts; see `wrapping.Wrapping`.

    Its layers' hooks see whole parameters, in forward and backward passes alike, and give autograd
    nothing for them; so FSDP has nothing to reduce, and is told besides not to.

    Args:
        model: with at least one parameter that is a DTensor.

    Raises:
        PrivacyError: it is sharded in a way that is not supported, by name.
    """

    hooks: Collection[int] = ()

    def __init__(self, model: nn.Module) -> None:
        reason = fsdp.unsupported(model)
        if reason:
            raise PrivacyError(
                f"{reason}, which is not supported. Fix: fully_shard(module, mesh=...) over a mesh "
                "of one dimension, without policies; or DistributedDataParallel."
            )
        self.module = model
        self._before: list[tuple[Any, bool]] = []

    @cached_property
    def used(self) -> Mapping[nn.Parameter, nn.Parameter]:
        return fsdp.used_in_forward(self.module)

    def in_forward(self) -> AbstractContextManager[None]:
        return fsdp.holding(self.module, {held: whole for whole, held in self.used.items()})

    def settle(self) -> None:
        fsdp.reshard(self.module)

    def gathered(self) -> AbstractContextManager[None]:
        return fsdp.gathered(self.module)

    def totals(self, ranks: Ranks) -> MakeTotals:
        if ranks.size != fsdp.number_of_shards(self.module):
            raise ValueError(
                "process_group has other processes than the mesh that fully_shard was given. Fix: "
                "leave process_group out."
            )
        return partial(ShardedTotals, ranks)

    def refuse(self, isolation: Isolation) -> None:
        modules = dict(self.module.named_modules())
        for name in isolation.by_vmap:
            if len(fsdp.sharded_modules(modules[name])) > isinstance(modules[name], FSDPModule):
                raise PrivacyError(
                    f"{f'module {name!r}' if name else 'the model'} is vectorised as a whole, but "
                    "parts of it are under fully_shard by themselves. Fix: fully_shard the whole "
                    'of it alone; or isolation="alone".'
                )

    def switch_off(self) -> Self:
        self._before = fsdp.sends_gradients(self.module)
        fsdp.let_send_gradients([(group, False) for group, _ in self._before])
        return self

    def restore(self) -> None:
        self.settle()
        fsdp.let_send_gradients(self._before)
        self._before = []

    def noted(self, state: Any, parts: list[Tensor]) -> Any:
        if isinstance(state, DTensor):
            parts.append(state.to_local().detach().cpu())
            return note(len(parts) - 1, tuple(state.shape), *fsdp.cut_of(state))
        return changed(state, lambda each: self.noted(each, parts))

    def model_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        held = self.module.state_dict()
        return {key: own_part(held.get(key), value) for key, value in saved.items()}

    def optimizer_state(self, parameters: list[Tensor], saved: dict[str, Any]) -> dict[str, Any]:
        states = {
            key: {name: own_part(parameters[key], value) for name, value in state.items()}
            for key, state in saved["state"].items()
        }
        return saved | {"state": states}


def own_part(like: Any, value: Any) -> Any:
    """This process's part of what has the shape of a parameter that is sharded; else all of it."""
    sharded = isinstance(like, DTensor) and isinstance(value, Tensor | Stored)
    if sharded and tuple(value.shape) == tuple(like.shape):
        return fsdp.cut_like(like, value)
    return value.whole() if isinstance(value, Stored) else value
