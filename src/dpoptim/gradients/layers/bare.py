"""Parameters that a module uses in its own forward pass: class tokens, position embeddings, scales.

While the forward pass of their owner runs, such parameters are replaced by `SharedParameter`, a tensor that looks at
every operation it takes part in:

* with parameters and constants only, the result is again a `SharedParameter`, which remembers how it was made;
* with data, in one of the operations where it is plain which row belongs to which record (elementwise ones, and joining
  along another axis than the first), it is spread out to one row per record first, by `Spread`. Output row i then
  depends on row i alone, so the gradient of that row is record i's own;
* anything else raises `UnsupportedUseError`, upon which the whole module goes through the fallback.

Nothing depends on having seen every use: whatever reaches the parameter by another way runs into its hook, and is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from dpoptim.errors import PrivacyError
from dpoptim.gradients.books import Books, Entry, refuse_autocast, refuse_nested_backward
from dpoptim.gradients.contributions import Contribution, Direct
from dpoptim.gradients.layers.fallback import FallbackLayer
from dpoptim.gradients.layers.runner import holder

ELEMENTWISE = {  # names of functions and methods, without the underscores of operators and in-place variants
    *("add", "radd", "iadd", "sub", "subtract", "rsub", "isub", "mul", "multiply", "rmul", "imul"),
    *("div", "divide", "true_divide", "truediv", "rtruediv", "itruediv", "rdiv", "pow", "rpow"),
    *("where", "maximum", "minimum", "addcmul", "addcdiv", "lerp"),
}
IN_PLACE_OPERATORS = {"__iadd__", "__isub__", "__imul__", "__itruediv__"}
JOINING = {"cat", "concat", "concatenate", "stack"}
REPEATING = {"expand", "repeat", "broadcast_to", "tile"}
SAME_ROWS = {"view", "reshape", "contiguous", "clone", "to", "type", "float", "double"}  # these keep row-major order
LIKE_ANOTHER: dict[str, Callable[[Tensor], Any]] = {
    "expand_as": lambda t: t.shape,
    "type_as": lambda t: t.dtype,
    "to": lambda t: t.dtype,
}

Values = dict[int, Tensor]  # by id: parameters, and what was made of them so far


class UnsupportedUseError(PrivacyError):
    """A bare parameter met data in an operation that does not tell which gradient is whose."""

    def __init__(self, label: str, operation: str, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(
            f"a parameter of module {label!r} meets data in {operation!r}, where it cannot be told record from record. "
            "Fix: use it inside its module's own forward pass, with tensors whose first axis is the batch."
        )
        self.parameters = parameters


class Owner:
    """The module whose parameters are shared, as its shared tensors know it."""

    def __init__(self, books: Books, label: str, module: nn.Module) -> None:
        self.books, self.label, self.module = books, label, module
        self.parameters = {name: p for name, p in module._parameters.items() if p is not None and p.requires_grad}
        self.constants: set[int] = set()
        self._holders: dict[tuple[int, ...], nn.Module] = {}

    def see_constants(self) -> None:
        """Tensors of the module that are no data: buffers and frozen parameters."""
        frozen = (p for p in self.module.parameters() if not p.requires_grad)
        self.constants = {id(t) for t in (*self.module.buffers(), *frozen)}

    def holder(self, parameters: Sequence[nn.Parameter]) -> nn.Module:
        """What entries in the books about just these parameters are about."""
        key = tuple(map(id, parameters))
        if key not in self._holders:
            self._holders[key] = holder({str(i): p for i, p in enumerate(parameters)})
        return self._holders[key]


@dataclass(frozen=True)
class Parameter:
    """How a parameter is made of the parameters: it is one of them."""

    key: int

    def __call__(self, values: Values) -> Tensor:
        return values[self.key]


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
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in LIKE_ANOTHER and len(args) == 2 and isinstance(args[1], Tensor):
            args = (args[0], LIKE_ANOTHER[name](args[1]))  # the other tensor gives its shape or dtype only
            name = "expand" if name == "expand_as" else "to"
            func = getattr(torch.Tensor, name)
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        shared = [leaf for leaf in leaves if isinstance(leaf, SharedParameter)]
        owner = shared[0].owner
        data = [t for t in leaves if not isinstance(t, SharedParameter) and not constant(t, owner)]
        parameters = tuple({id(p): p for s in shared for p in s.parameters}.values())
        unsupported = UnsupportedUseError(owner.label, name, parameters)
        if "out" in kwargs or (in_place(name) and args and isinstance(args[0], SharedParameter)):
            raise unsupported
        if not data:
            return derive(func, name, args, kwargs, shared, parameters)
        spread = spread_elementwise if name.strip("_") in ELEMENTWISE else spread_joined if name in JOINING else None
        rows = None if spread is None else spread(name, args, kwargs, shared, data)
        if rows is None:
            raise unsupported
        axes = max(t.dim() for t in data)
        args, kwargs = pytree.tree_map(
            lambda leaf: leaf.per_record(rows, axes) if isinstance(leaf, SharedParameter) else leaf, (args, kwargs)
        )
        return func(*args, **kwargs)

    def plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().as_subclass(Tensor)

    def per_record(self, rows: int, axes: int) -> Tensor:
        """One row per record: shape (rows, ...) of so many axes, on the books."""
        value, make = self.plain(), self.make
        if value.dim() == axes and value.shape[0] == rows and rows != 1:
            value, original = value[:1], make  # all rows are equal
            make = lambda values: original(values)[:1]  # noqa: E731
        return Spread.apply(self.owner, make, self.parameters, value, rows, axes, *self.parameters)


def constant(t: Tensor, owner: Owner) -> bool:
    return not t.requires_grad and (t.dim() == 0 or id(t) in owner.constants)


def in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in IN_PLACE_OPERATORS


def derive(
    func: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shared: list[SharedParameter],
    parameters: tuple[nn.Parameter, ...],
) -> Any:
    """An operation on shared parameters and constants alone."""
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)

    def remake(values: Values) -> list[Any]:
        def value(leaf: Any) -> Any:
            if not isinstance(leaf, SharedParameter):
                return leaf
            if id(leaf) not in values:
                values[id(leaf)] = leaf.make(values)
            return values[id(leaf)]

        again = pytree.tree_map(value, (args, kwargs))
        return pytree.tree_leaves(func(*again[0], **again[1]))

    first = shared[0]
    leaves, structure = pytree.tree_flatten(result)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            repeated = name in REPEATING and leaf.dim() > 0 and (leaf.dim() > first.dim() or first.shape[0] == 1)
            kept = name in SAME_ROWS and first.alike and leaf.dim() > 0 and leaf.shape[0] == first.shape[0]
            make = lambda values, i=i: remake(values)[i]  # noqa: E731
            leaves[i] = SharedParameter._wrap(leaf, first.owner, make, parameters, repeated or kept)
    return pytree.tree_unflatten(leaves, structure)


def spread_elementwise(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], shared: Sequence[SharedParameter], data: Sequence[Tensor]
) -> int | None:
    """How many records an elementwise operation has; None where axes do not tell."""
    axes = max(t.dim() for t in data)
    sizes = {t.shape[0] for t in data if t.dim() == axes and axes > 0}
    rows = max(sizes, default=0)
    fits = axes > 0 and sizes <= {1, rows}
    for s in shared:
        fits = fits and (s.dim() < axes or (s.dim() == axes and (s.shape[0] == 1 or (s.shape[0] == rows and s.alike))))
    return rows if fits else None


def spread_joined(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], shared: Sequence[SharedParameter], data: Sequence[Tensor]
) -> int | None:
    """How many records tensors have that are joined along another axis than the first."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    axes = data[0].dim()
    dim = dim + axes + (name == "stack") if isinstance(dim, int) and dim < 0 else dim
    rows = data[0].shape[0] if axes else 0
    fits = isinstance(dim, int) and dim > 0 and all(t.dim() == axes and t.shape[0] == rows for t in (*data, *shared))
    return rows if fits and all(s.alike or rows == 1 for s in shared) else None


class Spread(torch.autograd.Function):
    """One row per record of what all records share. Inputs: owner, recipe, its parameters, value, rows, axes, and the
    parameters again (for the graph's edges)."""

    @staticmethod
    def forward(
        ctx: Any,
        owner: Owner,
        make: Callable[[Values], Tensor],
        parameters: tuple[nn.Parameter, ...],
        value: Tensor,
        rows: int,
        axes: int,
        *edges: Tensor,
    ) -> Tensor:
        refuse_autocast(owner.label, value)
        ctx.owner, ctx.make, ctx.parameters, ctx.shape = owner, make, parameters, value.shape
        ctx.forward_task = torch._C._current_graph_task_id()
        ctx.save_for_backward(*edges)
        leading = value.shape[1:] if value.dim() == axes else value.shape
        return value.reshape(1, *[1] * (axes - 1 - len(leading)), *leading).expand(rows, *[-1] * (axes - 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[None, ...]:
        refuse_nested_backward(ctx.owner.label, ctx.forward_task)
        refuse_autocast(ctx.owner.label, g)
        owner, make, parameters = ctx.owner, ctx.make, ctx.parameters
        values, per_record = ctx.saved_tensors, g.reshape(g.shape[0], *ctx.shape)
        owner.books.enter(
            Entry(
                owner.label,
                owner.holder(parameters),
                g.shape[0],
                lambda: pull_back(owner.label, make, parameters, values, per_record),
            )
        )
        return (None,) * (6 + len(parameters))


def pull_back(
    label: str, make: Callable[[Values], Tensor], parameters: Sequence[nn.Parameter], values: Sequence[Tensor], g: Tensor
) -> dict[str, Contribution]:
    """Per-record gradients of the parameters, from those of what was made of them: ``g`` of shape (B, ...)."""
    if isinstance(make, Parameter):
        return {"0": Direct(g.reshape(len(g), -1))}

    def one(g: Tensor) -> tuple[Tensor, ...]:
        def again(*values: Tensor) -> Tensor:
            return make(dict(zip(map(id, parameters), values, strict=True)))

        return tuple(torch.func.vjp(again, *values)[1](g))

    try:
        rows = torch.func.vmap(one, randomness="error")(g)
    except RuntimeError as error:
        # The text of torch's error speaks of operators, never of values.
        raise PrivacyError(
            f"what module {label!r} makes of its parameters before they meet data cannot be differentiated record by "
            f"record: {str(error).splitlines()[0].rstrip('.')}. Fix: apply dropout after parameters and data have met."
        ) from error
    return {str(i): Direct(row.reshape(len(row), -1)) for i, row in enumerate(rows)}


def for_records(x: Any, rows: int | None) -> Any:
    """``x``, or one row per record where it is a shared parameter that a booked layer is applied to."""
    if not isinstance(x, SharedParameter):
        return x
    count = x.shape[0] if x.alike else rows
    if count is None or x.dim() == 0 or (x.shape[0] != 1 and not x.alike):
        raise UnsupportedUseError(x.owner.label, "a layer of its own", x.parameters)
    return x.per_record(count, x.dim())


class BareParameters:
    """Runs a module that uses parameters of its own, which are shared among the records of its input."""

    books_children = True

    def __init__(self, books: Books, module: nn.Module, label: str, trainable: Sequence[str]) -> None:
        self.module, self.original = module, module.forward
        self.owner = Owner(books, label, module)
        self.fallback = FallbackLayer(books, module, label, trainable)
        self.falls_back: bool | None = None  # decided by the first call, on public grounds: which operations there are

    def __call__(self, rows: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.falls_back:
            return self.fallback(rows, args, kwargs)
        own = vars(self.module)
        self.owner.see_constants()
        try:
            for name, parameter in self.owner.parameters.items():
                own[name] = SharedParameter.of(self.owner, parameter)
            outputs = self.original(*args, **kwargs)
        except UnsupportedUseError as error:
            mine = {id(p) for p in self.owner.parameters.values()} & {id(p) for p in error.parameters}
            if self.falls_back is False or not mine:
                raise
            self.falls_back = True
        else:
            self.falls_back = False
            return outputs
        finally:
            for name in self.owner.parameters:
                own.pop(name, None)
        return self.fallback(rows, args, kwargs)
