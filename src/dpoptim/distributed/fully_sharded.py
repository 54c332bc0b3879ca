"""Models under ``fully_shard`` (FSDP2): where their parameters are, and what travels."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Self, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dpoptim.distributed import fsdp_internals as fsdp
from dpoptim.distributed.ranks import Ranks
from dpoptim.distributed.sharded import Cut, ShardedTotals
from dpoptim.distributed.trial_passes import TrialPasses
from dpoptim.distributed.wrapping import Wrapping
from dpoptim.errors import PrivacyError
from dpoptim.gradients.accumulation.boxes import Stored, changed
from dpoptim.gradients.accumulation.totals import MakeTotals
from dpoptim.gradients.isolation import Isolation
from dpoptim.runtime.torch_internals import run_backward

Row = TypeVar("Row")


class FullySharded(Wrapping):
    """A model under ``fully_shard``, as a whole or in parts.

    Its layers' hooks see whole parameters, in forward and in backward passes, and give autograd
    nothing for them; so FSDP has nothing to reduce, and is told besides not to.

    Args:
        model: with at least one parameter that is a DTensor.

    Raises:
        PrivacyError: it is sharded in a way that is not supported, by name.
    """

    spread = True

    def __init__(self, model: nn.Module) -> None:
        reason = fsdp.unsupported(model)
        if reason:
            raise PrivacyError(
                f"{reason}, which is not supported. Fix: fully_shard(module, mesh=...) over a mesh "
                "of one dimension, without an offload policy; or DistributedDataParallel."
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

    # ---- trials: all ranks run the same records, block by block as in training -------------------

    @contextmanager
    def trying(self, ranks: Ranks) -> Iterator[None]:
        """Where a forward pass leaves parameters gathered, they are given back at its end."""
        self.settle()
        hook = self.module.register_forward_hook(lambda *ignored: self.settle(), always_call=True)
        before = fsdp.sends_gradients(self.module)
        fsdp.let_send_gradients([(group, False) for group, _ in before])
        passes = TrialPasses(ranks, self.module)
        try:
            yield
        finally:
            hook.remove()
            self.settle()
            fsdp.let_send_gradients(before)
            passes.close()

    def trial_rows(self, rows: list[Row], ranks: Ranks) -> list[Row]:
        """In turn from each rank."""
        everyone = ranks.all_gather(rows)
        return [everyone[i % ranks.size][i] for i in range(len(rows))]

    @property
    def trial_totals(self) -> MakeTotals:
        return partial(ShardedTotals, SameSums(*fsdp.place_of_shards(self.module)))

    def part_shape(self, p: nn.Parameter) -> tuple[int, ...]:
        rank, size = fsdp.place_of_shards(self.module)
        return Cut.of(p, size).part_shape(rank)

    def gradients(self, loss: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Keep this process's part of each gradient as soon as it is there, and no more."""
        rank, size = fsdp.place_of_shards(self.module)
        wholes = {held: whole for whole, held in self.used.items()}
        leaves = [wholes.get(p, p) for p in parameters]
        cuts = [Cut.of(p, size) for p in parameters]
        found = [
            leaf.new_zeros(cut.part_shape(rank)) for leaf, cut in zip(leaves, cuts, strict=True)
        ]

        def keep(place: int, leaf: Tensor) -> None:
            if leaf.grad is not None:
                part = cuts[place].part(rank, leaf.grad.contiguous().view(-1))
                found[place].copy_(part.view_as(found[place]))
                leaf.grad = None

        hooks = [
            leaf.register_post_accumulate_grad_hook(partial(keep, place))
            for place, leaf in enumerate(leaves)
        ]
        try:
            if loss.requires_grad:
                run_backward(loss)
        finally:
            for hook in hooks:
                hook.remove()
            self.settle()
        return found

    def added(self, numbers: Tensor) -> Tensor:
        total = numbers.detach().to(next(self.module.parameters()).device, copy=True)
        dist.all_reduce(total, group=fsdp.group_of_shards(self.module))
        return total.to(numbers.device)

    # ---- the run --------------------------------------------------------------------------------

    def totals(self, ranks: Ranks) -> MakeTotals:
        if ranks.size != fsdp.place_of_shards(self.module)[1]:
            raise ValueError(
                "process_group has other processes than the mesh that fully_shard was given. Fix: "
                "leave process_group out."
            )
        return partial(ShardedTotals, ranks)

    def refuse(self, isolation: Isolation) -> None:
        modules = dict(self.module.named_modules())
        for name in isolation.apart:
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

    def in_boxes(self, state: Any) -> Any:
        return changed(
            state, lambda _, each: fsdp.boxes_of(each) if isinstance(each, DTensor) else each
        )

    def model_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        held = self.module.state_dict()
        return {key: own_part(held.get(key), value) for key, value in saved.items()}

    def optimizer_state(self, parameters: list[Tensor], saved: dict[str, Any]) -> dict[str, Any]:
        states = {
            key: {name: own_part(parameters[key], value) for name, value in state.items()}
            for key, state in saved["state"].items()
        }
        return saved | {"state": states}


@dataclass
class SameSums(Ranks):
    """Ranks that all have the same sums: nothing is added up, each keeps its part."""

    rank: int
    size: int


def own_part(like: Any, value: Any) -> Any:
    """This process's part of what has the shape of a parameter that is sharded; else all of it."""
    sharded = isinstance(like, DTensor) and isinstance(value, Tensor | Stored)
    if sharded and tuple(value.shape) == tuple(like.shape):
        return fsdp.part_like(like, value)
    return value.whole() if isinstance(value, Stored) else value
