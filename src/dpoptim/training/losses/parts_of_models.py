"""A model as a loss sees it that is taken one record at a time: calls, parameters, settings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dpoptim.errors import PrivacyError
from dpoptim.runtime.torch_internals import version_of
from dpoptim.training.losses.by_record import mapped, tensors_in

OTHER_INPUTS = (
    "per_sample takes a loss that gives the model the same for a record as for the batch; this one "
    "does not: it draws random numbers before the call, or computes inputs over the batch. Fix: "
    "draw in the data set or in collate_fn, or in the model's forward."
)
ONE_AFTER_THE_OTHER = (
    "per_sample takes a loss that gives the model what is in the batch; this one gives it what the "
    "model returned, or parameters. Fix: let the model's forward do that, and return what the loss "
    "needs."
)


class Part:
    """A model, or a module in it: calls go to whoever answers them.

    Trainable parameters are those of the record; buffers, frozen ones and settings are as they
    are. What may hold something else, or reach it, is refused.
    """

    def __init__(self, module: nn.Module, answers: "Noted | Known") -> None:
        self._module, self._answers = module, answers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._answers.call(self._module, args, kwargs)

    def __getitem__(self, place: int) -> "Part":
        return Part(self._module[place], self._answers)  # type: ignore[index]

    def parameters(self) -> Iterator[Tensor]:
        return (p for _, p in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self._answers.own(p)) for name, p in self._module.named_parameters())

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if isinstance(value, nn.Parameter):
            return self._answers.own(value)
        if isinstance(value, nn.Module):
            return Part(value, self._answers)
        if isinstance(value, Tensor) and name in self._module._buffers:
            return value
        if isinstance(value, Tensor | Mapping | list | tuple) or callable(value):
            raise PrivacyError(
                f"per_sample takes a loss that calls modules of its model; this one reads {name}, "
                "which may hold something of all records. Fix: let the model's forward return "
                "what the loss needs."
            )
        return value


@dataclass(frozen=True)
class Call:
    """A call of a module: what it was given, arguments and keywords, and what it returned."""

    module: nn.Module
    given: tuple[tuple[Any, ...], dict[str, Any]]
    returned: Any


class Noted:
    """Answers of the model itself, on the batch, which are noted.

    Attributes:
        made: calls of the model, and of modules in it.
        read: parameters that the loss read, in turn.
    """

    def __init__(self) -> None:
        self.made = list[Call]()
        self.read = dict[int, nn.Parameter]()
        self._versions = list[int]()

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(x.requires_grad for x in tensors_in((args, kwargs))):
            raise PrivacyError(ONE_AFTER_THE_OTHER)
        returned = module(*args, **kwargs)
        self.made.append(Call(module, (args, kwargs), returned))
        self._versions += map(version_of, tensors_in(((args, kwargs), returned)))
        return mapped(returned, lambda each: each)

    def own(self, p: nn.Parameter) -> Tensor:
        if p.requires_grad:
            self.read.setdefault(id(p), p)
        return p

    @property
    def written(self) -> bool:
        """Whether something was written to what the model was given or returned."""
        seen = [x for call in self.made for x in tensors_in((call.given, call.returned))]
        return self._versions != list(map(version_of, seen))


class Known:
    """Answers to the loss of one record: its rows of what the model returned, in turn.

    Args:
        calls: modules, with what they return.
        parameters: as the record has them, by id.
    """

    def __init__(
        self, calls: list[tuple[nn.Module, Any]], parameters: Mapping[int, Tensor]
    ) -> None:
        self._calls, self._parameters = calls, parameters
        self.given = list[Any]()

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = len(self.given)
        if place >= len(self._calls) or self._calls[place][0] is not module:
            raise PrivacyError(OTHER_INPUTS)
        self.given.append((args, kwargs))
        return self._calls[place][1]

    def own(self, p: nn.Parameter) -> Tensor:
        if not p.requires_grad:
            return p
        if id(p) not in self._parameters:
            raise PrivacyError(OTHER_INPUTS)
        return self._parameters[id(p)]
