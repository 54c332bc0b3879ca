"""Parameters that a model's own code uses, which all records share (see `shared`).

Those of a module in its own forward pass; and those of layers that are also read outside of theirs,
such as a tied head.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from dpoptim.errors import PrivacyError
from dpoptim.gradients.backward_pass import BackwardRecorder
from dpoptim.gradients.hooks.computed_weights import computed_weights
from dpoptim.gradients.hooks.forwards import forward_of, replace_forward
from dpoptim.gradients.isolation import Isolation
from dpoptim.gradients.layers.expanded import Owner
from dpoptim.gradients.layers.folded import FoldedLayer
from dpoptim.gradients.layers.shared import SharedParameter, UnsupportedUseError
from dpoptim.gradients.layers.vmapped import VmapLayer
from dpoptim.runtime.torch_internals import pytree


def for_records(x: Any, rows: int | None) -> Any:
    """``x``, or a row per record of a shared parameter that a hooked layer is applied to."""
    if not isinstance(x, SharedParameter):
        return x
    count = x.shape[0] if x.rows_are_equal else rows
    if count is None or x.dim() == 0 or (x.shape[0] != 1 and not x.rows_are_equal):
        raise UnsupportedUseError(x.owner.label, "a layer of its own", x.parameters)
    return x.per_record(count, x.dim())


class BareParameters:
    """Runs a module with parameters of its own, shared among the records of its input.

    Args:
        isolation: of the model.
        sees_records: whether its input has records; else it is made of constants, and what comes
            out is shared as well.
    """

    hooks_children = True

    def __init__(
        self,
        recorder: BackwardRecorder,
        module: nn.Module,
        label: str,
        trainable: Sequence[str],
        isolation: Isolation,
        *,
        sees_records: bool = True,
    ) -> None:
        self.module, self.original = module, forward_of(module)
        self.owner = Owner(recorder, label, module, windows=isolation.windows)
        self._untried = isolation.untried
        vectorised = FoldedLayer if label in isolation.folded else VmapLayer
        self.fallback = vectorised(recorder, module, label, trainable)
        self.sees_records = sees_records
        # decided by the first call, on public grounds: which operations there are
        self.falls_back: bool | None = None

    def __call__(self, rows: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.falls_back:
            return self.fallback(rows, args, kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if self._tells_nothing(rows, tensors):
            with suppress(PrivacyError):  # which vectorising does not serve either
                return self.fallback(rows, args, kwargs)
        self.owner.see_constants()
        self.owner.begin(rows)
        self.owner.sees_constants_only = not self.sees_records or not tensors
        self.owner.first_axes = {tensor.shape[0] for tensor in tensors if tensor.dim()}
        try:
            with self._shared_parameters():
                outputs = self.original(*args, **kwargs)
        except UnsupportedUseError as error:
            mine = {id(p) for _, _, p in self.owner.places} & {id(p) for p in error.parameters}
            if self.falls_back is False or not mine:
                raise
            self.falls_back = True
        else:
            self.falls_back = False
            return outputs
        return self.fallback(rows, args, kwargs)

    def _tells_nothing(self, rows: int | None, tensors: Sequence[Tensor]) -> bool:
        """Whether another axis, as long as that of records, might be taken for it untried.

        Another call decides then.
        """
        others = [tensor.shape[1:] for tensor in tensors]
        others += [parameter.shape for _, _, parameter in self.owner.places]
        undecided = self.falls_back is None and self._untried and self.sees_records
        return undecided and any(rows in shape for shape in others)

    @contextmanager
    def _shared_parameters(self) -> Iterator[None]:
        """While parameters, and what weights are computed of, are `SharedParameter`."""
        with ExitStack() as around:
            around.callback(setattr, self.owner, "sees_constants_only", False)
            around.callback(take_off, self.owner)
            put_on(self.owner)
            for chain in chains_of(self.module):
                around.callback(replace_forward(chain, Making(self.owner, forward_of(chain))))
            if (computed := computed_weights(self.module)) is not None:
                around.enter_context(computed.made_in(self.owner.making))
            yield


def put_on(owner: Owner) -> None:
    """Put what looks at every operation in the places of the parameters."""
    for place, name, parameter in owner.places:
        vars(place)[name] = SharedParameter.of(owner, parameter)


def take_off(owner: Owner) -> None:
    """Give the parameters their places back. Harmless when repeated."""
    for place, name, _ in owner.places:
        vars(place).pop(name, None)


class Making:
    """The forward pass of what computes a weight: see `Owner.making`."""

    def __init__(self, owner: Owner, forward: Callable[..., Any]) -> None:
        self._owner, self._forward = owner, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._owner.making():
            return self._forward(*args, **kwargs)


def chains_of(module: nn.Module) -> list[nn.Module]:
    """The chains of parametrisations, each of which computes a weight."""
    return [*module.get_submodule("parametrizations").children()] if is_parametrized(module) else []


class OutsideUseError(PrivacyError):
    """A parameter's gradient came by another way than through its layer."""


class ReadOutside:
    """Gives the model such parameters as `SharedParameter`, and their layers the real ones.

    Args:
        layers: with their names.
    """

    def __init__(
        self, recorder: BackwardRecorder, layers: Iterable[tuple[str, nn.Module]], *, windows: bool
    ) -> None:
        self.owners = [Owner(recorder, name, layer, windows=windows) for name, layer in layers]

    def begin(self, rows: int | None) -> None:
        """The model is given so many records."""
        for owner in self.owners:
            owner.begin(rows)
            put_on(owner)

    def end(self) -> None:
        """Its forward pass is over. Harmless when repeated."""
        for owner in self.owners:
            take_off(owner)

    @contextmanager
    def hidden_from(self, layer: nn.Module) -> Iterator[None]:
        """While a layer's own forward pass runs."""
        shown = {
            name: vars(layer).pop(name) for name in [*layer._parameters] if name in vars(layer)
        }
        try:
            yield
        finally:
            vars(layer).update(shown)
