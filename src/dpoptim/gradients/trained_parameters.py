"""The parameters of a model that train: their places, layers and precision."""

from collections.abc import Collection, Mapping

from torch import nn

from dpoptim.errors import PrivacyError
from dpoptim.gradients.arithmetic.precision import NARROW, computed_in
from dpoptim.gradients.arithmetic.products import UNIT_ROUNDOFF
from dpoptim.gradients.watch.contents import Contents


class TrainedParameters:
    """Trained parameters of a model, in its order.

    Args:
        model: any module.
        tied: parameters of the model that count as uses of another one (of the same shape), maybe
            rounded to another dtype.

    Attributes:
        names, parameters: of those that require a gradient.
        layers: the module that each belongs to, by name.
        places: of every parameter, by id; tied ones have the place of the other one.
        entries: of all together.
        narrowest: of the dtypes that their gradients are computed in.
        stored_narrow: the first that is stored, or used, in bfloat16 or float16, if any.

    Raises:
        ValueError: there is none.
        PrivacyError: one has a dtype whose rounding is not known.
    """

    def __init__(self, model: nn.Module, tied: Mapping[nn.Parameter, nn.Parameter]) -> None:
        named = trained(model, tied)
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.layers = [name.rpartition(".")[0] for name in self.names]
        self.places = {id(p): i for i, p in enumerate(self.parameters)}
        self.places |= {
            id(other): self.places[id(p)] for other, p in tied.items() if id(p) in self.places
        }
        self.entries = sum(p.numel() for p in self.parameters)
        used = [
            *named,
            *(
                (self.names[self.places[id(other)]], other)
                for other in tied
                if id(other) in self.places
            ),
        ]
        self.narrowest = min(
            (computed_in(p.dtype) for _, p in used), key=lambda dtype: dtype.itemsize
        )
        self.stored_narrow = next((name for name, p in used if p.dtype in NARROW), None)
        self._of_module: dict[nn.Module, dict[str, int]] = {}

    def places_of(self, module: nn.Module) -> dict[str, int]:
        """The names of a module's parameters in it; they stay the same while it is attached."""
        places = self._of_module.get(module)
        if places is None:
            named = module.named_parameters(remove_duplicate=False)
            places = {key: self.places[id(p)] for key, p in named if id(p) in self.places}
            self._of_module[module] = places
        return places


def trained(model: nn.Module, tied: Collection[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    """A model's trainable parameters that stand for themselves, of dtypes with known rounding."""
    named = [(name, p) for name, p in Contents.of(model).trainable() if p not in tied]
    if not named:
        raise ValueError(
            "model has no parameter that requires a gradient; there is nothing to train."
        )
    for name, p in named:
        if computed_in(p.dtype) not in UNIT_ROUNDOFF:
            raise PrivacyError(
                f"parameter {name!r} is {p.dtype}; parameters that train are float32, float64, "
                "bfloat16 or float16. Fix: freeze it, or model.float()."
            )
    return named
