"""The one list of optimizers that estimators and the command line train by.

Names are known without importing PyTorch. Every optimizer sees released gradients alone, so none
costs privacy, and `dpoptim.attach` takes any first-order one, listed here or not.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dpoptim.arguments import one_of, positive_number, real_number

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer as it is listed.

    Attributes:
        name: in arguments and on the command line.
        words: for people.
        path: of its class, ``"module:Class"``.
        defaults: of the settings that it has beside the learning rate.
        adaptive: whether it divides gradients by their size, so that its learning rate says how far
            each weight moves in a step.
    """

    name: str
    words: str
    path: str
    defaults: Mapping[str, Any]
    adaptive: bool

    def with_settings(self, **given: Any) -> "OptimizerSettings":
        """Return the settings: those that are not None, and defaults for the others.

        Raises:
            ValueError: one that this optimizer does not have, or that is out of range.
        """
        settings = dict(self.defaults)
        for name, value in given.items():
            if value is None:
                continue
            if name not in settings:
                owners = [each.name for each in OPTIMIZERS.values() if name in each.defaults]
                raise ValueError(
                    f"{name}={value!r} is no setting of optimizer={self.name!r}, which has "
                    f"{', '.join(settings)}. Fix: leave out {name}, or use optimizer="
                    f"{' or '.join(map(repr, owners))}."
                )
            settings[name] = CHECKS[name](name, value)
        return OptimizerSettings(self, settings)


@dataclass(frozen=True)
class OptimizerSettings:
    """An optimizer and its public settings, all but the learning rate."""

    kind: OptimizerKind
    settings: Mapping[str, Any]

    @property
    def momentum(self) -> float:
        """The share of each move that is made again in the next; 0 where the rate is of both."""
        return 0.0 if self.kind.adaptive else float(self.settings.get("momentum", 0.0))

    def make(self, parameters: Iterable[Any], learning_rate: float) -> "torch.optim.Optimizer":
        """Return the optimizer of parameters, or of groups of them."""
        module, _, name = self.kind.path.partition(":")
        made: torch.optim.Optimizer = getattr(import_module(module), name)(
            parameters, lr=positive_number("learning_rate", learning_rate), **self.settings
        )
        return made

    def __str__(self) -> str:
        """For people, such as ``SGD, momentum 0.9``."""
        said = (f"{name} {in_words(value)}" for name, value in self.settings.items())
        return ", ".join((self.kind.words, *said))


def in_words(value: float | tuple[float, ...]) -> str:
    values = value if isinstance(value, tuple) else (value,)
    return " and ".join(f"{each:g}" for each in values)


def decay(name: str, value: object) -> float:
    """Return a number in [0, 1)."""
    number = real_number(name, value)
    if not 0 <= number < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value!r}.")
    return number


def two_decays(name: str, value: object) -> tuple[float, float]:
    """Return two numbers in [0, 1)."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"{name} must be two numbers such as (0.9, 0.999), got {value!r}.")
    return decay(f"{name}[0]", value[0]), decay(f"{name}[1]", value[1])


CHECKS: Mapping[str, Callable[[str, object], Any]] = {"momentum": decay, "betas": two_decays}
ADAM = {"betas": (0.9, 0.999)}
OPTIMIZERS = {
    kind.name: kind
    for kind in (
        OptimizerKind("sgd", "SGD", "torch.optim:SGD", {"momentum": 0.9}, adaptive=False),
        OptimizerKind("adam", "Adam", "torch.optim:Adam", ADAM, adaptive=True),
        OptimizerKind("adam_bc", "AdamBC", "dpoptim.optim:AdamBC", ADAM, adaptive=True),
    )
}


def optimizer(name: str, **settings: Any) -> OptimizerSettings:
    """Return a listed optimizer by its name, with the settings that are not None.

    Raises:
        ValueError: there is none of this name, or it has no such setting.
    """
    one_of("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name].with_settings(**settings)
