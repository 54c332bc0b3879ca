"""Parameters that a module uses in its own forward pass: class tokens, position embeddings,
scales.

While the forward pass of their owner runs, such parameters are replaced by `SharedParameter`, a
tensor that looks at every operation it takes part in:

* with parameters and constants only, the result is again a `SharedParameter`, which remembers how
  it was made;
* with data, in one of the operations where it is plain which row belongs to which record
  (elementwise ones, and joining along another axis than the first), it is expanded to one row per
  record first, by `ExpandParameter`. What comes of row i then depends on row i alone, so the
  gradient of that row is record i's own. (Which tensors are data, and that the records are their
  first axis, is read off how long it is: in the first call, best one on made-up records of a
  number unlike every other axis. Without those it is on trust, as for all layers.)
* with data, in a function that is a layer (``F.linear``), that layer's rule does it;
* anything else raises `UnsupportedUseError`, upon which the whole module goes through the
  fallback.

Nothing depends on having seen every use: whatever reaches the parameter by another way runs into
its hook, and is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.errors import PrivacyError
from dpoptim.gradients.backward_pass import RuleFunction
from dpoptim.gradients.layers.expanded import ExpandParameter, Owner, Parameter, Values
from dpoptim.torch_internals import DisableTorchFunctionSubclass, pytree

# names of functions and methods, without the underscores of operators and in-place variants
ELEMENTWISE = {
    *("add", "radd", "iadd", "sub", "subtract", "rsub", "isub", "mul", "multiply", "rmul", "imul"),
    *("div", "divide", "true_divide", "truediv", "rtruediv", "itruediv", "rdiv", "pow", "rpow"),
    *("where", "maximum", "minimum", "addcmul", "addcdiv", "lerp"),
}
IN_PLACE_OPERATORS = {"__iadd__", "__isub__", "__imul__", "__itruediv__"}
REPEATING = {"expand", "repeat", "broadcast_to", "tile"}
# these keep row-major order
SAME_ROWS = {"view", "reshape", "contiguous", "clone", "to", "type", "float", "double"}
LIKE_ANOTHER: dict[str, Callable[[Tensor], Any]] = {
    "expand_as": lambda t: t.shape,
    "type_as": lambda t: t.dtype,
    "to": lambda t: t.dtype,
}


class UnsupportedUseError(PrivacyError):
    """A bare parameter met data in an operation that does not tell which gradient is whose."""

    def __init__(self, label: str, operation: str, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(
            f"a parameter of module {label!r} meets data in {operation!r}, where it cannot be "
            "told record from record. "
            "Fix: use it inside its module's own forward pass, with tensors whose first axis is "
            "the batch."
        )
        self.parameters = parameters


class SharedParameter(torch.Tensor):
    """A parameter that all records share, or what was made of such parameters and of constants."""

    owner: Owner
    make: Callable[[Values], Tensor]  # computes the tensor again from the parameters
    parameters: tuple[nn.Parameter, ...]  # that it was made of
    alike: bool  # all rows are equal: there is one for each record

    @classmethod
    def of(cls, owner: Owner, parameter: nn.Parameter) -> "SharedParameter":
        return cls._wrap(parameter, owner, Parameter(id(parameter)), (parameter,), False)

    @classmethod
    def _wrap(
        cls,
        value: Tensor,
        owner: Owner,
        make: Callable[[Values], Tensor],
        parameters: tuple[nn.Parameter, ...],
        alike: bool,
    ) -> "SharedParameter":
        shared = value.as_subclass(cls)
        shared.owner, shared.make, shared.parameters, shared.alike = owner, make, parameters, alike
        return shared

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in LIKE_ANOTHER and len(args) == 2 and isinstance(args[1], Tensor):
            # The other tensor gives its shape or dtype only.
            method = "expand" if name == "expand_as" else "to"
            return getattr(args[0], method)(LIKE_ANOTHER[name](args[1]), **kwargs)
        operation = Operation(func, name, args, kwargs)
        owner = operation.shared[0].owner
        if "out" in kwargs or (in_place(name) and args and isinstance(args[0], SharedParameter)):
            raise operation.unsupported()
        if not operation.data:
            return operation.derived()
        if all(isinstance(each.make, Parameter) for each in operation.shared):
            found = owner.layer(name, *pytree.tree_map(as_parameter, (args, kwargs)))
            if found is not None:
                rule, layer, x = found
                x = rule.prepare(layer, owner.label, x, owner.rows)
                return RuleFunction.apply(
                    owner.recorder, rule, layer, owner.label, x, *layer.parameters()
                )
        return operation.per_record()

    def plain(self) -> Tensor:
        with DisableTorchFunctionSubclass():
            return self.detach().as_subclass(Tensor)

    def fits(self, rows: int, axes: int) -> bool:
        """Whether broadcasting gives each of so many records its row, among tensors of so many
        axes.
        """
        if self.dim() != axes:
            return self.dim() < axes
        return self.shape[0] == 1 or (self.shape[0] == rows and self.alike)

    def per_record(self, rows: int, axes: int, joint: torch.Size | None = None) -> Tensor:
        """One row per record: shape (rows, ...) of so many axes, under hooks; in an elementwise
        operation of a joint shape, of that one."""
        value, make = self.plain(), self.make
        if value.dim() == axes and value.shape[0] == rows and rows != 1:
            value, original = value[:1], make  # all rows are equal
            make = lambda values: original(values)[:1]  # noqa: E731
        shape = joint or torch.broadcast_shapes(value.shape, (rows, *[1] * (axes - 1)))
        return ExpandParameter.apply(
            self.owner, make, self.parameters, value, shape, *self.parameters
        )


@dataclass(frozen=True)
class Operation:
    """An operation of torch on shared parameters, among other things."""

    func: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @cached_property
    def leaves(self) -> list[Tensor]:
        found = pytree.tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in found if isinstance(leaf, Tensor)]

    @cached_property
    def shared(self) -> list[SharedParameter]:
        return [leaf for leaf in self.leaves if isinstance(leaf, SharedParameter)]

    @cached_property
    def data(self) -> list[Tensor]:
        """What may hold records."""
        owner = self.shared[0].owner
        others = (leaf for leaf in self.leaves if not isinstance(leaf, SharedParameter))
        return [t for t in others if not constant(t, owner)]

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return tuple({id(p): p for each in self.shared for p in each.parameters}.values())

    def unsupported(self) -> UnsupportedUseError:
        return UnsupportedUseError(self.shared[0].owner.label, self.name, self.parameters)

    def per_record(self) -> Any:
        """The result, on a row of each shared parameter for each record."""
        elementwise = expand_elementwise if self.name.strip("_") in ELEMENTWISE else None
        expand = EXPANDED.get(self.name, elementwise)
        rows = (
            None
            if expand is None
            else expand(self.name, self.args, self.kwargs, self.shared, self.data)
        )
        if rows is None or not self.shared[0].owner.may_be_records(rows):
            raise self.unsupported()
        axes = max(t.dim() for t in self.data)
        joint = self._joint_shape(axes) if expand is expand_elementwise else None

        def expanded(leaf: Any) -> Any:
            shared = isinstance(leaf, SharedParameter)
            return leaf.per_record(rows, axes, joint) if shared else leaf

        args, kwargs = pytree.tree_map(expanded, (self.args, self.kwargs))
        return self.func(*args, **kwargs)

    def _joint_shape(self, axes: int) -> torch.Size:
        """What all operands are broadcast to, records first; a constant with an axis before the
        records' is left to autograd.
        """
        joint = torch.broadcast_shapes(*(t.shape for t in self.leaves))
        if len(joint) == axes:
            return joint
        return torch.broadcast_shapes(*(t.shape for t in (*self.shared, *self.data)))

    def derived(self) -> Any:
        """The result of an operation on shared parameters and constants alone: shared, too."""
        with DisableTorchFunctionSubclass():
            result = self.func(*self.args, **self.kwargs)
        first, parameters = self.shared[0], self.parameters
        leaves, structure = pytree.tree_flatten(result)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                make = lambda values, i=i: self._remade(values)[i]  # noqa: E731
                leaves[i] = SharedParameter._wrap(
                    leaf, first.owner, make, parameters, self._alike(leaf)
                )
        return pytree.tree_unflatten(leaves, structure)

    def _remade(self, values: Values) -> list[Any]:
        def value(leaf: Any) -> Any:
            if not isinstance(leaf, SharedParameter):
                return leaf
            if id(leaf) not in values:
                values[id(leaf)] = leaf.make(values)
            return values[id(leaf)]

        args, kwargs = pytree.tree_map(value, (self.args, self.kwargs))
        return pytree.tree_leaves(self.func(*args, **kwargs))

    def _alike(self, result: Tensor) -> bool:
        """Whether all rows of a result are equal."""
        first = self.shared[0]
        if not result.dim():
            return False
        if self.name in REPEATING and (result.dim() > first.dim() or first.shape[0] == 1):
            return True
        return self.name in SAME_ROWS and first.alike and result.shape[0] == first.shape[0]


def as_parameter(leaf: Any) -> Any:
    return leaf.parameters[0] if isinstance(leaf, SharedParameter) else leaf


def constant(t: Tensor, owner: Owner) -> bool:
    if t.requires_grad:
        return False
    one_for_all = t.dim() == 0 or (t.shape[0] == 1 and owner.rows not in (None, 1))
    return one_for_all or owner.sees_constants_only or id(t) in owner.constants


def in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in IN_PLACE_OPERATORS


def expand_elementwise(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shared: Sequence[SharedParameter],
    data: Sequence[Tensor],
) -> int | None:
    """How many records an elementwise operation has; None where axes do not tell."""
    axes = max(t.dim() for t in data)
    known = [t.dim() for t in data if t.requires_grad]
    if known and max(known) < axes:  # what has more axes than the records is made of constants
        return None
    sizes = {t.shape[0] for t in data if t.dim() == axes and axes > 0}
    rows = max(sizes, default=0)
    fits = axes > 0 and sizes <= {1, rows} and all(s.fits(rows, axes) for s in shared)
    return rows if fits else None


def expand_mask(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shared: Sequence[SharedParameter],
    data: Sequence[Tensor],
) -> int | None:
    """How many records attention has whose bias is shared; None where something else is."""
    axes, rows = data[0].dim(), data[0].shape[0]
    bias = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
    only = all(
        s is bias and s.dim() <= axes and (s.dim() < axes or s.shape[0] == 1 or s.alike)
        for s in shared
    )
    return rows if only and all(t.dim() == axes and t.shape[0] == rows for t in data) else None


def expand_joined(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shared: Sequence[SharedParameter],
    data: Sequence[Tensor],
) -> int | None:
    """How many records tensors have that are joined along another axis than the first."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    axes = data[0].dim()
    dim = dim + axes + (name == "stack") if isinstance(dim, int) and dim < 0 else dim
    rows = data[0].shape[0] if axes else 0
    fits = (
        isinstance(dim, int)
        and dim > 0
        and all(t.dim() == axes and t.shape[0] == rows for t in (*data, *shared))
    )
    return rows if fits and all(s.alike or rows == 1 for s in shared) else None


EXPANDED = dict.fromkeys(("cat", "concat", "concatenate", "stack"), expand_joined) | {
    "scaled_dot_product_attention": expand_mask
}
