"""Putting a model's layers under hooks, and taking every trace away again."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from dpoptim.errors import PrivacyError
from dpoptim.gradients.backward_pass import BackwardRecorder, RuleFunction
from dpoptim.gradients.hooks import refusals
from dpoptim.gradients.hooks.computed_weights import ComputedWeights
from dpoptim.gradients.hooks.forwards import (
    FrozenForward,
    OwnForward,
    PerSampleForward,
    StillForward,
    forward_of,
    has_own_forward,
    replace_forward,
)
from dpoptim.gradients.hooks.joined_inputs import by_batches, by_records
from dpoptim.gradients.hooks.model_hooks import FrozenHook, InputHook, ModeHook, OutputHook
from dpoptim.gradients.hooks.seen_outputs import SeenOutputs
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.layers.bare import BareParameters, OutsideUseError, ReadOutside, for_records
from dpoptim.gradients.layers.folded import FoldedLayer, FoldedRule
from dpoptim.gradients.layers.linear import faster_forward
from dpoptim.gradients.layers.looped import LoopedLayer
from dpoptim.gradients.layers.registry import rule_for, runner_for, takes_more_axes
from dpoptim.gradients.layers.rule import AnyRule
from dpoptim.gradients.layers.runner import Runner
from dpoptim.gradients.layers.shared import SharedParameter
from dpoptim.gradients.layers.vmapped import VmapLayer
from dpoptim.gradients.memory import give_back_before_loss
from dpoptim.gradients.watch.contents import Contents, trainable_names
from dpoptim.gradients.watch.model_watch import ModelWatch
from dpoptim.runtime.torch_internals import SpectralNormalised, applied, pytree


class HookManager:
    """The changes that hooking makes to a model's instances, and what it watches while they last.

    Args:
        isolation: how records are kept apart; for passes of single records see `SingleRecordHooks`.

    Raises:
        PrivacyError: a layer or option that cannot be clipped record by record, by name; nothing
            is changed then.
    """

    def __init__(
        self, model: nn.Module, recorder: BackwardRecorder, isolation: Isolation | None = None
    ) -> None:
        self.model, self.recorder = model, recorder
        self.isolation = isolation or Isolation()
        # Records in the model's current input; outside of its forward pass, in the delivered
        # microbatch.
        self.rows: int | None = None
        self._delivered: int | None = None
        self.given: int | None = None  # rows of the last input
        self._undo: list[Callable[[], Any]] = []
        self._outside = ReadOutside(
            recorder,
            ((name, model.get_submodule(name)) for name in sorted(self.isolation.outside)),
            windows=self.isolation.windows,
        )
        self._hooked: set[nn.Module] = set()  # a module may stand in several places
        self.outputs = SeenOutputs()
        self._inside = False  # of the model's forward pass
        self._joined = 0  # inputs in this pass, where a record has several
        self.turned = False  # whether a pass on what is delivered had such, in batches
        self._still: dict[str, Any] = {}  # lists of parametrisations, by name
        self._computed: dict[str, ComputedWeights] = {}  # by the names of their modules
        self._state: ModelWatch | None = None
        try:
            for name, layer in refusals.watch_batch_statistics(model):
                self._undo.append(layer.register_forward_pre_hook(ModeHook(name)).remove)
            self._hold_still()
            self._hook(model, "")
            # in the engine's order
            for place, (name, p) in enumerate(Contents.of(model).trainable()):
                self._undo.append(self._hook_parameter(name, place, p))
            before, after = InputHook(self), OutputHook(self)
            self._undo.append(model.register_forward_pre_hook(before, with_kwargs=True).remove)
            self._undo.append(model.register_forward_hook(after, always_call=True).remove)
            # whether weights are computed anew with each step
            self.iterates = bool(self._still or self._computed)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Restore the model exactly. Harmless when repeated."""
        self._outside.end()
        self._state = None
        while self._undo:
            self._undo.pop()()

    def watch_state(self) -> ModelWatch:
        """Watch what the model writes from now on, until `undo`."""
        self._state = ModelWatch(self.model, self.iterated())
        return self._state

    def see_microbatch(self, rows: int) -> None:
        """A microbatch is delivered."""
        self.rows = self._delivered = rows
        self._inside, self._joined, self.turned = False, 0, False  # of one that raised
        self.outputs.begin()
        if self.iterates and (self._state is None or self._state.step_begins):
            self._iterate_spectral_norms()
            if self._state is not None:
                self._state.note_iterated()

    def see_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note how many records the model is given; what it shall have instead, or None."""
        self._inside = True
        given = self._of_records(args, kwargs)
        one = len(args) == 1 and not kwargs and type(args[0]) is Tensor
        leaves = args if one else pytree.tree_leaves((args, kwargs))
        refusals.refuse_nested(leaves)
        axis = self.isolation.batch_axis
        self.outputs.see_inputs(leaves, axis)
        sizes = [
            leaf.shape[axis if leaf.dim() > axis else 0]
            for leaf in leaves
            if isinstance(leaf, Tensor) and leaf.dim()
        ]
        # The first tensor may be no batch, but positions; what was delivered tells.
        if sizes:
            plain = self._delivered in sizes and not self._joined
            self.rows = self.given = self._delivered if plain else sizes[0]
        if self._outside.owners:
            self._outside.begin(self.rows)
        if self._state is not None:
            self._state.before_forward()
        return given if self._joined else None

    def _of_records(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of a call, turned where there are several batches of what is delivered."""
        given, self._joined = (args, kwargs), 0
        if self.isolation.joined == "by batches" and self._delivered and torch.is_grad_enabled():
            given, self._joined = by_records(given, self._delivered)
        self.turned |= self._joined > 0
        return given

    def see_output(self, output: Any) -> Any:
        """Tell layers called by themselves how many records there are; what is returned instead."""
        self._inside = False
        if self._joined:
            output = by_batches(output, self._joined, self._delivered or 1)
        self.outputs.see(output)
        if self._outside.owners:
            self._outside.end()
        if self.recorder.looks:
            self.recorder.look(output)
        give_back_before_loss(output)
        self.rows = self._delivered if self._delivered is not None else self.rows
        if self._state is not None:
            self._state.after_forward()
        return output if self._joined else None

    def _hook(self, module: nn.Module, name: str) -> None:
        if module in self._hooked:
            return
        if not any(p.requires_grad for p in module.parameters()):
            self._watch_frozen(module, name)
            self._speed_up_frozen(module)
            return
        self._hooked.add(module)
        label = name or type(module).__name__
        refusals.refuse_wrapped(module, label, serve_containers=True)
        way = self._way(module, name, label)
        if way is None:
            runner = runner_for(self.recorder, module, label, self.isolation)
            if runner is None or runner.hooks_children:
                for key, child in module.named_children():
                    if key == "parametrizations" and is_parametrized(module):
                        continue  # its forward pass has their parameters
                    self._hook(child, f"{name}.{key}" if name else key)
            way = None if runner is None else self._runs(runner)
        if way is not None:
            self._replace_forward(module, PerSampleForward(module, way, self._see_part))

    def _way(self, module: nn.Module, name: str, label: str) -> Callable[..., Any] | None:
        """How a module runs by `isolation`, or by its rule; None where neither says."""
        isolation, recorder = self.isolation, self.recorder
        axis, of = isolation.batch_axis, (recorder, module, label)
        if name in isolation.by_vmap:
            return self._runs(VmapLayer(*of, trainable_names(module), axis))
        if name in isolation.by_loop and name in isolation.folded:
            return self._runs(FoldedLayer(*of, trainable_names(module), LoopedLayer))
        if name in isolation.by_loop:
            return self._runs(LoopedLayer(*of, trainable_names(module), axis))
        bare = partial(BareParameters, isolation=isolation, sees_records=False)
        if name in isolation.shared:
            return self._runs(bare(*of, trainable_names(module)))
        rule = None if has_own_forward(module) else rule_for(module)
        if rule is None:
            return None
        rule.check(module, label)
        run = partial(self._run_layer, rule, module, label)
        if name in isolation.folded:
            run = partial(self._run_folded, rule, module, label)
        elif name in isolation.interleaved:
            run = partial(self._run_interleaved, partial(self._run_folded, rule, module, label))
        elif name in isolation.time_first:
            run = partial(run_time_first, run)
        if name in isolation.both:
            shared = self._runs(bare(*of, trainable_names(module)))
            run = partial(run_either, shared, run)
        if name in isolation.outside:
            run = partial(self._run_alone, module, run)
        return run

    def _runs(self, runner: Runner) -> Callable[..., Any]:
        return lambda *args, **kwargs: runner(self.rows, args, kwargs)

    def _see_part(self, inputs: Any, output: Any) -> None:
        """See a hooked module; one that a loop calls by itself has outputs as the model has."""
        if not self._inside:
            self.outputs.see_part(inputs, self.isolation.batch_axis, output)

    def _hold_still(self) -> None:
        """Keep spectral norms from writing buffers in forward passes: these might carry records."""
        for name, module in self.model.named_modules():
            for part in module if isinstance(module, ParametrizationList) else ():
                if isinstance(part, SpectralNormalised):
                    self._still[name] = module
                    self._replace_forward(part, StillForward(part, forward_of(part)))
            if computed := ComputedWeights.of(module, name or type(module).__name__):
                self._computed[name] = computed
                self._undo.append(computed.put_on())

    @torch.no_grad()
    def _iterate_spectral_norms(self) -> None:
        """Let spectral norms follow the weights, which are public, as forward passes would.

        **Guarantee.** Once a step. How many microbatches it has is private: nothing that later
        steps or other records meet may count them.
        """
        for chain in self._still.values():
            value = chain.original
            for part in chain:
                if isinstance(part, SpectralNormalised) and part.training:
                    matrix = part._reshape_weight_to_matrix(value)
                    part._power_method(matrix, part.n_power_iterations)
                value = part(value)
        for computed in self._computed.values():
            computed.iterate()

    def iterated(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers that are written between steps."""
        for name, chain in self._still.items():
            yield from chain.named_buffers(prefix=name)
        for name, computed in self._computed.items():
            for key, buffer in computed.iterated():
                yield f"{name}.{key}" if name else key, buffer

    def _watch_frozen(self, module: nn.Module, name: str) -> None:
        """Watch layers without hooks, which may round gradients on their way to those with some."""
        if self.recorder.may_round:
            return
        for key, part in module.named_modules(prefix=name):
            if next(part.parameters(), None) is None:
                # activations and the like: autocast leaves them in the dtype of their input
                continue
            hook = FrozenHook(self.recorder, key)
            self._undo.append(part.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _speed_up_frozen(self, module: nn.Module) -> None:
        for part in module.modules():
            faster = None if has_own_forward(part) else faster_forward(part)
            if faster is not None:
                self._replace_forward(part, FrozenForward(part, faster))

    def _run_layer(
        self, rule: AnyRule, module: nn.Module, label: str, *args: Any, **kwargs: Any
    ) -> Tensor:
        (x,) = (*args, *kwargs.values())
        try:
            x = rule.prepare(module, label, for_records(x, self.rows), self.rows)
        except PrivacyError as error:
            error.layer = error.layer or label
            raise
        parameters = [p for p in module._parameters.values() if p is not None]
        return applied(RuleFunction, self.recorder, rule, module, label, x, *parameters)

    def _run_folded(self, rule: AnyRule, module: nn.Module, label: str, x: Tensor) -> Tensor:
        """Run a layer on records and positions that are folded together, records first."""
        if not self.rows or x.shape[0] % self.rows:
            return self._run_layer(rule, module, label, x)
        positions = x.shape[0] // self.rows
        if not takes_more_axes(rule):
            return self._run_layer(FoldedRule(rule, positions), module, label, x)
        unfolded = x.unflatten(0, (self.rows, positions))
        return self._run_layer(rule, module, label, unfolded).flatten(0, 1)

    def _run_interleaved(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run a layer on positions and records that are folded together, positions first."""
        if not self.rows or x.shape[0] % self.rows:
            return run(x)
        output = run(x.unflatten(0, (-1, self.rows)).transpose(0, 1).flatten(0, 1))
        return output.unflatten(0, (self.rows, -1)).transpose(0, 1).flatten(0, 1)

    def _run_alone(
        self, module: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a layer on its parameters as they are, whatever the model reads meanwhile."""
        with self._outside.hidden_from(module):
            return run(*args, **kwargs)

    def _replace_forward(self, module: nn.Module, forward: OwnForward) -> None:
        self._undo.append(replace_forward(module, forward))

    def _hook_parameter(self, name: str, place: int, p: nn.Parameter) -> Callable[[], None]:
        """Watch what autograd sends to a parameter. Returns what takes the hook off."""
        return p.register_hook(partial(self._reached, name, place)).remove

    def _reached(self, name: str, place: int, g: Tensor | None) -> None:
        """Parameter hook: the hooks hand autograd None, so a tensor has come by another way."""
        if g is not None:
            raise OutsideUseError(
                f"parameter {name!r} was used outside its module's forward pass (such as "
                "F.linear(x, layer.weight), a weight of tasks that the loss reads, or a penalty on "
                "the weights): that part of its gradient would escape clipping. Fix: in place of a "
                "penalty, c * p.square().sum(), the optimizer's weight_decay=2 * c, which acts "
                "after the noise and costs no privacy; else dpoptim.per_sample(loss), in which "
                "each record has a row of what the loss reads; call the module itself; "
                'or dpoptim.attach(..., isolation="alone").',
                layer=name.rpartition(".")[0],
            )
        self.recorder.reached(place)


def run_either(
    bare: Callable[[Tensor], Tensor], run: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    """Run a layer on records, or on what all of them share."""
    return bare(x) if isinstance(x, SharedParameter) else run(x)


def run_time_first(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run a layer on (time, records, ...): what it returns lies in memory as its own would."""
    return run(x.transpose(0, 1)).transpose(0, 1).contiguous()
