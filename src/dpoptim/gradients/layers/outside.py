"""Layers whose parameters are also read outside of their forward passes, such as a tied head."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from dpoptim.errors import PrivacyError
from dpoptim.gradients.backward_pass import BackwardRecorder
from dpoptim.gradients.layers.expanded import Owner
from dpoptim.gradients.layers.shared import SharedParameter


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
            for place, name, parameter in owner.places:
                vars(place)[name] = SharedParameter.of(owner, parameter)

    def end(self) -> None:
        """Its forward pass is over. Harmless when repeated."""
        for owner in self.owners:
            for place, name, _ in owner.places:
                vars(place).pop(name, None)

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
