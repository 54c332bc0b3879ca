"""Layer rules from outside: functions that give one kind of layer's per-sample gradients."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from dpoptim.errors import PrivacyError
from dpoptim.gradients.arithmetic.precision import widened
from dpoptim.gradients.backward_pass import BackwardRecorder, full_precision
from dpoptim.gradients.hooks.forwards import forward_of
from dpoptim.gradients.layers.runner import Use, tap
from dpoptim.gradients.layers.torch_func import called_with
from dpoptim.gradients.layers.vmapped import OwnForwardOf
from dpoptim.gradients.per_sample.per_sample_grads import Dense, PerSampleGrad
from dpoptim.runtime.torch_internals import pytree

Gradients = Mapping[str, Tensor | PerSampleGrad]
Rule = Callable[[Any, tuple[Tensor, ...], Tensor], Gradients]
REGISTERED: dict[type[nn.Module], Rule] = {}


def register_layer_rule(kind: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Register, for this process, a function for the per-sample gradients of a kind of layer.

    Without a rule, a layer is vectorised by ``vmap`` with a row of its parameters for each record,
    which is right but slow. Use as a decorator::

        @dpoptim.register_layer_rule(nn.Bilinear)
        def bilinear(layer, inputs, g):
            x, y = inputs  # (B, d1), (B, d2); g: (B, p)
            return {"weight": torch.einsum("bp,bi,bj->bpij", g, x, y), "bias": g}

    The layer's own forward pass runs, and autograd takes care of its inputs. What is given to the
    rule:

    * ``layer``: the module; its parameters' values may be read.
    * ``inputs``: the tensors of its call in the order of the forward pass's arguments, records
      first.
    * ``g``: the gradient of its output, shape (B, ...).

    It returns the gradients of every trainable parameter by name, shape (B, *parameter). Row i is
    record i's, a function of row i of ``inputs`` and ``g`` alone. (What it returns for frozen
    parameters, or for a bias that is None, is not looked at.) Test a rule with
    `dpoptim.audit.check_layer_rule`.

    Args:
        kind: a class of layers that takes tensors with the records on their first axis and returns
            one such tensor. Subclasses that keep its forward pass share the rule, which comes
            before any of this package's own.

    Returns:
        a decorator, which leaves the rule as it is.

    Raises:
        TypeError: ``kind`` is no class of layers, or the rule does not take these three arguments.
        ValueError: there is a rule for it already.

    **Guarantee.** Whatever a rule returns is clipped: a wrong one gives wrong gradients, of norm
    at most C a record. One that computes a record's gradient from other records' rows voids the
    guarantee; `check_layer_rule` looks for that.

    Examples:
        >>> import torch
        >>> import dpoptim
        >>> class Scale(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = torch.nn.Parameter(torch.ones(3))
        ...     def forward(self, x):
        ...         return x * self.weight
        >>> @dpoptim.register_layer_rule(Scale)
        ... def scale(layer, inputs, g):
        ...     (x,) = inputs  # (B, 3), as g
        ...     return {"weight": g * x}
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(
            f"kind must be a class of layers, got {kind!r}; write "
            "@register_layer_rule(nn.Bilinear)."
        )
    if kind in REGISTERED:
        raise ValueError(
            f"{kind.__name__} has a rule already; a subclass of it may have another one."
        )

    def register(rule: Rule) -> Rule:
        try:
            inspect.signature(rule).bind(None, (), None)
        except TypeError:
            raise TypeError("a layer rule takes three arguments: (layer, inputs, g).") from None
        REGISTERED[kind] = rule
        return rule

    return register


def registered_rule(module: nn.Module) -> Rule | None:
    """The rule of a layer's class, or of its nearest base whose forward pass it has kept."""
    for kind in type(module).__mro__:
        if kind in REGISTERED and type(module).forward is kind.forward:
            return REGISTERED[kind]
    return None


class RegisteredLayer:
    """Runs a layer that has a rule from outside: as it is, on detached parameters."""

    hooks_children = False

    def __init__(
        self, recorder: BackwardRecorder, module: nn.Module, label: str, rule: Rule
    ) -> None:
        self.module, self.label, self.rule = module, label, rule
        self.forward = inspect.signature(module.forward)
        self.shim = OwnForwardOf(module, forward_of(module))
        self.use = Use(recorder, label, module, self._per_sample_grads)

    def __call__(self, rows: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = self.forward.bind(*args, **kwargs).arguments.values()
        inputs = [value for value in bound if isinstance(value, Tensor)]
        if not inputs:
            raise PrivacyError(
                f"layer {self.label!r} got no tensor, so no record axis.", layer=self.label
            )
        with full_precision(self.use.recorder, self.label, inputs[0].device) as widen:
            if widen:
                args, kwargs = pytree.tree_map_only(
                    Tensor, lambda t: widened([t])[0], (args, kwargs)
                )
            output = self._on_detached_parameters(args, kwargs)
        records = {x.shape[:1] for x in inputs} | (
            {output.shape[:1]} if isinstance(output, Tensor) else {None}
        )
        if len(records) != 1:
            raise PrivacyError(
                f"layer {self.label!r} ({type(self.module).__name__}) must take tensors with the "
                "records on their first axis, and return one. Fix: keep the batch axis first.",
                layer=self.label,
            )
        return tap(self.use, output, *inputs)

    def _on_detached_parameters(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = {f"inner.{name}": p.detach() for name, p in self.module.named_parameters()}
        return called_with(self.shim, named, args, kwargs)

    def _per_sample_grads(
        self, inputs: tuple[Tensor, ...], g: Tensor
    ) -> Mapping[str, PerSampleGrad]:
        found = self.rule(self.module, inputs, g)
        gradients: dict[str, PerSampleGrad] = {}
        for name, p in self.module.named_parameters():
            if not p.requires_grad:
                continue
            each = found.get(name)
            if each is None or (isinstance(each, Tensor) and each.shape != (len(g), *p.shape)):
                got = "nothing" if each is None else "another one"
                raise PrivacyError(
                    f"the rule of layer {self.label!r} ({type(self.module).__name__}) must return "
                    f"gradients of {name!r}, one of the parameter's shape for each record: (B, "
                    f"...). Got {got}."
                )
            gradients[name] = Dense(each) if isinstance(each, Tensor) else each
        return gradients
