"""Parameters used in a module's own forward pass: class tokens, position embeddings, scales.

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
* where gradients are switched off in a pass that is for gradients, as inside a custom function of
  autograd, whose backward pass nobody knows, nothing is made of them;
* anything else raises `UnsupportedUseError`, upon which the whole module goes through the
  fallback.

Nothing depends on having seen every use: whatever reaches the parameter by another way runs into
its hook, and is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpoptim.errors import PrivacyError
from dpoptim.gradients.backward_pass import RuleFunction
from dpoptim.gradients.layers.expanded import (
    ExpandParameter,
    Owner,
    Parameter,
    Transposed,
    Values,
)
from dpoptim.gradients.layers.folded import FoldedRule
from dpoptim.gradients.layers.made import layer_of_made_weights
from dpoptim.gradients.layers.operations import (
    ELEMENTWISE,
    EXPANDED,
    LIKE_ANOTHER,
    LIKE_ITS_ROWS,
    OUT_OF_PLACE,
    REPEATING,
    SAME_ROWS,
    TURNING,
    VIEWS,
    expand_elementwise,
    in_place,
    moved_axes,
    rows_of_copies,
    set_where,
)
from dpoptim.gradients.layers.rewritten import rewritten
from dpoptim.gradients.layers.rule import AnyRule
from dpoptim.runtime.torch_internals import DisableTorchFunctionSubclass, pytree


class UnsupportedUseError(PrivacyError):
    """A bare parameter met data in an operation that does not tell which gradient is whose."""

    def __init__(self, label: str, operation: str, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(
            f"a parameter of module {label!r} meets data in {operation!r}, where it cannot be told "
            "record from record. Fix: use it inside its module's own forward pass, with tensors "
            "whose first axis is the batch.",
            layer=label,
        )
        self.parameters = parameters


class SharedParameter(torch.Tensor):
    """A parameter that all records share, or what was made of such parameters and of constants."""

    owner: Owner
    make: Callable[[Values], Tensor]  # computes the tensor again from the parameters
    parameters: tuple[nn.Parameter, ...]  # that it was made of
    copies: int  # of equal runs of rows, one for each record; 0: not copied

    @classmethod
    def of(cls, owner: Owner, parameter: nn.Parameter) -> "SharedParameter":
        return cls._wrap(parameter, owner, Parameter(id(parameter)), (parameter,), 0)

    @classmethod
    def _wrap(
        cls,
        value: Tensor,
        owner: Owner,
        make: Callable[[Values], Tensor],
        parameters: tuple[nn.Parameter, ...],
        copies: int,
    ) -> "SharedParameter":
        shared = value.as_subclass(cls)
        shared.owner, shared.make, shared.parameters = owner, make, parameters
        shared.copies = copies
        return shared

    @property
    def itself(self) -> bool:
        """Whether it is a parameter, and not made of some."""
        return isinstance(self.make, Parameter)

    @property
    def turned(self) -> "SharedParameter | None":
        """The parameter whose transposition it is, if it is one."""
        turned = isinstance(self.make, Transposed)
        return SharedParameter.of(self.owner, self.parameters[0]) if turned else None

    @property
    def rows_are_equal(self) -> bool:
        """Whether all rows are equal: there is one for each record."""
        return self.copies > 0 and self.copies == self.shape[0]

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
        alone = not operation.data
        operation = operation.repeatable() if alone else operation
        if operation.in_place:
            raise operation.unsupported()
        if alone:
            return operation.derived()
        itself = all(each.itself for each in operation.shared)
        if itself and operation.weight_first:
            return F.linear(args[1].mT, args[0]).mT
        given = pytree.tree_map(as_parameter, (args, kwargs))
        found = owner.layer(name, *given) if itself else layer_of_made_weights(operation)
        return operation.per_record() if found is None else run_layer(owner, *found)

    def plain(self) -> Tensor:
        with DisableTorchFunctionSubclass():
            return self.detach().as_subclass(Tensor)

    def fits(self, rows: int, axes: int) -> bool:
        """Whether its first axis tells which of so many rows is whose, among so many axes."""
        if self.dim() != axes:
            return self.dim() < axes
        if self.shape[0] == 1:
            return True
        records = self.owner.records_on(rows)
        own = self.copies > 0 and records is not None and self.copies % max(1, records) == 0
        return own and self.shape[0] == rows

    def per_record(self, rows: int, axes: int, joint: torch.Size | None = None) -> Tensor:
        """As many rows as the data, each its record's: shape (rows, ...) of so many axes.

        Under hooks; in an elementwise operation of a joint shape, of that one.
        """
        value, make = self.plain(), self.make
        records = self.owner.records_on(rows) or rows
        if value.dim() == axes and value.shape[0] == rows and rows != 1:
            of_one = 1 if self.rows_are_equal else rows // records  # all runs are equal
            value, original = value[:of_one], make
            make = lambda values: original(values)[:of_one]  # noqa: E731
        shape = joint or torch.Size((rows, *torch.broadcast_shapes(value.shape, [1] * axes)[1:]))
        return ExpandParameter.apply(
            self.owner, make, self.parameters, value, records, shape, *self.parameters
        )


def run_layer(owner: Owner, rule: AnyRule, layer: nn.Module, x: Tensor) -> Tensor:
    """The layer that a function amounts to, by its rule."""
    if owner.has_windows(len(x)):
        rule = FoldedRule(rule, len(x) // (owner.rows or 1))
    x = rule.prepare(layer, owner.label, x, owner.rows)
    out: Tensor = RuleFunction.apply(
        owner.recorder, rule, layer, owner.label, x, *layer.parameters()
    )
    return out


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
        """Tensors that may hold records."""
        owner = self.shared[0].owner
        others = (leaf for leaf in self.leaves if not isinstance(leaf, SharedParameter))
        found = [t for t in others if not owner.is_constant(t)]
        if owner.windows and self.name == "__getitem__":
            # Rows that data choose are no copies: they fit nobody.
            return [t for t in found if t.is_floating_point()]
        return found

    @property
    def in_place(self) -> bool:
        """Whether a shared parameter, or what the caller gives for the result, is written."""
        first = self.args[0] if self.args else None
        return "out" in self.kwargs or (in_place(self.name) and isinstance(first, SharedParameter))

    @property
    def weight_first(self) -> bool:
        """Whether it is ``weight @ x``, for each record's matrix ``x``."""
        if self.name not in ("matmul", "__matmul__") or len(self.args) != 2:
            return False
        weight, x = self.args
        return isinstance(weight, SharedParameter) and weight.dim() == 2 and x.dim() > 2

    def repeatable(self) -> "Operation":
        """The same on constants, where possible without random numbers and in-place changes."""
        if self.name == "dropout":  # its mask is a constant that all share
            mask = self.func(torch.ones_like(self.shared[0].plain()), *self.args[1:], **self.kwargs)
            return Operation(OUT_OF_PLACE["mul_"], "mul", (self.shared[0], mask), {})
        if self.shared[0].owner.windows and self.name in OUT_OF_PLACE:
            # Python binds the name anew. Whether somebody still has the old one, a trial shows.
            func = OUT_OF_PLACE[self.name]
            return Operation(func, func.__name__, self.args, self.kwargs)
        return self

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return tuple({id(p): p for each in self.shared for p in each.parameters}.values())

    def unsupported(self) -> UnsupportedUseError:
        return UnsupportedUseError(self.shared[0].owner.label, self.name, self.parameters)

    def per_record(self) -> Any:
        """The result, on a row of each shared parameter for each record."""
        if self.shared[0].owner.behind_autograd:
            raise self.unsupported()
        if self.name == "__setitem__" and set_where(self):
            return None
        if (result := rewritten(self)) is not None:
            return result
        otherwise = expand_elementwise if self.name.strip("_") in ELEMENTWISE else rows_of_copies
        for expand in (EXPANDED.get(self.name, otherwise), rows_of_copies):
            if (rows := expand(self)) is not None:
                break
        if rows is None or any(s.owner.records_on(rows) is None for s in self.shared):
            raise self.unsupported()
        axes = max(t.dim() for t in self.data)
        joint = self._joint_shape(axes) if expand is expand_elementwise else None

        def expanded(leaf: Any) -> Any:
            if not isinstance(leaf, SharedParameter):
                return leaf
            return leaf.per_record(rows, leaf.dim() if expand is rows_of_copies else axes, joint)

        args, kwargs = pytree.tree_map(expanded, (self.args, self.kwargs))
        return self.func(*args, **kwargs)

    def _joint_shape(self, axes: int) -> torch.Size:
        """The operands' joint shape, records first; None: constants have an axis before them."""
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
                if first.owner.behind_autograd and leaf.is_floating_point():
                    raise self.unsupported()
                leaves[i] = SharedParameter._wrap(
                    *(leaf, first.owner, self._make(i, leaf), parameters, self._copies(leaf))
                )
        return pytree.tree_unflatten(leaves, structure)

    def _make(self, place: int, result: Tensor) -> Callable[[Values], Tensor]:
        """How one of the results is made, maybe a parameter again (``p.squeeze(1)[:, None]``)."""
        parameter = self.parameters[0]
        with DisableTorchFunctionSubclass():
            if self.name in VIEWS and result.requires_grad:
                if result.is_set_to(parameter):
                    return Parameter(id(parameter))
                if parameter.dim() == 2 and result.is_set_to(parameter.detach().mT):
                    return Transposed(id(parameter))
        return partial(self._remade, place)

    def _remade(self, place: int, values: Values) -> Any:
        """One of the results, from other values of the parameters."""

        def value(leaf: Any) -> Any:
            if not isinstance(leaf, SharedParameter):
                return leaf
            if id(leaf) not in values:
                values[id(leaf)] = leaf.make(values)
            return values[id(leaf)]

        args, kwargs = pytree.tree_map(value, (self.args, self.kwargs))
        return pytree.tree_leaves(self.func(*args, **kwargs))[place]

    def _copies(self, result: Tensor) -> int:
        """How many equal runs of rows a result has, one after the other; 0: unknown."""
        first = self.shared[0]
        if not result.dim():
            return 0
        if self.name in REPEATING:
            if result.dim() > first.dim() or first.shape[0] == 1:
                return result.shape[0]
            return max(1, first.copies) * (result.shape[0] // max(1, first.shape[0]))
        if self.name in TURNING:
            return 0 if 0 in moved_axes(self.name, self.args, first.dim()) else first.copies
        if self.name.strip("_") in ELEMENTWISE:
            return self._copies_of_operands(result)
        whole = first.copies > 0 and result.shape[0] % first.copies == 0
        return first.copies if whole and self.name in SAME_ROWS | LIKE_ITS_ROWS else 0

    def _copies_of_operands(self, result: Tensor) -> int:
        """Copies in an elementwise result: those of all operands that have several rows."""
        several = [t for t in self.leaves if t.dim() == result.dim() and t.shape[0] != 1]
        counts = {t.copies if isinstance(t, SharedParameter) else 0 for t in several}
        return counts.pop() if len(counts) == 1 else 0


def as_parameter(leaf: Any) -> Any:
    return leaf.parameters[0] if isinstance(leaf, SharedParameter) else leaf
