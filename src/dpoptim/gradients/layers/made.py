"""Layers whose weights are made of parameters: weight norm, masks and other parametrisations.

The weights are made once, for all records. The layer's own rule gives each record's gradient of
them, which the derivative of how they were made, one for all records, takes to the parameters.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpoptim.errors import PrivacyError, quoted
from dpoptim.gradients.arithmetic.position_sums import never_alone
from dpoptim.gradients.arithmetic.precision import widened
from dpoptim.gradients.layers.functional import layer_of
from dpoptim.gradients.layers.operations import Call
from dpoptim.gradients.layers.rule import AnyRule, LayerRule, PerSampleGrads, Saved
from dpoptim.gradients.layers.torch_func import ByHand, vmap
from dpoptim.gradients.per_sample.lazy import Lazy
from dpoptim.gradients.per_sample.per_sample_grads import PerSampleGrad
from dpoptim.runtime.torch_internals import DispatchMode, pytree


class CallOfMade(Call, Protocol):
    """A function's call, which knows the parameters that its shared tensors were made of."""

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]: ...


def layer_of_made_weights(call: CallOfMade) -> tuple[AnyRule, nn.Module, Tensor] | None:
    """Rule, holder of parameters and input of a layer whose weights are made of these.

    None: the call is no such layer, or its input is none of records.
    """
    owner = call.shared[0].owner
    made = {id(each): nn.Parameter(each.plain()) for each in call.shared}
    args, kwargs = pytree.tree_map(lambda x: made.get(id(x), x), (call.args, call.kwargs))
    found = layer_of(call.name, args, kwargs)
    if found is None or owner.records_on(found[2].shape[0]) is None:
        return None
    rule, layer, x = found
    rule.check(layer, owner.label)
    shared = {id(made[id(each)]): each for each in call.shared}
    of = {name: shared[id(p)] for name, p in layer.named_parameters() if id(p) in shared}
    return MadeRule(rule, layer, of, call.parameters, owner.label), owner.holder(call.parameters), x


class MadeRule(LayerRule[nn.Module]):
    """The rule of a layer with weights that are made of parameters; it is run on their holder.

    Args:
        rule: of the layer.
        layer: stands in for it, with the made weights as its parameters.
        made: these, as `SharedParameter`, by name; of others nobody asks.
        parameters: that they were made of, as the holder has them, by their places.
        label: of the module whose weights they are.

    **Guarantee.** A record's gradients of the parameters are functions of its own gradients of the
    weights, and of the parameters.
    """

    def __init__(
        self,
        rule: AnyRule,
        layer: nn.Module,
        made: dict[str, Any],
        parameters: Sequence[Tensor],
        label: str,
    ) -> None:
        self.rule, self.layer, self.made, self.label = rule, layer, made, label
        self.parameters = tuple(parameters)
        self.narrow, self.casts, self.widens = rule.narrow, rule.casts, rule.widens

    def prepare(self, module: nn.Module, name: str, x: Tensor, rows: int | None) -> Tensor:
        return self.rule.prepare(self.layer, name, x, rows)

    def forward(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Saved]:
        output, saved = self.rule.forward(self.layer, x)
        return output, (*self.parameters, *saved)

    def input_gradient(self, module: nn.Module, saved: Saved, g: Tensor) -> Tensor | None:
        return self.rule.input_gradient(self.layer, saved[len(self.parameters) :], g)

    def per_sample_grads(self, module: nn.Module, saved: Saved, g: Tensor) -> PerSampleGrads:
        values, rest = widened(saved[: len(self.parameters)]), saved[len(self.parameters) :]
        rows = self.rule.per_sample_grads(self.layer, rest, g)
        return {
            str(place): self._of_parameter(place, values, rows, len(g))
            for place in range(len(self.parameters))
        }

    def _of_parameter(
        self, place: int, values: Sequence[Tensor], rows: PerSampleGrads, records: int
    ) -> PerSampleGrad:
        parameter = self.parameters[place]
        of = {
            name: made
            for name, made in self.made.items()
            if any(p is parameter for p in made.parameters)
        }
        if len(of) == 1 and all(made.itself for made in of.values()):
            return rows[next(iter(of))]
        known = dict(zip(map(id, self.parameters), values, strict=True))

        def again(value: Tensor) -> list[Tensor]:
            return [made.make({**known, id(parameter): value}) for made in of.values()]

        with ByHand(), NothingDrawn(self.label):
            vjp: Any = torch.func.vjp(again, values[place])
        made, derivative = vjp

        def form(part: slice, _: int) -> Tensor:
            of_weights = [
                never_alone(rows[name].materialise(part).view(-1, *weight.shape).to(weight.dtype))
                for name, weight in zip(of, made, strict=True)
            ]
            (found,) = by_record(derivative)(of_weights)
            return found[: part.stop - part.start].reshape(part.stop - part.start, -1)

        entries = sum(weight.numel() for weight in made)
        return Lazy(form, records, parameter.numel(), 2 * entries)


class NothingDrawn(DispatchMode):
    """Refuses random numbers in what makes weights again, which would not be those that were used.

    Args:
        label: of the module whose weights are made.
    """

    def __init__(self, label: str) -> None:
        super().__init__()
        self._label = label

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise PrivacyError(
                f"module {self._label!r} draws random numbers to make its weights, whose "
                "gradients would be those of other numbers. Fix: draw them in a shape that is "
                "given, rather than in that of a parameter; or "
                "dpoptim.attach(..., isolation='alone').",
                layer=self._label,
            )
        return func(*args, **(kwargs or {}))


def by_record(derivative: Callable[..., Any]) -> Callable[..., Any]:
    """The derivative for each record's gradients of the weights."""

    def run(of_weights: list[Tensor]) -> Any:
        try:
            return vmap(derivative, randomness="error")(of_weights)
        except RuntimeError as error:
            raise PrivacyError(
                "what makes a layer's weights of its parameters cannot be differentiated record by "
                f"record: {quoted(error)}. Fix: dpoptim.attach(..., isolation='alone')."
            ) from None

    return run
